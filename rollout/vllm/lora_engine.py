"""The vLLM engine for many adapters of one base model: each snapshot is a LoRA of vLLM, which it loads when it is needed."""

import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from dataproto.errors import end_after
from rollout.adapters import DOWN, PREFIX, Adapter, AdapterConfig, AdapterRequest, write_adapter
from rollout.engine import Request
from rollout.packed_tensors import pack
from rollout.vllm.engine import VLLMEngine
from rollout.vllm.process_settings import allow_adapted_heads, set_environment

Slots = Sequence[Sequence[Tensor]]
"""For each matrix that vLLM has in one layer, the places ``(rows, columns)`` of every slot."""


class SlotWrites:
    """What vLLM would write into a slot, layer after layer: kept until `write`.

    On a device, a kernel for each of an adapter's many small matrices takes longer than they do.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        """Replaces the methods by which layers write slots, for those that copy whole matrices and nothing else."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
        from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

        self.drop()
        plain = BaseLinearLayerWithLoRA.set_lora, MergedColumnParallelLinearWithLoRA.set_lora
        for layer in layers:
            if type(layer).set_lora in plain and layer.tp_size == 1:
                stacked = layer.lora_a_stacked, layer.lora_b_stacked
                downs, ups = ([slots.squeeze(1).unbind() for slots in each] for each in stacked)
                layer.reset_lora = partial(self._reset, downs, ups)
                layer.set_lora = partial(self._set, layer, downs, ups)

    def _reset(self, downs: Slots, ups: Slots, index: int) -> None:
        self._zeroed += [slots[index] for slots in (*downs, *ups)]

    def _set(self, layer: Any, downs: Slots, ups: Slots, index: int, lora_a: Any, lora_b: Any) -> None:
        if isinstance(lora_b, Tensor):
            lora_a, lora_b = [lora_a], [lora_b]
        elif len(lora_b) != len(ups):  # one matrix is for several
            lora_a, lora_b = layer.expand_packed_lora(lora_a, lora_b)
        for slots, matrix in zip((*downs, *ups), (*lora_a, *lora_b), strict=True):
            place = slots[index]
            if matrix is None or matrix.shape != place.shape:
                self._zeroed.append(place)
            if matrix is not None:
                if matrix.shape != place.shape:
                    place = place[: matrix.shape[0], : matrix.shape[1]]
                places, matrices = self._copied[place.is_contiguous()]
                places.append(place)
                matrices.append(matrix)

    def drop(self) -> None:
        """Forgets what is kept."""
        self._zeroed: list[Tensor] = []
        self._copied: dict[bool, tuple[list[Tensor], list[Tensor]]] = {True: ([], []), False: ([], [])}  # to, from

    def write(self) -> None:
        """Writes what is kept. Places with gaps are apart: one of them would make the others' copies slow."""
        zeroed, copied = self._zeroed, self._copied
        self.drop()  # also what cannot be written, which is of one adapter
        if zeroed:
            torch._foreach_zero_(zeroed)
        for places, matrices in copied.values():
            if places:
                torch._foreach_copy_(places, matrices, non_blocking=True)


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
