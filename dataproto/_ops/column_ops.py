"""Operations on the rows of one column, of every kind. A new kind of column is added here.

A column of ``batch`` is a tensor ``(B, ...)`` or a nested ``TensorDict``. A column of ``non_tensor_batch`` is a numpy array
``(B, ...)``, often of dtype object, or a :class:`RaggedTensor` of B rows.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase

from dataproto._ops.equality import same_value
from dataproto.errors import ColumnConflict, IndivisibleBatch, InvalidColumn
from dataproto.ragged import RaggedTensor
from dataproto.tensordict_utils import nested_tensor_from_tensor_list, object_array, rows_at

Column: TypeAlias = Any  # torch.Tensor | TensorDictBase | np.ndarray | RaggedTensor

_KINDS = (torch.Tensor, np.ndarray, RaggedTensor, TensorDictBase)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)


# Values to columns


def as_array(values: Any, name: str = "column") -> "np.ndarray | RaggedTensor":
    """A column of ``non_tensor_batch``: arrays and ragged tensors stay as they are, lists become arrays of objects.

    Rows that are lists of plain scalars of one length become one array of more dimensions, as in verl. All other rows (images,
    tensors, arrays, dicts, messages) stay one object each.

    Raises:
        InvalidColumn: the value has no rows.

    >>> as_array([[1, 2], [3, 4]]).shape, as_array([[1], [2, 3]]).shape
    ((2, 2), (2,))
    >>> as_array([torch.zeros(3), torch.zeros(3)]).shape
    (2,)
    """
    if isinstance(values, RaggedTensor):
        return values
    if isinstance(values, np.ndarray):
        array = values
    elif isinstance(values, torch.Tensor):
        array = np.array(values.detach().cpu().tolist(), dtype=object)
    elif isinstance(values, str | bytes | dict | set | frozenset) or not hasattr(values, "__iter__"):
        raise InvalidColumn(f"column {name!r} is a {type(values).__name__}; a column has one value for each row")
    else:
        values = list(values)
        array = np.array(values, dtype=object) if _regular(values) else object_array(values)
    if array.ndim == 0:
        raise InvalidColumn(f"column {name!r} has no rows: it is an array of shape ()")
    return array


def _regular(rows: list[Any]) -> bool:
    """Whether rows are plain scalars, or sequences of one length that are regular themselves."""
    kinds = set(map(type, rows))
    if all(issubclass(kind, _PLAIN) for kind in kinds):
        return True
    if not all(kind in (list, tuple, np.ndarray) for kind in kinds):
        return False
    if any(isinstance(row, np.ndarray) and (row.dtype != object or row.ndim == 0) for row in rows):
        return False
    if len(set(map(len, rows))) != 1:
        return False
    return _regular([value for row in rows for value in row])


# One column


def take(column: Column, positions: np.ndarray) -> Column:
    """The rows at ``positions`` ``(K,)``; tensors are copied, objects and ragged rows shared."""
    if isinstance(column, np.ndarray | RaggedTensor):
        return column[positions]
    if isinstance(column, torch.Tensor) and column.is_nested:
        parts = column.unbind()
        return nested_tensor_from_tensor_list([parts[row] for row in positions.tolist()], _ragged_idx(column))
    index = torch.from_numpy(positions.copy()).to(column.device or "cpu")
    return rows_at(column, index) if isinstance(column, torch.Tensor) else column[index]


def cut(column: Column, bounds: slice) -> Column:
    """The rows of a resolved slice; a view where torch and numpy can make one."""
    if isinstance(column, np.ndarray | RaggedTensor):
        return column[bounds]
    if bounds.step < 0 or getattr(column, "is_nested", False):
        return take(column, np.arange(len(column), dtype=np.int64)[bounds])
    return column[bounds]


def concat(parts: Sequence[Column], name: str = "column") -> Column:
    """Joins the rows of all parts.

    Arrays of objects of different shapes (lists that are regular in one part and not in another) are joined as lists, one a row.

    Raises:
        ColumnConflict: parts are of different kinds, or their shapes differ beyond the rows.
    """
    kinds = {kind_of(part): None for part in parts}
    if len(kinds) > 1:
        raise ColumnConflict(f"column {name!r} is {' in one part and '.join(kinds)} in another")
    if isinstance(parts[0], RaggedTensor):
        try:
            return RaggedTensor.concat(parts)
        except ColumnConflict as error:
            raise ColumnConflict(f"column {name!r} cannot be joined: {error}") from error
    nested = [isinstance(part, torch.Tensor) and part.is_nested for part in parts]
    if any(nested):
        if not all(nested):
            raise ColumnConflict(f"column {name!r} is nested in one part and dense in another")
        return nested_tensor_from_tensor_list([row for part in parts for row in part.unbind()], _ragged_idx(parts[0]))
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        if not all(isinstance(part, np.ndarray) and part.dtype == object for part in parts):
            listed = " and ".join(str(tuple(part.shape)) for part in parts)
            raise ColumnConflict(f"column {name!r} cannot be joined: shapes {listed} differ beyond the rows")
        parts = [part if part.ndim == 1 else object_array(part.tolist()) for part in parts]
    if len({getattr(part, "device", None) for part in parts}) > 1:
        raise ColumnConflict(f"column {name!r} is on different devices: {[str(part.device) for part in parts]}")
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=0)
    return torch.cat(list(parts), dim=0)


def _ragged_idx(nested: torch.Tensor) -> int | None:
    """The dimension in which the rows of a jagged tensor vary; the shapes of equal rows do not show it."""
    return getattr(nested, "_ragged_idx", None)


def repeat(column: Column, times: int, interleave: bool) -> Column:
    """Repeats rows, aabb with ``interleave``, else abab; objects and ragged rows are shared."""
    if isinstance(column, RaggedTensor):
        return column.repeat_interleave(times) if interleave else column.repeat(times)
    if isinstance(column, np.ndarray):
        return np.repeat(column, times, axis=0) if interleave else np.concatenate([column[:0], *[column] * times])
    if isinstance(column, torch.Tensor) and not column.is_nested:
        rows, tail = column.shape[0], column.shape[1:]
        wide = column.unsqueeze(1).expand(rows, times, *tail) if interleave else column.expand(times, rows, *tail)
        return wide.clone(memory_format=torch.contiguous_format).view(rows * times, *tail)
    positions = np.arange(len(column))
    return take(column, np.repeat(positions, times) if interleave else np.tile(positions, times))


def row_count(column: Column, name: str) -> int:
    """The number of rows of a column; raises InvalidColumn if the value has no rows."""
    if isinstance(column, RaggedTensor):
        return len(column)
    if not isinstance(column, np.ndarray | torch.Tensor | TensorDictBase):
        raise InvalidColumn(f"column {name!r} is a {type(column).__name__}, not a tensor or numpy array")
    if column.ndim == 0:
        raise InvalidColumn(f"column {name!r} has no rows: its shape is ()")
    return int(column.shape[0])


def kind_of(column: Column) -> str:
    """The name of a column's kind for error messages. Only columns of one kind can be joined or compared."""
    if isinstance(column, RaggedTensor):
        return "a ragged tensor"
    return "an array" if isinstance(column, np.ndarray) else "a tensor"


def unfold_chunks(column: Column, parts: int, name: str) -> Column:
    """Splits every row into ``parts`` rows of equal length: ``(B, parts * K, ...)`` to ``(B * parts, K, ...)``.

    Raises:
        IndivisibleBatch: the length of a row does not divide.
    """
    if isinstance(column, RaggedTensor):
        if (wrong := np.flatnonzero(column.lengths.numpy() % parts)).size:
            raise IndivisibleBatch(
                f"column {name!r}: row {wrong[0]} of {column.lengths[wrong[0]]} does not split into {parts}"
            )
        lengths = (column.lengths // parts).repeat_interleave(parts)
        starts = column.starts.repeat_interleave(parts) + torch.arange(parts).repeat(len(column)) * lengths
        return RaggedTensor.windows(column.storage, starts, lengths)
    if column.ndim < 2 or column.shape[1] % parts:
        raise IndivisibleBatch(f"column {name!r} of shape {tuple(column.shape)} does not split into {parts}")
    return column.reshape(column.shape[0] * parts, column.shape[1] // parts, *column.shape[2:])


def first_difference(left: Any, right: Any) -> str:
    """Describes, for an error message, how two columns differ: in dtype, in shape, or in the first row that differs."""
    kinds = [next((kind for kind in _KINDS if isinstance(side, kind)), None) for side in (left, right)]
    if kinds[0] is not kinds[1]:
        return f"one is a {type(left).__name__}, the other a {type(right).__name__}"
    if left.dtype != right.dtype:
        return f"dtypes {left.dtype} and {right.dtype}"
    if not isinstance(left, np.ndarray) and left.device != right.device:
        return f"devices {left.device} and {right.device}"
    if isinstance(left, RaggedTensor):
        if len(left) != len(right) or left.tail != right.tail:
            return f"{left!r} and {right!r}"
    elif left.shape != right.shape:
        return f"shapes {tuple(left.shape)} and {tuple(right.shape)}"
    for row in range(len(left)):
        if not same_value(left[row], right[row]):
            return f"row {row} differs"
    return "contents differ"
