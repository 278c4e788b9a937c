"""Tensors and Python objects as rows of a ``TensorDict``, a nested tensor or an array of objects: made, selected and compared."""

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from dataproto.errors import ColumnConflict, InvalidColumn, InvalidIndex, RowCountMismatch, raised_as
from dataproto.serialization.buffers import ask_for_large_pages
from dataproto.serialization.images import is_image, same_image

Index: TypeAlias = "slice | list[Any] | range | np.ndarray | torch.Tensor"
Pairs = frozenset[tuple[int, int]]  # Identities of the objects that are being compared, so that cycles end.


def get_tensordict(
    tensor_dict: Mapping[str, torch.Tensor | list[Any] | np.ndarray | NonTensorStack],
    non_tensor_dict: Mapping[str, Any] | None = None,
) -> TensorDict:
    """Makes a ``TensorDict`` of columns and of values that belong to the whole batch.

    Args:
        tensor_dict: columns of B rows. Tensors ``(B, ...)`` (dense, or nested with the jagged layout) stay as they are; lists and
            arrays become a ``NonTensorStack`` with one Python object a row.
        non_tensor_dict: values of the whole batch, stored as ``NonTensorData``.

    Raises:
        InvalidColumn: a value is not a column, a list of tensors, or a nested tensor of another layout.
        RowCountMismatch: columns have different numbers of rows.
        ColumnConflict: a name is in both arguments.

    >>> data = get_tensordict({"x": torch.zeros(2, 3), "scores": [[], [0.5]]}, {"step": 7})
    >>> data["scores"], data["step"], data.batch_size
    (LinkedList([[], [0.5]]), 7, torch.Size([2]))
    """
    non_tensor_dict = non_tensor_dict or {}
    if clash := sorted(tensor_dict.keys() & non_tensor_dict.keys()):
        raise ColumnConflict(f"{clash} are in both tensor_dict and non_tensor_dict")
    columns = {name: _stacked(name, value) for name, value in tensor_dict.items()}
    rows = {name: len(value) for name, value in columns.items()}
    if len(set(rows.values())) > 1:
        raise RowCountMismatch(f"columns have different numbers of rows: {rows}")
    values = {name: NonTensorData(value) for name, value in non_tensor_dict.items()}
    return TensorDict({**columns, **values}, batch_size=[next(iter(rows.values()))] if rows else [])


def _stacked(name: str, value: Any) -> torch.Tensor | NonTensorStack:
    if isinstance(value, NonTensorStack):
        return value
    if isinstance(value, torch.Tensor):
        if value.is_nested and (value.layout != torch.jagged or not value.is_contiguous()):
            raise InvalidColumn(f"column {name!r}: nested tensors need layout=torch.jagged and contiguous values")
        if value.ndim == 0:
            raise InvalidColumn(f"column {name!r} has no rows: its shape is ()")
        return value
    if not isinstance(value, list | np.ndarray) or (isinstance(value, np.ndarray) and value.ndim == 0):
        raise InvalidColumn(f"column {name!r} is a {type(value).__name__}, not a tensor, list or array of rows")
    if any(isinstance(item, torch.Tensor) for item in value):
        raise InvalidColumn(f"column {name!r} is a list of tensors; stack or nest them, or convert them to numpy")
    return stack_objects(value)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """An array ``(B,)`` of dtype object with one value a row, also if the values are sequences of equal length.

    >>> object_array([[1, 2], [3, 4]]).shape
    (2,)
    """
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def stack_objects(values: Iterable[Any]) -> NonTensorStack:
    """One Python object a row, in the form that a ``TensorDict`` stores."""
    items: list[Any] = [NonTensorData(value) for value in values]
    return NonTensorStack.from_list(items)


def nested_tensor_from_tensor_list(tensors: Sequence[torch.Tensor], ragged_idx: int | None = None) -> torch.Tensor:
    """Makes a jagged nested tensor ``(B, ...)`` of tensors that differ in one dimension.

    Args:
        tensors: B tensors of the same number of dimensions.
        ragged_idx: the dimension of the result that varies; default: found from the shapes.

    Raises:
        InvalidColumn: there are no tensors, or their shapes differ in more than one dimension.

    >>> nested_tensor_from_tensor_list([torch.zeros(4, 2), torch.zeros(4, 3)]).unbind()[1].shape
    torch.Size([4, 3])
    """
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if not tensors or len({len(shape) for shape in shapes}) > 1 or shapes == {()}:
        raise InvalidColumn(f"a nested tensor needs tensors of one number of dimensions, not shapes {sorted(shapes)}")
    varying = [dim for dim, sizes in enumerate(zip(*shapes), start=1) if len(set(sizes)) > 1]
    if len(varying) > 1:
        raise InvalidColumn(f"a jagged tensor varies in one dimension only, not as shapes {sorted(shapes)}")
    ragged = ragged_idx or (varying[0] if varying else 1)
    if ragged == 1:
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)
    lengths = torch.tensor([tensor.shape[ragged - 1] for tensor in tensors], device=tensors[0].device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = torch.cat(list(tensors), dim=ragged - 1)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)


def alike_tensors(rows: Mapping[int, Any], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Rows, given by their numbers, as tensors of one dtype, device and tail; raises InvalidColumn if they differ."""
    for number, row in rows.items():
        if row is None:
            raise InvalidColumn(f"row {number} is None; an empty row is a tensor of length 0, or an empty list")
    blank = {number for number, row in rows.items() if isinstance(row, list | tuple) and len(row) == 0}
    tensors = {
        number: row if isinstance(row, torch.Tensor) else _as_tensor(row, dtype, number) for number, row in rows.items()
    }
    example = next((made for number, made in tensors.items() if number not in blank), None)
    if example is None:
        return list(tensors.values())
    tensors |= dict.fromkeys(blank, example.new_empty((0, *example.shape[1:])))  # which have neither dtype nor tail
    form = example.dtype, example.device, example.shape[1:]
    for number, made in tensors.items():
        if made.ndim == 0 or (made.dtype, made.device, made.shape[1:]) != form:
            raise InvalidColumn(
                f"row {number} is {tuple(made.shape)} {made.dtype} on {made.device}, "
                f"which does not go with {tuple(example.shape)} {example.dtype} on {example.device}"
            )
    return list(tensors.values())


def _as_tensor(row: Any, dtype: torch.dtype | None, number: int) -> torch.Tensor:
    """``torch.as_tensor``, through numpy for lists of whole numbers: several times faster, and of the same dtype."""
    if isinstance(row, list | tuple) and row and type(row[0]) is int and dtype in (None, torch.int64):
        try:
            array = np.array(row)
        except ValueError:
            array = np.empty(0, dtype=object)
        if array.dtype == np.int64 and array.ndim == 1:
            return torch.from_numpy(array)
    with raised_as(InvalidColumn, f"row {number} makes no tensor", ValueError, TypeError, RuntimeError):
        return torch.as_tensor(row, dtype=dtype)


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that read the same memory in the same way; a tensor with gradients equals only itself."""
    if tensor.requires_grad or tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return tensor.dtype, tensor.device, tensor.shape, *_view(tensor)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def rows_at(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``tensor[index]`` along the first dimension, for every dtype (torch lacks it for wide unsigned integers)."""
    if tensor.dtype in _SIGNED:
        return rows_at(tensor.view(_SIGNED[tensor.dtype]), index).view(tensor.dtype)
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.index_select(0, index)
    chosen = tensor.new_empty((len(index), *tensor.shape[1:]))
    ask_for_large_pages(chosen.data_ptr(), chosen.nbytes)
    return torch.index_select(tensor, 0, index, out=chosen)


# Indices of rows


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
    # A reversed slice ends at row 0, not -1.
    return slice(chosen.start, None if chosen.stop < 0 else chosen.stop, chosen.step)


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


def repeats(times: Any, rows: int, shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """How often rows are repeated, of one of these shapes; raises InvalidIndex unless they are whole numbers of at least 0."""
    counts = times.cpu().numpy() if isinstance(times, torch.Tensor) else np.asarray(times)
    counts = counts.astype(np.int64) if counts.size == 0 else counts
    if counts.shape not in shapes or counts.dtype.kind not in "iu" or (counts < 0).any():
        numbers = f"by {rows} whole numbers" if (rows,) in shapes else "by a whole number"
        raise InvalidIndex(f"{rows} rows are repeated {numbers} of at least 0, not {times!r}")
    return counts


# Equality is deep: NaN equals NaN, dtypes and shapes must agree, and cycles are legal.


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, device, shape and values are equal; O(1) if both read the same memory."""
    if left is right:
        return True
    if left.dtype != right.dtype or left.device != right.device or left.is_nested != right.is_nested:
        return False
    if left.is_nested:
        parts = left.unbind(), right.unbind()
        return len(parts[0]) == len(parts[1]) and all(same_tensor(a, b) for a, b in zip(*parts))
    if left.shape != right.shape or left.layout != right.layout:
        return False
    if left.layout != torch.strided:
        return same_tensor(left.to_dense(), right.to_dense())
    if _view(left) == _view(right):
        return True
    # Torch does not compare fp8, so its bits are compared.
    if left.element_size() == 1 and left.dtype.is_floating_point:
        return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    if torch.equal(left, right):
        return True
    if not (left.dtype.is_floating_point or left.dtype.is_complex):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that read the same memory in the same way, given equal dtype, device and shape."""
    return tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def same_array(left: np.ndarray, right: np.ndarray, pairs: Pairs = frozenset()) -> bool:
    """Whether dtype, shape and elements are equal; O(1) if both read the same memory."""
    if left is right:
        return True
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.__array_interface__["data"] == right.__array_interface__["data"] and left.strides == right.strides:
        return True
    if left.dtype != object:
        return np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM")
    return all(type(a) is type(b) and same_value(a, b, pairs) for a, b in zip(left.flat, right.flat))


def same_value(left: Any, right: Any, pairs: Pairs = frozenset()) -> bool:
    """Deep equality of two Python values, with tensors and arrays anywhere inside.

    >>> same_value({"a": [float("nan"), torch.ones(2)]}, {"a": [float("nan"), torch.ones(2)]})
    True
    >>> same_value([1, 2], (1, 2))
    False
    """
    if left is right or (id(left), id(right)) in pairs:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and same_tensor(left, right)
    pairs = pairs | {(id(left), id(right))} if isinstance(left, np.ndarray | dict | list | tuple) else pairs
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and same_array(left, right, pairs)
    if isinstance(left, TensorDictBase) and isinstance(right, TensorDictBase):
        return left.batch_size == right.batch_size and same_value(dict(left.items()), dict(right.items()), pairs)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key], pairs) for key in left)
    for kind in (list, tuple):
        if isinstance(left, kind) and isinstance(right, kind):
            return len(left) == len(right) and all(same_value(a, b, pairs) for a, b in zip(left, right))
    if is_image(left) and is_image(right):
        return same_image(left, right)
    return _same_scalar(left, right)


def _same_scalar(left: Any, right: Any) -> bool:
    try:
        return bool(left == right) or (bool(left != left) and bool(right != right))
    except (RuntimeError, TypeError, ValueError):  # Objects that cannot be compared count as different.
        return False
