"""What code written for verl finds here: its encoding of tensors as dtype, shape and bytes, and the classes that its dispatch
imports: futures, and splitting and joining.

This module imports neither Ray nor verl. A future is any handle whose ``future()`` returns a ``concurrent.futures.Future``, as
Ray's ``ObjectRef`` does. Unlike in torch's own pickling, a view is written without the rest of the storage it looks into.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from dataproto import column_ops as columnwise
from dataproto.errors import IndivisibleBatch, InvalidColumn, InvalidIndex
from dataproto.serialization.leaves import dtype_name, tensor_bytes, tensor_of
from dataproto.tensordict_utils import nested_tensor_from_tensor_list

EncodedTensor: TypeAlias = tuple[str, tuple[int, ...], Any]  # dtype, shape, bytes
EncodedTensorDict: TypeAlias = tuple[tuple[int, ...], str | None, dict[str, tuple[Any, ...]]]


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
            items[name] = (dtype_name(value.layout), [serialize_single_tensor(row) for row in value.unbind()])
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


# Dispatch

_padding_size_key = "_padding_size_key_x123d"  # Verl's dispatch passes the number of added rows under this name.


@dataclass
class DataProtoFuture:
    """The result of a worker group that is not fetched yet. It can be passed to another call.

    Args:
        collect_fn: joins the results of the futures.
        futures: one handle a worker; ``handle.future()`` is a ``concurrent.futures.Future`` (Ray's ``ObjectRef`` has it).
        dispatch_fn: selects a part of the joined result.

    >>> from concurrent.futures import Future
    >>> from types import SimpleNamespace
    >>> from dataproto import DataProto
    >>> done = Future()
    >>> handle = SimpleNamespace(future=lambda: done)
    >>> second = DataProtoFuture.concat([handle]).chunk(2)[1]  # before the result is there
    >>> done.set_result(DataProto.from_dict({"x": torch.arange(4)}))
    >>> second.get()["x"].tolist()
    [2, 3]
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: list[Any]) -> "DataProtoFuture":
        """A future of all rows, from one handle a worker."""
        return DataProtoFuture(collect_fn=_concat, futures=data)

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """Futures of ``chunks`` equal splits; each fetches the whole result."""
        parts = (partial(_part, number=number, chunks=chunks) for number in range(chunks))
        return [DataProtoFuture(self.collect_fn, self.futures, part) for part in parts]

    def get(self) -> Any:
        """Waits for the futures and returns their rows, or the split of :meth:`chunk`; raises what a worker raised."""
        whole = self.collect_fn([handle.future().result() for handle in self.futures])
        return whole if self.dispatch_fn is None else self.dispatch_fn(whole)


class BatchData:
    """Splits arguments and joins results of any type for verl's dispatch.

    Args:
        data: a batch, a ``TensorDict`` or a future; or, to be joined, a list of such.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def is_chunkable(self) -> bool:
        """Whether :meth:`chunk` accepts the data."""
        return isinstance(self._data, DataProtoFuture | TensorDictBase) or _is_batch(self._data)

    def is_concatable(self) -> bool:
        """Whether the data are a non-empty list that :meth:`concat` accepts."""
        if not isinstance(self._data, list | tuple) or len(self._data) == 0:
            return False
        first = self._data[0]
        return isinstance(first, TensorDictBase) or _is_batch(first) or _is_future(first)

    def chunk(self, chunks: int) -> Sequence[Any]:
        """``chunks`` equal splits of the same type; those of a ``TensorDict`` are copies."""
        if isinstance(self._data, TensorDictBase):
            return _chunk_tensordict(self._data, chunks)
        return self._data.chunk(chunks=chunks)  # type: ignore[no-any-return]

    def concat(self) -> Any:
        """Joins all rows to a value of the type of the parts; futures to a :class:`DataProtoFuture`.

        Raises:
            InvalidIndex: the list is empty.
        """
        if not self._data:
            raise InvalidIndex("there is nothing to concatenate: the list of parts is empty")
        return DataProtoFuture.concat(self._data) if _is_future(self._data[0]) else _concat(self._data)


def _concat(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, TensorDictBase):
        return _concat_tensordicts(parts)
    if not hasattr(first, "concat"):
        raise InvalidColumn(
            f"a worker returned a {type(first).__name__}, not a DataProto or TensorDict, which can be joined"
        )
    return type(first).concat(parts)


def _part(whole: Any, number: int, chunks: int) -> Any:
    return whole.chunk(chunks=chunks)[number]


def _is_batch(value: Any) -> bool:
    """Whether a value is a `DataProto`, by what it can do: that class imports this module."""
    return hasattr(value, "non_tensor_batch") and callable(getattr(value, "chunk", None))


def _is_future(value: Any) -> bool:
    return callable(getattr(value, "future", None))


def _chunk_tensordict(data: TensorDictBase, chunks: int) -> list[TensorDict]:
    rows = len(data)
    if chunks < 1 or rows % chunks:
        raise IndivisibleBatch(f"{rows} rows do not divide into {chunks} equal parts")
    size = rows // chunks
    parts = []
    for part in range(chunks):
        bounds = slice(part * size, (part + 1) * size, 1)
        columns = {name: columnwise.cut(column, bounds) if column.ndim else column for name, column in data.items()}
        made = TensorDict(columns, batch_size=[size], device=data.device)
        holds_tensors = any(isinstance(column, torch.Tensor) for column in columns.values())
        parts.append(made.consolidate() if holds_tensors else made)
    return parts


def _concat_tensordicts(parts: Sequence[TensorDictBase]) -> TensorDictBase:
    first = parts[0]
    if not first.batch_size:  # It has values of the whole batch and no rows.
        return first
    nested = [name for name, column in first.items() if isinstance(column, torch.Tensor) and column.is_nested]
    whole: TensorDict = TensorDict.cat([part.exclude(*nested) for part in parts], dim=0)
    for name in nested:
        whole.set(name, columnwise.concat([part.get(name) for part in parts], name))
    return whole
