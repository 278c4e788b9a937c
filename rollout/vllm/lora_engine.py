"""The vLLM engine for many adapters of one base model: each snapshot is a LoRA of vLLM, which it loads when it is needed."""

import logging
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from dataproto.errors import end_after
from rollout.adapters import Adapter, AdapterConfig, AdapterRequest, write_adapter
from rollout.adapters.adapter import DOWN
from rollout.adapters.adapter_files import PREFIX
from rollout.adapters.packed_tensors import pack
from rollout.engine import Request
from rollout.vllm.lora_slots import SlotWrites
from rollout.vllm.versions.process_settings import set_environment
from rollout.vllm.versions.vllm_patches import allow_adapted_heads
from rollout.vllm.vllm_engine import VLLMEngine

log = logging.getLogger(__name__)
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be started with."""
Handed = WeakValueDictionary[int, Adapter]
"""Adapters by vLLM's numbers of them."""


class VLLMAdapterEngine(VLLMEngine):
    """A `VLLMEngine` whose requests are `AdapterRequest`, with adapters that have files.

    Log-probs are those of the model's softmax over the whole vocabulary: ids of media are never drawn, but they are not masked.
    vLLM keeps prefixes of different adapters apart; features of images, which no adapter changes, are shared. Scores of prompts
    (`AdapterRequest.scores`) are not computed.
    """

    def __init__(self, model_path: str, max_lora_rank: int, max_adapters: int = 8, **options: Any) -> None:
        """Starts vLLM.

        Args:
            max_lora_rank: of all adapters.
            max_adapters: that are sampled from in one step; requests for others wait.
            options: of `VLLMEngine`.
        """
        set_environment()
        allow_adapted_heads()
        rank = next((each for each in LORA_RANKS if each >= max_lora_rank), LORA_RANKS[-1])
        super().__init__(model_path, enable_lora=True, max_lora_rank=rank, max_loras=max_adapters, **options)
        self.sampler.undrawn_ids, self.sampler.banned_ids = self.sampler.banned_ids, ()
        self.banned_ids = ()
        self._loras: WeakKeyDictionary[Adapter, Any] = WeakKeyDictionary()
        self._loaded = 0
        self._handed: Handed = WeakValueDictionary()
        self.llm.collective_rpc(hand_over, args=(self._handed,))
        # On a CPU vLLM computes rows without an adapter with the one in its last place: they get an adapter of zeros.
        self._nothing: Any = None
        if self.device.type == "cpu":
            self._zeros = TemporaryDirectory(prefix="no-adapter-")
            self._write_zeros(Path(self._zeros.name))
            self._nothing = self._new_lora(self._zeros.name)

    def _adapter_of(self, request: Request) -> Any:
        adapter = cast(AdapterRequest, request).adapter
        if adapter is None:
            return self._nothing
        if adapter not in self._loras:
            self._loras[adapter] = self._new_lora(str(adapter.directory))
            self._handed[self._loaded] = adapter
        return self._loras[adapter]

    def _new_lora(self, path: str) -> Any:
        from vllm.lora.request import LoRARequest

        self._loaded += 1
        return LoRARequest(f"adapter-{self._loaded}", self._loaded, path)

    def _write_zeros(self, directory: Path) -> None:
        text, rank = self.llm.model_config.hf_config.get_text_config(), LORA_RANKS[0]
        pair = torch.zeros(rank, int(text.hidden_size)), torch.zeros(int(text.vocab_size), rank)
        write_adapter(Adapter(AdapterConfig(rank), {self.family.head: pair}), directory, "")


def hand_over(worker: Any, handed: Handed) -> None:
    """Lets a worker take the adapters that are in ``handed`` when it needs them, write each into its slot by few calls, and log
    how long each takes to load.

    Reading the files of an adapter, it would copy each matrix into pinned memory of its own.
    """
    manager = worker.model_runner.lora_manager
    manager._lora_model_cls = from_memory(manager._lora_model_cls, handed)
    slots = manager._adapter_manager
    writes = SlotWrites(slots.modules.values())
    add, activate = manager.add_adapter, slots.activate_adapter

    def added(request: Any) -> bool:
        known = request.lora_int_id in manager.list_adapters()
        began = time.perf_counter()
        loaded: bool = add(request)
        if not known:
            log.info("adapter %s: loaded %.3f s", request.lora_name, time.perf_counter() - began)
        return loaded

    def activated(number: int) -> bool:
        try:
            new: bool = activate(number)
        except BaseException as error:
            end_after(error, writes.drop)
            raise
        writes.write()
        return new

    manager.add_adapter, slots.activate_adapter = added, activated


def from_memory(kind: Any, handed: Handed) -> Any:
    """vLLM's class of adapters, with one that is ``handed`` over in place of its files. Such a one has no layers that vLLM would
    skip (its ``skip_prefixes``): they are the decoder's and the head.
    """
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.utils import parse_fine_tuned_lora_name

    modules: dict[str, str] = {}  # the model's layers, by the names in adapters

    class AdapterFromMemory(kind):
        @classmethod
        def from_local_checkpoint(
            cls, lora_dir: str, expected_lora_modules: set[str], peft_helper: Any, **options: Any
        ) -> Any:
            adapter = handed.get(options["lora_model_id"])
            names = () if adapter is None else tuple(adapter.pairs)
            unknown = [name for name in names if name.rpartition(".")[-1] not in expected_lora_modules]
            if adapter is None or not names or unknown:  # which vLLM refuses
                return super().from_local_checkpoint(lora_dir, expected_lora_modules, peft_helper, **options)
            for name in names:
                if name not in modules:
                    modules[name], _ = parse_fine_tuned_lora_name(PREFIX + name + DOWN, options.get("weights_mapper"))
            config, dtype = adapter.config, options["dtype"]
            downs = pack({name: down for name, (down, _) in adapter.pairs.items()}, dtype).tensors()
            packed = pack({name: up for name, (_, up) in adapter.pairs.items()}, dtype)
            packed.flat.mul_(config.scaling)  # vLLM would scale each matrix by itself
            ups = packed.tensors()
            layers = {
                modules[name]: LoRALayerWeights(
                    modules[name], config.rank, config.rank, downs[name], ups[name], scaling=1
                )
                for name in names
            }
            return cls(options["lora_model_id"], config.rank, layers)

    return AdapterFromMemory
