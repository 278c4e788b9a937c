"""Conversion to and from verl's class, without copying columns, and verl's encoding of tensors as (dtype, shape, bytes).

Unlike in torch's own pickling, a view is written alone, without the rest of the storage it looks into.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from dataproto.errors import InvalidColumn, MissingPackage
from dataproto.ragged import RaggedTensor
from dataproto.serialization.leaves import dtype_name, tensor_bytes, tensor_of
from dataproto.tensordict_utils import nested_tensor_from_tensor_list, object_array

Arrays: TypeAlias = dict[str, np.ndarray | RaggedTensor]
EncodedTensor: TypeAlias = tuple[str, tuple[int, ...], Any]  # dtype, shape, bytes
EncodedTensorDict: TypeAlias = tuple[tuple[int, ...], str | None, dict[str, tuple[Any, ...]]]


# Batches


def fields_of(data: Any) -> tuple[TensorDict | None, Arrays, dict[str, Any]]:
    """``batch``, ``non_tensor_batch`` and ``meta_info`` of a batch of verl's class, in new containers."""
    if absent := [name for name in ("batch", "non_tensor_batch", "meta_info") if not hasattr(data, name)]:
        raise InvalidColumn(
            f"expected a batch of verl's class, but {type(data).__name__} has no {' and no '.join(absent)}"
        )
    arrays: Arrays = dict(data.non_tensor_batch or {})
    facts = dict(data.meta_info or {})
    if data.batch is None:
        return None, arrays, facts
    nested = {name: column for name, column in data.batch.items() if RaggedTensor.holds(column)}
    arrays |= {name: RaggedTensor.from_nested(column) for name, column in nested.items()}
    return data.batch.exclude(*nested), arrays, facts


def arrays_of(columns: Mapping[str, np.ndarray | RaggedTensor]) -> dict[str, np.ndarray]:
    """Columns as numpy arrays; a ragged column becomes an array of objects, one view a row."""
    return {name: _objects(column) if isinstance(column, RaggedTensor) else column for name, column in columns.items()}


def _objects(column: RaggedTensor) -> np.ndarray:
    return object_array([_as_numpy(row) for row in column.unbind()])


def _as_numpy(row: torch.Tensor) -> Any:
    """The same memory as a numpy array. (Pickle writes a numpy view alone, but a view of a tensor with its whole storage.)"""
    try:
        return row.numpy()
    except (TypeError, RuntimeError):  # a dtype that numpy lacks; another device, or a gradient
        return row


def verl_class() -> Callable[..., Any]:
    """``verl.protocol.DataProto``, imported now."""
    try:
        from verl.protocol import DataProto
    except ModuleNotFoundError as error:
        raise MissingPackage(f"verl cannot be imported ({error}): pip install verl, or give to_verl a class") from error
    return DataProto  # type: ignore[no-any-return]


# Tensors


def serialize_single_tensor(obj: torch.Tensor) -> EncodedTensor:
    """A dense tensor of any dtype and device as the name of its dtype, its shape and its bytes (uint8, if possible not copied).

    >>> serialize_single_tensor(torch.tensor([[1, 2]], dtype=torch.int8))
    ('int8', torch.Size([1, 2]), array([1, 2], dtype=uint8))
    """
    return dtype_name(obj.dtype), obj.shape, tensor_bytes(obj).numpy()


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
    return tensor_of(np.frombuffer(buffer, dtype=np.uint8), torch_dtype, shape)


def serialize_tensordict(batch: TensorDict) -> EncodedTensorDict:
    """A ``TensorDict`` as batch size, device and encoded columns: dense ones as three values, nested ones as (layout, rows).

    Raises:
        InvalidColumn: a value is not a tensor.
    """
    items: dict[str, tuple[Any, ...]] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidColumn(f"column {name!r} is a {type(value).__name__}, not a tensor")
        if value.is_nested:
            layout = dtype_name(value.layout)
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
