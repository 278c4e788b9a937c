"""The part of a vLLM engine that gets weights, frees memory and allocates it again."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from dataproto.errors import InvalidConfig, ending
from dataproto.vlm.family import VLMFamily
from rollout.vllm.memory import EngineMemory


class StreamedWeights:
    """Weights that are streamed into a running ``vllm.LLM``; a base class of engines, which set the attributes."""

    llm: Any
    engine: Any  # vLLM's LLMEngine
    family: VLMFamily
    memory: EngineMemory
    _awaits_weights: bool  # before the first call of `load_weights`, in an engine that has read none

    def _suspend(self) -> None:
        """Lets all running requests wait, with their tokens so far."""
        raise NotImplementedError

    def _check_weights(self) -> None:
        if self._awaits_weights:
            raise InvalidConfig("the engine was started without weights (awaits_weights): call load_weights first")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Streams Hugging Face parameters into the running engine, in place, and clears all caches that depend on weights.
        Running requests go on from their tokens so far.

        Raises:
            InvalidConfig: vLLM's model has no such name or shape, or one of its own weights is missing.
        """
        self._suspend()
        with ending(self._reset_caches):
            self.memory.load(self._checkpoint_weights(weights))
        self._awaits_weights = False

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of weights that differ from the given ones, in the engine's dtype, and of buffers that a sleep has changed."""
        return self.memory.differing(self._checkpoint_weights(weights))

    def _checkpoint_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return self.family.rollout_weights(weights, self.llm.model_config.hf_config)

    def _reset_caches(self) -> None:
        """Clears cached prefixes and image features, which depend on weights. Processed images, which do not, are kept."""
        self.engine.reset_prefix_cache()
        self.engine.reset_encoder_cache()

    def sleep(self) -> None:
        """Clears caches and, on CUDA, frees the KV cache and the weights. Processed images stay in host memory, up to vLLM's
        ``mm_processor_cache_gb``.
        """
        self._suspend()
        self._reset_caches()
        self.memory.sleep()

    def wake(self) -> bool:
        """Allocates the weights; `generate` allocates the KV cache. See `RolloutEngine.wake`."""
        self.memory.wake()
        return self.memory.has_weights

    def wake_kv_cache(self) -> None:
        """Allocates the KV cache, if sleep freed it. `generate` calls this."""
        self.memory.wake_kv_cache()
