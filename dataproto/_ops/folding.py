"""Moving rows between the batch dimension and the one after it."""

from collections.abc import Collection
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dataproto._ops import column_ops as columnwise
from dataproto._ops.column_ops import Column
from dataproto.errors import IndivisibleBatch, InvalidColumn
from dataproto.ragged import RaggedTensor

if TYPE_CHECKING:
    from dataproto.protocol import DataProto

Batch = TypeVar("Batch", bound="DataProto")


def fold_batch_dim(data: Batch, new_batch_size: int) -> Batch:
    """Columns ``(B, ...)`` to ``(new_batch_size, B // new_batch_size, ...)``; tensors are views where torch can give one.

    Raises:
        IndivisibleBatch: the number of rows does not divide.
        InvalidColumn: a column is ragged.
    """
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise IndivisibleBatch(f"{rows} rows do not fold into {new_batch_size} groups")
    inner = rows // new_batch_size
    _check_dense(data)
    return data._map(new_batch_size, lambda _, column: column.reshape(new_batch_size, inner, *column.shape[1:]))


def unfold_batch_dim(data: Batch, batch_dims: int = 2) -> Batch:
    """The first ``batch_dims`` dimensions of every column become one, the rows: ``(A, B, ...)`` to ``(A * B, ...)``.

    Raises:
        InvalidColumn: a column is ragged, has fewer dimensions, or other sizes in them than the rest.
    """
    _check_dense(data)
    sizes = {name: tuple(data[name].shape[:batch_dims]) for name in data.names()}
    if len(set(sizes.values())) > 1 or any(len(size) < batch_dims for size in sizes.values()):
        raise InvalidColumn(f"columns differ in their first {batch_dims} dimensions: {sizes}")
    rows = int(np.prod(next(iter(sizes.values())))) if sizes else len(data)
    return data._map(rows, lambda _, column: column.reshape(rows, *column.shape[batch_dims:]))


def unfold_columns(data: Batch, n_split: int, split_keys: Collection[str]) -> Batch:
    """See ``DataProto.unfold_column_chunks``."""
    if n_split < 1:
        raise IndivisibleBatch(f"columns cannot be split into {n_split} parts")
    rows = len(data) * n_split

    def unfold(name: str, column: Column) -> Column:
        if name in split_keys:
            return columnwise.unfold(column, n_split, name)
        return columnwise.repeat(column, n_split, interleave=True)

    return data._map(rows, unfold)


def _check_dense(data: "DataProto") -> None:
    if ragged := [name for name in data.names() if isinstance(data[name], RaggedTensor)]:
        raise InvalidColumn(f"columns {ragged} are ragged and have one batch dimension only")
