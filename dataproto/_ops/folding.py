"""Moves rows between the batch dimension and the one after it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataproto._ops.column_ops import Column
from dataproto.errors import IndivisibleBatch, InvalidColumn
from dataproto.ragged import RaggedTensor


def fold_rows(columns: Mapping[str, Column], rows: int, groups: int) -> dict[str, Column]:
    """Columns ``(rows, ...)`` to ``(groups, rows // groups, ...)``; see ``fold_batch_dim``."""
    if groups < 1 or rows % groups:
        raise IndivisibleBatch(f"{rows} rows do not fold into {groups} groups")
    _check_dense(columns)
    inner = rows // groups
    return {name: column.reshape(groups, inner, *column.shape[1:]) for name, column in columns.items()}


def unfold_rows(columns: Mapping[str, Column], dims: int) -> tuple[dict[str, Column], int | None]:
    """The first ``dims`` dimensions of every column as one, and its size; see ``unfold_batch_dim``."""
    _check_dense(columns)
    sizes = {name: tuple(column.shape[:dims]) for name, column in columns.items()}
    if len(set(sizes.values())) > 1 or any(len(size) < dims for size in sizes.values()):
        raise InvalidColumn(f"columns differ in their first {dims} dimensions: {sizes}")
    if not sizes:
        return {}, None
    rows = int(np.prod(next(iter(sizes.values()))))
    return {name: column.reshape(rows, *column.shape[dims:]) for name, column in columns.items()}, rows


def _check_dense(columns: Mapping[str, Any]) -> None:
    if ragged := [name for name, column in columns.items() if isinstance(column, RaggedTensor)]:
        raise InvalidColumn(f"columns {ragged} are ragged and have one batch dimension only")
