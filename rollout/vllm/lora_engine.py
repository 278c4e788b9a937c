"""The vLLM engine for many adapters of one base model: each snapshot is a LoRA of vLLM, which it loads when it is needed."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from rollout.adapters import Adapter, AdapterConfig, AdapterRequest, write_adapter
from rollout.engine import Request
from rollout.vllm.engine import VLLMEngine
from rollout.vllm.process_settings import allow_adapted_heads, set_environment

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be started with."""


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
        # On a CPU vLLM computes rows without an adapter with the one in its last place: they get an adapter of zeros.
        self._nothing: Any = None
        if self.device.type == "cpu":
            self._zeros = TemporaryDirectory(prefix="no-adapter-")
            text, least = self.llm.model_config.hf_config.get_text_config(), LORA_RANKS[0]
            pair = torch.zeros(least, int(text.hidden_size)), torch.zeros(int(text.vocab_size), least)
            write_adapter(Adapter(AdapterConfig(least), {self.family.head: pair}), Path(self._zeros.name), "")
            self._nothing = self._new_lora(self._zeros.name)

    def _adapter_of(self, request: Request) -> Any:
        adapter = cast(AdapterRequest, request).adapter
        if adapter is None:
            return self._nothing
        if adapter not in self._loras:
            self._loras[adapter] = self._new_lora(str(adapter.directory))
        return self._loras[adapter]

    def _new_lora(self, path: str) -> Any:
        from vllm.lora.request import LoRARequest

        self._loaded += 1
        return LoRARequest(f"adapter-{self._loaded}", self._loaded, path)
