"""What of an engine is in device memory: its weights, its KV cache, and what else its model computes with.

Sleep at level 2 drops all memory of the model. vLLM restores registered buffers itself; weights are handed over again. Other
tensors, such as tables of positions that an attention kernel holds, would be lost, so they are copied to the host. Functions of a
worker run in this process.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dataproto.errors import DataProtoError, InvalidConfig
from rollout.vllm.low_rank import LOW_RANK, load_low_rank
from rollout.vllm.running_engine import error_line, model_of, tensors_in
from rollout.vllm.weights import Weights, load_head, load_parameters

State = Mapping[str, Tensor | None]
"""Copies on the host by name; ``None``: all bytes are zero, as those of scratch memory between steps."""

COMPILED = 2
"""After so many rollouts with new weights, this process has trained for a step and has compiled what training needs."""

_MAX_DEPTH = 4  # of helpers in helpers
_KEPT_APART = ("kv_cache", LOW_RANK)  # not in the memory of the model that a sleep frees
_MODULE_FIELDS = vars(nn.Module()).keys()


def model_state(worker: Any) -> dict[str, Tensor]:
    """All tensors of a worker's model on its device that are neither parameters nor views of them, nor of the KV cache."""
    model = model_of(worker)
    device = next(model.parameters()).device
    others = {_storage(each) for each in (*model.parameters(), *tensors_in(worker.model_runner.kv_caches))}
    seen: set[Any] = set()
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False)) | {
            name: value
            for name, value in vars(module).items()
            if name not in _MODULE_FIELDS and name not in _KEPT_APART
        }
        for name, tensor in _named_tensors(own, path, 0, set()):
            place = _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
            if tensor.device == device and tensor.numel() and place[0] not in others and place not in seen:
                found[name] = tensor
                seen.add(place)
    return found


def copied_state(worker: Any, earlier: State) -> State:
    """Copies of `model_state`, in the memory of ``earlier`` ones where it fits; on CUDA it is pinned."""
    state, copies = model_state(worker), dict[str, Tensor | None]()
    used = [each.detach().reshape(-1).contiguous().view(torch.uint8).any() for each in state.values()]
    for (name, tensor), is_used in zip(state.items(), torch.stack(used).tolist() if used else [], strict=True):
        copy = earlier.get(name) if is_used else None
        if is_used and (copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype)):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = None if copy is None else copy.copy_(tensor.detach(), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


@torch.inference_mode()  # some of them were made in it
def restore_state(worker: Any, copies: State) -> None:
    """Writes the copies into the model, in place."""
    state = model_state(worker)
    for name, copy in copies.items():
        if name in state:
            _ = state[name].zero_() if copy is None else state[name].copy_(copy, non_blocking=True)


def _storage(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage().data_ptr()


def _named_tensors(values: Mapping[str, Any], path: str, depth: int, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        full = f"{path}.{name}" if path else str(name)
        if isinstance(value, Tensor):
            yield full, value
        elif depth < _MAX_DEPTH and id(value) not in visited:
            visited.add(id(value))
            yield from _named_tensors(_parts(value), full, depth + 1, visited)


def _parts(value: Any) -> Mapping[str, Any]:
    """What a container, or a helper object of vLLM's, holds. Modules of a model are visited by themselves."""
    if isinstance(value, dict):
        return {str(name): each for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return {str(number): each for number, each in enumerate(value)}
    place = type(value).__module__
    if isinstance(value, nn.Module) or not place.startswith("vllm.") or place.startswith("vllm.config"):
        return {}
    return getattr(value, "__dict__", {})


class EngineMemory:
    """Frees the memory of a ``vllm.LLM`` on CUDA and allocates it again. On a CPU vLLM cannot sleep, so all stays in memory."""

    def __init__(self, llm: Any, device: torch.device, sleep_level: int) -> None:
        """``sleep_level`` 0 keeps the weights on the device, 1 moves them to the host, 2 drops them. What else the model computes
        with is kept.
        """
        self.llm, self.device, self.sleep_level = llm, device, sleep_level
        self.has_weights = True
        """Whether the engine has all its weights."""
        self._awake = self._has_kv_cache = True
        self.freed_bytes = 0
        """By the last sleep."""
        self._got_weights = False  # since the last sleep
        self._rollouts = 0  # with new weights
        self._state: State = {}
        self.keep_state()

    def load(self, weights: Weights, of_head: Sequence[tuple[str, Tensor]] = ()) -> None:
        """Loads all weights, by their names in vLLM's checkpoints, into the running model, in place; and those ``of_head``, which
        may be known only after all others have been read, into the model that drafts.

        Raises:
            InvalidConfig: vLLM's model has no such name or shape, or one of its own weights is missing.
        """
        self.has_weights, self._got_weights = False, True
        try:
            (missing,) = self.llm.collective_rpc(load_parameters, args=(weights,))
            self.llm.collective_rpc(load_head, args=(of_head,))
        except DataProtoError:
            raise
        except (ValueError, KeyError, AttributeError, AssertionError) as error:
            raise InvalidConfig(f"these weights do not fit vLLM's model: {error_line(error)}") from error
        if missing:
            raise InvalidConfig(f"vLLM's model has weights that were not given: {sorted(missing)[:10]}")
        self.has_weights = True

    def load_adapter(self, tensors: Weights) -> None:
        """Loads an adapter next to the weights, by Hugging Face's names. Raises `InvalidConfig` if it does not fit."""
        self._got_weights = True
        self.llm.collective_rpc(load_low_rank, args=(tensors,))

    def sleep(self) -> None:
        """Frees the KV cache and the weights.

        Calls the worker directly, because ``vllm.LLM.sleep`` would also drop processed images, which do not depend on weights.
        """
        if self.device.type == "cuda" and self._awake:
            torch.cuda.synchronize()  # a step that was scheduled ahead of the last token still reads this memory
            self.keep_state()
            before = torch.cuda.mem_get_info()[0]
            self.llm.collective_rpc("sleep", kwargs={"level": max(self.sleep_level, 1)})  # see `PolicyWorker` for 0
            self.freed_bytes = torch.cuda.mem_get_info()[0] - before
            if self._got_weights:
                self._rollouts += 1
                if self._rollouts == COMPILED:  # vLLM collects garbage at each sleep, and from 0.32 on as it wakes
                    gc.freeze()
            self._got_weights = False
            self._awake, self._has_kv_cache = False, False
            self.has_weights = self.has_weights and self.sleep_level < 2

    def wake(self) -> None:
        """Allocates the weights."""
        if not self._awake:
            self.make_room()
            self.llm.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
            self._awake = True
            self.restore_state()

    def keep_state(self) -> None:
        """Copies what the model computes with besides its weights to the host."""
        (self._state,) = self.llm.collective_rpc(copied_state, args=(self._state,))

    def restore_state(self) -> None:
        """Restores what the model has lost of this since then."""
        self.llm.collective_rpc(restore_state, args=(self._state,))

    def wake_kv_cache(self) -> None:
        """Allocates the KV cache."""
        if not self._has_kv_cache:
            self.make_room()
            self.llm.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})
            self._has_kv_cache = True

    def make_room(self, device: int | None = None) -> None:
        """Returns torch's cached blocks to the device, by default the current one, if too little memory is free for what the last
        sleep freed.
        """
        if torch.cuda.mem_get_info(device)[0] < self.freed_bytes:
            torch.cuda.empty_cache()
