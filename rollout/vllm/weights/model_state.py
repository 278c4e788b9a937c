"""What vLLM's model computes with besides its parameters: buffers, and tensors that modules and their helpers hold as attributes.

Sleep at level 2 drops all memory of the model. vLLM restores registered buffers itself; weights are handed over again. Other
tensors, such as tables of positions that an attention kernel holds, would be lost. Functions here run in vLLM's worker, in this
process.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rollout.vllm.versions.running_engine import model_of

State = Mapping[str, Tensor | None]
"""Copies on the host by name; ``None``: all bytes are zero, as those of scratch memory between steps."""

_MAX_DEPTH = 4  # of helpers in helpers
_MODULE_FIELDS = vars(nn.Module()).keys()


def model_state(worker: Any) -> dict[str, Tensor]:
    """All tensors of a worker's model on its device that are neither parameters nor views of them, nor of the KV cache."""
    model = model_of(worker)
    device = next(model.parameters()).device
    others = {_storage(each) for each in (*model.parameters(), *_tensors(worker.model_runner.kv_caches))}
    seen: set[Any] = set()
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False)) | {
            name: value for name, value in vars(module).items() if name not in _MODULE_FIELDS and name != "kv_cache"
        }
        for name, tensor in _named_tensors(own, path, 0, set()):
            place = _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
            if tensor.device == device and tensor.numel() and place[0] not in others and place not in seen:
                found[name] = tensor
                seen.add(place)
    return found


def copied_state(worker: Any) -> State:
    """Copies of `model_state`."""
    return {
        name: tensor.detach().cpu().clone() if _has_bytes(tensor) else None
        for name, tensor in model_state(worker).items()
    }


@torch.inference_mode()  # some of them were made in it
def restore_state(worker: Any, copies: State) -> list[str]:
    """Writes the copies into the model, in place. Returns the names of the tensors that were not equal to them."""
    lost = _differing(worker, copies)
    for name, tensor in lost.items():
        copy = copies[name]
        _ = tensor.zero_() if copy is None else tensor.copy_(copy)
    return sorted(lost)


def differing_buffers(worker: Any, copies: State) -> list[str]:
    """Names of the registered buffers that are not equal to their copies. Other tensors may change from step to step."""
    registered = {name for name, _ in model_of(worker).named_buffers()}
    return sorted(_differing(worker, {name: copy for name, copy in copies.items() if name in registered}))


def _differing(worker: Any, copies: State) -> dict[str, Tensor]:
    state = model_state(worker)
    return {name: state[name] for name, copy in copies.items() if name in state and not _equal(state[name], copy)}


def _equal(tensor: Tensor, copy: Tensor | None) -> bool:
    if copy is None:
        return not _has_bytes(tensor)
    return torch.equal(_bytes(tensor), _bytes(copy.to(tensor.device)))  # NaN included


def _has_bytes(tensor: Tensor) -> bool:
    return bool(_bytes(tensor).any())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


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


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of nested lists."""
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value:
            yield from _tensors(each)
