"""Tensors as (dtype, shape, bytes), without torch's own pickling: a view is written alone, not with the storage it looks into."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from dataproto.errors import InvalidColumn
from dataproto.tensordict_utils import nested_tensor_from_tensor_list

EncodedTensor: TypeAlias = tuple[str, tuple[int, ...], Any]  # dtype, shape, bytes
EncodedTensorDict: TypeAlias = tuple[tuple[int, ...], str | None, dict[str, tuple[Any, ...]]]


def serialize_single_tensor(obj: torch.Tensor) -> EncodedTensor:
    """A dense tensor of any dtype and device to its dtype's name, its shape and its bytes (an uint8 array, no copy where it can).

    >>> serialize_single_tensor(torch.tensor([[1, 2]], dtype=torch.int8))
    ('int8', torch.Size([1, 2]), array([1, 2], dtype=uint8))
    """
    flat = obj.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)
    return str(obj.dtype).removeprefix("torch."), obj.shape, data


def deserialize_single_tensor(arr: Sequence[Any]) -> torch.Tensor:
    """The inverse of :func:`serialize_single_tensor`; the tensor owns its memory.

    Raises:
        InvalidColumn: the dtype is unknown, or the bytes do not fill the shape.
    """
    dtype, shape, data = arr
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(torch_dtype, torch.dtype):
        raise InvalidColumn(f"unknown tensor dtype {dtype!r}")
    buffer = bytearray(data)
    if len(buffer) != int(np.prod(shape, dtype=object)) * torch_dtype.itemsize:
        raise InvalidColumn(f"{len(buffer)} bytes do not fill a tensor of shape {tuple(shape)} and dtype {dtype}")
    if not buffer:
        return torch.empty(tuple(shape), dtype=torch_dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(torch_dtype).view(tuple(shape))


def serialize_tensordict(batch: TensorDict) -> EncodedTensorDict:
    """Batch size, device and encoded columns: dense ones as three values, nested ones as (layout, list of encoded rows).

    Raises:
        InvalidColumn: a value is not a tensor.
    """
    items: dict[str, tuple[Any, ...]] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidColumn(f"column {name!r} is a {type(value).__name__}, not a tensor")
        if value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            items[name] = (layout, [serialize_single_tensor(row) for row in value.unbind()])
        else:
            items[name] = serialize_single_tensor(value)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), items


def deserialize_tensordict(arr: tuple[Sequence[int], str | None, Mapping[str, tuple[Any, ...]]]) -> TensorDict:
    """The inverse of :func:`serialize_tensordict`.

    Raises:
        InvalidColumn: the encoding is not what :func:`serialize_tensordict` writes.
    """
    batch_size, device, items = arr
    return TensorDict(
        {name: _decode(name, value) for name, value in items.items()}, batch_size=list(batch_size), device=device
    )


def _decode(name: str, value: tuple[Any, ...]) -> torch.Tensor:
    if len(value) == 3:
        return deserialize_single_tensor(value)
    if len(value) != 2:
        raise InvalidColumn(f"column {name!r}: a tensor is encoded as 2 or 3 values, not {len(value)}")
    layout, encoded = value
    rows = [deserialize_single_tensor(row) for row in encoded]
    if layout == "jagged":
        return nested_tensor_from_tensor_list(rows)
    if layout == "strided":
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    raise InvalidColumn(f"column {name!r}: unknown layout {layout!r}")
