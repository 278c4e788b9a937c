"""Checks and resolves indices of rows: numbers, masks and slices."""

import operator
from typing import Any, TypeAlias

import numpy as np
import torch

from dataproto.errors import InvalidColumn, InvalidIndex

Index: TypeAlias = "slice | list[Any] | range | np.ndarray | torch.Tensor"


def as_positions(index: Index, rows: int) -> np.ndarray:
    """The row numbers that an index selects, ``(K,)`` int64 in [0, rows).

    Raises:
        InvalidIndex: the index is out of range, a mask of another length, or of a type that does not select rows.

    >>> as_positions([-1, 0], 3).tolist(), as_positions(np.array([True, False, True]), 3).tolist()
    ([2, 0], [0, 2])
    """
    if isinstance(index, slice):
        return np.arange(rows, dtype=np.int64)[as_slice(index, rows)]
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    elif not isinstance(index, list | range | np.ndarray):
        raise InvalidIndex(f"cannot select rows with a {type(index).__name__}")
    try:
        array = np.asarray(index)
    except ValueError as error:
        raise InvalidIndex(f"cannot select rows with {index!r}") from error
    if array.ndim != 1:
        raise InvalidIndex(f"an index of rows has one dimension, not shape {array.shape}")
    if array.dtype == bool:
        if len(array) != rows:
            raise InvalidIndex(f"a mask of {len(array)} rows cannot select from {rows} rows")
        return np.flatnonzero(array)
    if len(array) == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise InvalidIndex(f"rows are selected by whole numbers or a mask, not by {array.dtype}")
    wrong = (array < -rows) | (array >= rows)
    if wrong.any():
        raise InvalidIndex(f"row {array[wrong][0]} is out of range for {rows} rows")
    array = array.astype(np.int64, copy=False)
    return np.where(array < 0, array + rows, array) if (array < 0).any() else array


def as_slice(index: slice, rows: int) -> slice:
    """A slice with resolved bounds; raises InvalidIndex if they are not whole numbers or the step is 0."""
    try:
        chosen = range(rows)[index]
    except (TypeError, ValueError) as error:
        raise InvalidIndex(f"cannot select rows with {index}: {error}") from error
    if not chosen:
        return slice(0, 0, 1)
    return slice(
        chosen.start, None if chosen.stop < 0 else chosen.stop, chosen.step
    )  # a reversed slice ends at row 0, not -1


def as_row(index: Any, rows: int) -> int:
    """One row number in [0, rows); raises InvalidIndex if it is out of range, a bool, or not a whole number."""
    if isinstance(index, bool) or getattr(index, "dtype", None) in (np.bool_, torch.bool):
        raise InvalidIndex("a single truth value does not select a row")
    try:
        row = operator.index(index)
    except TypeError as error:
        raise InvalidIndex(f"cannot select rows with a {type(index).__name__}") from error
    if not -rows <= row < rows:
        raise InvalidIndex(f"row {row} is out of range for {rows} rows")
    return row % rows


def whole_numbers(numbers: Any, name: str) -> np.ndarray:
    """A copy as ``(B,)`` int64; raises InvalidColumn if the numbers are not whole numbers of at least 0."""
    array = numbers.detach().cpu().numpy() if isinstance(numbers, torch.Tensor) else np.asarray(numbers)
    array = array.astype(np.int64) if array.size == 0 else array
    whole = array.ndim == 1 and array.dtype.kind in "iu"
    array = np.array(array, dtype=np.int64) if whole else array
    if not whole or (array < 0).any():
        raise InvalidColumn(f"{name} are whole numbers of at least 0, one a row, not {numbers!r}")
    return array
