"""Operations on columns of every kind: on the rows of one, and on those of two batches that are merged. A new kind is added here.

A column of ``batch`` is a tensor ``(B, ...)`` or a nested ``TensorDict``. A column of ``non_tensor_batch`` is a numpy array
``(B, ...)``, often of dtype object, or a :class:`RaggedTensor` of B rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from dataproto.errors import ColumnConflict, IndivisibleBatch, InvalidColumn, RowCountMismatch, raised_as
from dataproto.packing import MAX_TOKENS
from dataproto.ragged import RaggedTensor
from dataproto.tensordict_utils import nested_tensor_from_tensor_list, object_array, rows_at, same_value

Column: TypeAlias = Any  # torch.Tensor | TensorDictBase | np.ndarray | RaggedTensor

Array: TypeAlias = np.ndarray | RaggedTensor

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
        with raised_as(ColumnConflict, f"column {name!r} cannot be joined", ColumnConflict):
            return RaggedTensor.concat(parts)
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


# Columns of two batches, and facts


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Adds the columns of the second to the first, in place, and returns the first; on an error the first is unchanged.

    Raises:
        RowCountMismatch: the batch sizes differ.
        ColumnConflict: both have a name with different values.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise RowCountMismatch(f"two tensor dicts must have identical batch sizes, not {sizes}")
    for key in _new_columns(dict(tensor_dict1.items()), dict(tensor_dict2.items())):
        tensor_dict1.set(key, tensor_dict2.get(key))
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, Array], tensor_dict2: Mapping[str, Array]) -> dict[str, Array]:
    """Adds the arrays of the second to the first, in place, and returns the first; on an error the first is unchanged.

    Raises:
        InvalidColumn: a value of a name that both have is neither an array nor a ragged tensor.
        ColumnConflict: both have a name with different values (NaN equals NaN, objects are compared deeply).
    """
    for key in tensor_dict1.keys() & tensor_dict2.keys():
        for side in (tensor_dict1, tensor_dict2):
            if not isinstance(side[key], np.ndarray | RaggedTensor):
                raise InvalidColumn(f"`{key}` is a {type(side[key]).__name__}, not a numpy array")
    tensor_dict1.update(_new_columns(tensor_dict1, tensor_dict2))
    return tensor_dict1


def _new_columns(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that ``right`` adds to ``left``; raises ColumnConflict if both have a name with different values."""
    for key in left.keys() & right.keys():
        if not same_value(left[key], right[key]):
            detail = first_difference(left[key], right[key])
            raise ColumnConflict(
                f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object: {detail}; pop it from one of them first"
            )
    return {key: value for key, value in right.items() if key not in left}


def union_meta_info(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The ``meta_info`` of both; raises ColumnConflict if a key has two values."""
    for key in left.keys() & right.keys():
        if not same_value(left[key], right[key]):
            raise ColumnConflict(f"Conflicting values for meta_info key '{key}': {left[key]!r} and {right[key]!r}")
    return {**left, **right}


def concat_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ``meta_info`` of a batch that is joined from parts.

    ``metrics`` (a dict or a list of dicts a part) become one dict of lists. Keys with ``timing`` in them differ between workers
    and keep the largest value of each number, since a step waits for its slowest part. ``max_tokens`` (see `dataproto.packing`)
    becomes the largest of all parts. Any other key must agree.

    Raises:
        ColumnConflict: a key has two values.

    >>> concat_meta_info([{"metrics": {"loss": 1.0}, "timing": {"gen": 2.0}}, {"metrics": {"loss": 3.0}, "timing": {"gen": 5.0}}])
    {'timing': {'gen': 5.0}, 'metrics': {'loss': [1.0, 3.0]}}
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for part in parts:
        for key, value in part.items():
            if key == "metrics":
                metrics += value if isinstance(value, list) else [] if value is None else [value]
            elif key not in merged or same_value(merged[key], value):
                merged.setdefault(key, value)
            elif key == MAX_TOKENS and isinstance(value, int) and isinstance(merged[key], int):
                merged[key] = max(merged[key], value)
            elif "timing" in str(key):
                merged[key] = _slowest(key, merged[key], value)
            else:
                raise ColumnConflict(f"Conflicting values for meta_info key '{key}': {merged[key]!r} and {value!r}")
    if metrics:
        names = dict.fromkeys(name for part in metrics for name in part)
        merged["metrics"] = {name: [part[name] for part in metrics if name in part] for name in names}
    return merged


def _slowest(key: str, left: Any, right: Any) -> Any:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        both = left.keys() & right.keys()
        return {**left, **right, **{name: _slowest(key, left[name], right[name]) for name in both}}
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left if right != right else right if left != left else max(left, right)
    if same_value(left, right):
        return left
    raise ColumnConflict(f"Conflicting values for meta_info key '{key}': {left!r} and {right!r}")


# Rows folded into groups


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


# Descriptions


def data_info(batch: Any, non_tensor_batch: Mapping[str, Array], meta_info: Mapping[str, Any]) -> str:
    """One line for each column and key of ``meta_info``: name, shape, dtype, device or type."""
    lines = ["batch"]
    for name, value in () if batch is None else batch.items():
        dtype = f" ({value.dtype})" if hasattr(value, "dtype") and value.dtype is not None else ""
        lines.append(f"  {name}: {tuple(value.shape)}{dtype}{'' if value.device is None else f' {value.device}'}")
    lines.append("non_tensor_batch")
    lines += [f"  {name}: {type_name(array)}" for name, array in non_tensor_batch.items()]
    lines.append("meta_info")
    lines += [f"  {name}: {type_name(value)}" for name, value in meta_info.items()]
    return "\n".join(lines)


def type_name(value: Any) -> str:
    """The type of a value and of its contents.

    >>> type_name({"a": [1, 2.0]}), type_name((1, "x"))
    ('dict[str: list[float|int]]', 'tuple(int, str)')
    """
    if isinstance(value, list):
        return f"list[{'|'.join(sorted({type_name(item) for item in value[:3]})) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(type_name, value))})"
    if isinstance(value, dict):
        if not value:
            return "dict"
        key, item = next(iter(value.items()))
        return f"dict[{type_name(key)}: {type_name(item)}]"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    if isinstance(value, RaggedTensor):
        return repr(value)
    return type(value).__name__


def size_info(batch: Any, non_tensor_batch: Mapping[str, Array], prefix: str = "") -> str:
    """The size of tensors and arrays in GB; of objects only the references count."""
    tensors = 0 if batch is None else sum(value.numel() * value.element_size() for value in batch.values(True, True))
    arrays = sum(array.nbytes for array in non_tensor_batch.values())
    message = f"Size of tensordict: {tensors / 1024**3} GB, size of non_tensor_batch: {arrays / 1024**3} GB"
    return f"{prefix}, {message}" if prefix else message
