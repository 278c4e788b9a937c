"""An engine's weights and KV cache: which of them are in device memory, and how it gets its weights."""

from typing import Any

import torch

from dataproto.errors import DataProtoError, InvalidConfig
from rollout.vllm.versions.start_options import error_line
from rollout.vllm.weights.model_state import State, copied_state, differing_buffers, restore_state
from rollout.vllm.weights.weight_loading import Weights, differing_parameters, load_parameters


class EngineMemory:
    """Frees the memory of a ``vllm.LLM`` on CUDA and allocates it again. On a CPU vLLM cannot sleep, so all stays in memory."""

    def __init__(self, llm: Any, device: torch.device, sleep_level: int) -> None:
        """``sleep_level`` 1 moves the weights to the host, 2 drops them. What else the model computes with is kept."""
        self.llm, self.device, self.sleep_level = llm, device, sleep_level
        self.has_weights = True
        """Whether the engine has all its weights."""
        self._awake = self._has_kv_cache = True
        self._freed_bytes = 0  # by the last sleep
        self.lost: list[str] = []
        """Names of the tensors, other than weights, that the last sleep lost and that were restored from copies."""
        self.keep_state()

    def load(self, weights: Weights) -> None:
        """Loads all weights, by their names in vLLM's checkpoints, into the running model, in place.

        Raises:
            InvalidConfig: vLLM's model has no such name or shape, or one of its own weights is missing.
        """
        self.has_weights = False
        try:
            (missing,) = self.llm.collective_rpc(load_parameters, args=(weights,))
        except DataProtoError:
            raise
        except (ValueError, KeyError, AttributeError, AssertionError) as error:
            raise InvalidConfig(f"these weights do not fit vLLM's model: {error_line(error)}") from error
        if missing:
            raise InvalidConfig(f"vLLM's model has weights that were not given: {sorted(missing)[:10]}")
        self.has_weights = True

    def differing(self, weights: Weights) -> list[str]:
        """Names of weights that differ from the given ones, in the engine's dtype, and of buffers that a sleep has changed."""
        (differing,) = self.llm.collective_rpc(differing_parameters, args=(weights,))
        return [*differing, *self.differing_buffers()]

    def sleep(self) -> None:
        """Frees the KV cache and the weights.

        Calls the worker directly, because ``vllm.LLM.sleep`` would also drop processed images, which do not depend on weights.
        """
        if self.device.type == "cuda" and self._awake:
            torch.cuda.synchronize()  # a step that was scheduled ahead of the last token still reads this memory
            self.keep_state()
            before = torch.cuda.mem_get_info()[0]
            self.llm.collective_rpc("sleep", kwargs={"level": self.sleep_level})
            self._freed_bytes = torch.cuda.mem_get_info()[0] - before
            self._awake, self._has_kv_cache = False, False
            self.has_weights = self.has_weights and self.sleep_level == 1

    def wake(self) -> None:
        """Allocates the weights."""
        if not self._awake:
            self._empty_torch_cache()
            self.llm.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
            self._awake = True
            self.restore_state()

    def keep_state(self) -> None:
        """Copies what the model computes with besides its weights to the host."""
        copies: tuple[State] = self.llm.collective_rpc(copied_state)
        (self._state,) = copies

    def restore_state(self) -> None:
        """Restores what the model has lost of this since then."""
        (self.lost,) = self.llm.collective_rpc(restore_state, args=(self._state,))

    def differing_buffers(self) -> list[str]:
        """Names of the model's buffers that are not what they were before the last sleep, or at the start."""
        (differing,) = self.llm.collective_rpc(differing_buffers, args=(self._state,))
        return list(differing)

    def wake_kv_cache(self) -> None:
        """Allocates the KV cache."""
        if not self._has_kv_cache:
            self._empty_torch_cache()
            self.llm.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})
            self._has_kv_cache = True

    def _empty_torch_cache(self) -> None:
        """Returns torch's cached blocks to the device if too little memory is free for what the last sleep freed."""
        if torch.cuda.mem_get_info()[0] < self._freed_bytes:
            torch.cuda.empty_cache()
