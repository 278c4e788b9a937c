"""``RaggedTensor``: a column whose rows differ in length.

Dimension letters: B rows, N tokens of all rows, L tokens of the longest row.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self, overload

import numpy as np
import torch

from dataproto.errors import ColumnConflict, InvalidColumn, InvalidConfig, InvalidIndex
from dataproto.grouping import grouped_by
from dataproto.serialization.leaves import RAGGED
from dataproto.serialization.wire import reduce_value
from dataproto.tensordict_utils import (
    Index,
    alike_tensors,
    as_positions,
    as_row,
    as_slice,
    memory_key,
    repeats,
    rows_at,
    same_tensor,
    whole_numbers,
)

Side = Literal["left", "right"]


class RaggedTensor:
    """B rows ``(n_i, *tail)`` of one dtype on one device.

    Rows are windows into one shared tensor; two small arrays on the CPU hold their starts and lengths. Selecting, repeating and
    reordering rows therefore copies no values, and reading a row returns a view. Do not write into rows: repeated rows are the
    same memory. Gradients flow through every method to ``values``.

    Args:
        values: the rows one after the other, ``(N, *tail)``; not copied.
        lengths: tokens of each row, ``(B,)`` whole numbers that add up to N; copied.

    Raises:
        InvalidColumn: ``values`` has no dimension, or the lengths are negative, not whole numbers, or do not add up to N.

    >>> ragged = RaggedTensor(torch.arange(6), torch.tensor([2, 0, 4]))
    >>> ragged[-1], ragged[[2, 0]].lengths, ragged.repeat_interleave(2)[1]
    (tensor([2, 3, 4, 5]), tensor([4, 2]), tensor([0, 1]))
    >>> ragged.to_padded("right", -1)
    tensor([[ 0,  1, -1, -1],
            [-1, -1, -1, -1],
            [ 2,  3,  4,  5]])
    """

    def __init__(self, values: torch.Tensor, lengths: "torch.Tensor | np.ndarray | Sequence[int]") -> None:
        _check_storage(values)
        sizes = whole_numbers(lengths, "lengths")
        if (total := int(sizes.sum())) != values.shape[0]:
            raise InvalidColumn(f"lengths add up to {total}, but there are {values.shape[0]} values")
        self._storage, self._lengths = values, sizes
        self._starts = np.cumsum(sizes) - sizes

    @classmethod
    def windows(
        cls,
        storage: torch.Tensor,
        starts: "torch.Tensor | np.ndarray | Sequence[int]",
        lengths: "torch.Tensor | np.ndarray | Sequence[int]",
    ) -> Self:
        """Rows ``storage[starts[i] : starts[i] + lengths[i]]``: any windows into ``(M, *tail)``, also overlapping ones.

        Raises:
            InvalidColumn: a window is not within the storage.
        """
        _check_storage(storage)
        first, sizes = whole_numbers(starts, "starts"), whole_numbers(lengths, "lengths")
        if len(first) != len(sizes):
            raise InvalidColumn(f"{len(first)} starts cannot go with {len(sizes)} lengths")
        if (wrong := np.flatnonzero(first > storage.shape[0] - sizes)).size:
            row = int(wrong[0])
            bounds = f"{first[row]}:{first[row] + sizes[row]}"
            raise InvalidColumn(f"row {row} is the window {bounds}, outside of {storage.shape[0]} values")
        return cls._made(storage, first, sizes)

    @classmethod
    def _made(cls, storage: torch.Tensor, starts: np.ndarray, lengths: np.ndarray) -> Self:
        made = cls.__new__(cls)
        made._storage, made._starts, made._lengths = storage, starts, lengths
        return made

    @classmethod
    def from_list(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Self:
        """Makes a column of rows ``(n_i, *tail)``; an object that is in several rows is stored once.

        Args:
            rows: tensors, or arrays and lists of numbers. An empty list takes its dtype and tail from the other rows.
            dtype: the dtype of rows that are not tensors; ``None``: torch's default.

        Raises:
            InvalidColumn: a row is ``None``, has no dimension, or differs from the others in dtype, device or tail.

        >>> RaggedTensor.from_list([[1, 2], [], [3]]).values
        tensor([1, 2, 3])
        """
        rows = list(rows)  # An array makes a new object for each row; they stay alive, so that no two have one id.
        first: dict[int, int] = {}
        owners = [first.setdefault(id(row), number) for number, row in enumerate(rows)]
        distinct = alike_tensors({number: rows[number] for number in first.values()}, dtype)
        values = torch.cat(distinct) if distinct else torch.empty(0, dtype=dtype)
        return cls(values, [len(row) for row in distinct])[np.unique(owners, return_inverse=True)[1]]

    @classmethod
    def from_nested(cls, nested: Any) -> Self:
        """Makes a column of the rows of a nested tensor ``(B, n_i, *tail)``; the jagged layout is not copied.

        Raises:
            InvalidColumn: the value is not a nested tensor, or varies in a later dimension.
        """
        if not getattr(nested, "is_nested", False):
            raise InvalidColumn(f"a nested tensor is needed, not a {type(nested).__name__}")
        if nested.layout != torch.jagged:
            return cls.from_list(nested.unbind())
        if not cls.holds(nested):
            raise InvalidColumn("rows of the nested tensor vary in a later dimension; ragged rows vary in their first")
        offsets, lengths = nested.offsets().cpu(), nested.lengths()
        return cls.windows(nested.values(), offsets[:-1], offsets.diff() if lengths is None else lengths)

    @staticmethod
    def holds(value: Any) -> bool:
        """Whether a value is a jagged nested tensor whose rows vary in their first dimension, which :meth:`from_nested` takes."""
        return (
            isinstance(value, torch.Tensor) and value.layout == torch.jagged and getattr(value, "_ragged_idx", 0) == 1
        )

    @classmethod
    def concat(cls, parts: "Sequence[RaggedTensor]") -> Self:
        """Joins the rows of columns. Columns of one storage join without a copy; otherwise each distinct row is copied once.

        Raises:
            InvalidIndex: there are no parts.
            ColumnConflict: parts differ in dtype, device or tail.
        """
        if not parts:
            raise InvalidIndex("there is nothing to concatenate: the list of parts is empty")
        forms = [(part.dtype, part.device, part.tail) for part in parts]
        for number, form in enumerate(forms):
            if form != forms[0]:
                raise ColumnConflict(f"ragged parts 0 and {number} differ: {_form(*forms[0])} and {_form(*form)}")
        groups = grouped_by(range(len(parts)), lambda number: memory_key(parts[number]._storage))
        joined = [cls._of_one_storage([parts[number] for number in group]) for group in groups.values()]
        if len(joined) == 1:
            return joined[0]
        distinct = [part.distinct() for part in joined]
        shift = np.cumsum([0, *(len(part._storage) for part in distinct)])
        starts = np.concatenate([part._starts + before for part, before in zip(distinct, shift)])
        lengths = np.concatenate([part._lengths for part in distinct])
        grouped = cls._made(torch.cat([part._storage for part in distinct]), starts, lengths)
        first = np.cumsum([0, *(len(part) for part in parts)])
        order = np.concatenate(
            [np.arange(first[number], first[number + 1]) for group in groups.values() for number in group]
        )
        return grouped._chosen(np.argsort(order))

    @classmethod
    def _of_one_storage(cls, parts: "Sequence[RaggedTensor]") -> Self:
        starts = np.concatenate([part._starts for part in parts])
        return cls._made(parts[0]._storage, starts, np.concatenate([part._lengths for part in parts]))

    # Properties

    @property
    def values(self) -> torch.Tensor:
        """The rows one after the other, ``(N, *tail)``: the storage, or a view of it, if it holds them in order, else a copy."""
        starts, lengths = self._starts[self._lengths > 0], self._lengths[self._lengths > 0]
        if len(starts) == 0:
            return self._storage[:0]
        ends = starts + lengths
        breaks = np.flatnonzero(starts[1:] != ends[:-1])
        starts, ends = starts[np.append(0, breaks + 1)], ends[np.append(breaks, len(ends) - 1)]
        if len(starts) == 1:
            whole = starts[0] == 0 and ends[0] == len(self._storage)
            return self._storage if whole else self._storage[starts[0] : ends[0]]
        total = int((ends - starts).sum())
        # This takes one backward step, and is faster for short pieces.
        if self._storage.requires_grad or total < 32 * len(starts):
            before = np.cumsum(lengths) - lengths
            index = np.arange(total) + np.repeat(self._starts[self._lengths > 0] - before, lengths)
            return rows_at(self._storage, torch.from_numpy(index).to(self.device))
        return torch.cat([self._storage[start:end] for start, end in zip(starts.tolist(), ends.tolist())])

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row, ``(B,)`` int64, a copy; always on the CPU, so that reading rows never waits for a device."""
        return torch.from_numpy(self._lengths.copy())

    @property
    def storage(self) -> torch.Tensor:
        """The shared tensor ``(M, *tail)`` that rows are windows into; M may be more or less than N."""
        return self._storage

    @property
    def starts(self) -> torch.Tensor:
        """Where each row starts in :attr:`storage`, ``(B,)`` int64 on the CPU; a copy."""
        return torch.from_numpy(self._starts.copy())

    @property
    def tail(self) -> torch.Size:
        """The shape of one token."""
        return self._storage.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self._storage.dtype

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def requires_grad(self) -> bool:
        return self._storage.requires_grad

    @property
    def nbytes(self) -> int:
        """Bytes of all rows; repeated rows count each time."""
        return int(self._lengths.sum()) * self.tail.numel() * self._storage.element_size()

    def __len__(self) -> int:
        return len(self._lengths)

    def __repr__(self) -> str:
        lengths = self._lengths.tolist()
        shown = f"{lengths}" if len(lengths) <= 8 else f"[{', '.join(map(str, lengths[:8]))}, ...]"
        return f"RaggedTensor({len(self)} rows of {_form(self.dtype, self.device, self.tail)}, lengths {shown})"

    def __eq__(self, other: object) -> bool:
        """Whether all rows are equal (see :meth:`equal`), as one bool."""
        return self.equal(other) if isinstance(other, RaggedTensor) else NotImplemented

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # Numpy does not take it for a sequence: comparing an array with it is False.

    def equal(self, other: "RaggedTensor") -> bool:
        """Whether dtype, device, lengths and values are equal (NaN equals NaN), however the rows are stored."""
        if (self.dtype, self.device, self.tail) != (other.dtype, other.device, other.tail):
            return False
        if not np.array_equal(self._lengths, other._lengths):
            return False
        if np.array_equal(self._starts, other._starts) and memory_key(self._storage) == memory_key(other._storage):
            return True
        return same_tensor(self.values, other.values)

    # Rows

    @overload
    def __getitem__(self, item: int | np.integer[Any]) -> torch.Tensor: ...
    @overload
    def __getitem__(self, item: Index) -> Self: ...
    def __getitem__(self, item: Any) -> Any:
        """A row ``(n_i, *tail)`` as a view by its number, or rows by a slice, a mask, or an array or list of numbers.

        Raises:
            InvalidIndex: the index is out of range, a mask of another length, or of a type that does not select rows.
        """
        if isinstance(item, slice):
            return self._chosen(as_slice(item, len(self)))
        if isinstance(item, list | range | np.ndarray | torch.Tensor) and getattr(item, "ndim", 1) > 0:
            return self._chosen(as_positions(item, len(self)))
        row = as_row(item, len(self))
        start = int(self._starts[row])
        return self._storage[start : start + int(self._lengths[row])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.unbind())

    def unbind(self) -> list[torch.Tensor]:
        """All rows ``(n_i, *tail)``; with gradients, one node of the graph for all of them."""
        if self.requires_grad:
            return list(self.values.split(self._lengths.tolist()))
        return [self._storage[start : start + n] for start, n in zip(self._starts.tolist(), self._lengths.tolist())]

    def _chosen(self, positions: np.ndarray | slice) -> Self:
        return self._made(self._storage, self._starts[positions], self._lengths[positions])

    def repeat(self, times: int) -> Self:
        """Repeats all rows, abab, without a copy. (torch's ``repeat`` would repeat the last dimension of the tail.)

        Raises:
            InvalidIndex: ``times`` is not a whole number of at least 0.
        """
        return self._chosen(np.tile(np.arange(len(self)), int(repeats(times, len(self), [()]))))

    def repeat_interleave(self, times: "int | torch.Tensor | np.ndarray | Sequence[int]") -> Self:
        """Repeats each row, aabb, or row i ``times[i]`` times, without a copy.

        Raises:
            InvalidIndex: ``times`` is not a whole number of at least 0, or not one for each row.
        """
        return self._chosen(np.repeat(np.arange(len(self)), repeats(times, len(self), [(), (len(self),)])))

    def distinct(self) -> Self:
        """The same rows over a storage that holds each distinct window once and nothing else; itself if that is so already.

        Use it before a column is sent, moved or kept for long, so that a few rows do not keep the storage of many alive.
        """
        width = int(self._lengths.max(initial=0)) + 1
        starts = np.where(self._lengths > 0, self._starts, 0)
        keys, inverse = np.unique(starts * width + self._lengths, return_inverse=True)
        windows = self._made(self._storage, keys // width, keys % width)
        values = windows.values
        if values is self._storage:
            return self
        return self._made(values, np.cumsum(windows._lengths) - windows._lengths, windows._lengths)._chosen(inverse)

    # Moving, copying and converting

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """The rows on another device, each distinct one moved once; a dtype casts floating-point rows and no others.

        >>> RaggedTensor(torch.ones(2), [2]).to(torch.bfloat16).dtype, RaggedTensor(torch.tensor([1]), [1]).to(torch.half).dtype
        (torch.bfloat16, torch.int64)
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        target = self.device if device is None else torch.device(device)
        wanted = dtype if dtype is not None and self.dtype.is_floating_point else self.dtype
        if torch.empty(0, device=target).device == self.device and wanted == self.dtype:
            return self
        kept = self.distinct()
        return self._made(kept._storage.to(target, wanted, non_blocking=non_blocking), kept._starts, kept._lengths)

    def pin_memory(self) -> Self:
        """The rows in page-locked memory, each distinct one once; itself if they are there already."""
        kept = self.distinct()
        return (
            self if self._storage.is_pinned() else self._made(kept._storage.pin_memory(), kept._starts, kept._lengths)
        )

    def detach(self) -> Self:
        """The same rows without gradients."""
        return self._made(self._storage.detach(), self._starts, self._lengths)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        kept = self.distinct()
        storage = copy.deepcopy(kept._storage, memo) if kept is self else kept._storage
        return self._made(storage, kept._starts, kept._lengths)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce_value(self, [], protocol)

    def mask(self, side: Side = "right") -> torch.Tensor:
        """Which cells of :meth:`to_padded` hold tokens, ``(B, L)`` bool on the device of the rows; padding is on ``side``."""
        return torch.from_numpy(self._filled(side)).to(self.device)

    def _filled(self, side: Side) -> np.ndarray:
        if side not in ("left", "right"):
            raise InvalidConfig(f"padding goes to the left or to the right, not to {side!r}")
        filled: np.ndarray = np.arange(int(self._lengths.max(initial=0))) < self._lengths[:, None]
        return filled if side == "right" else filled[:, ::-1].copy()

    def to_padded(self, side: Side = "right", value: float = 0) -> torch.Tensor:
        """A dense tensor ``(B, L, *tail)``, padded with ``value`` on the given side.

        Raises:
            InvalidConfig: ``side`` is neither ``"left"`` nor ``"right"``.
        """
        filled, values = self._filled(side), self.values
        index = np.full(filled.shape, len(values), dtype=np.int64)
        index[filled] = np.arange(len(values))
        extended = torch.cat([values, values.new_full((1, *self.tail), value)])
        chosen = rows_at(extended, torch.from_numpy(index.reshape(-1)).to(self.device))
        return chosen.view(*filled.shape, *self.tail)

    def to_nested(self) -> torch.Tensor:
        """A nested tensor ``(B, n_i, *tail)`` in the jagged layout over :attr:`values`."""
        offsets = torch.from_numpy(np.append(0, np.cumsum(self._lengths))).to(self.device)
        return torch.nested.nested_tensor_from_jagged(self.values, offsets)


RAGGED.append(RaggedTensor)


def _check_storage(values: Any) -> None:
    if not isinstance(values, torch.Tensor) or values.is_nested or values.layout != torch.strided or values.ndim == 0:
        shape = f" of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) and not values.is_nested else ""
        raise InvalidColumn(f"values are one dense tensor (N, ...), not a {type(values).__name__}{shape}")


def _form(dtype: torch.dtype, device: torch.device, tail: torch.Size) -> str:
    return f"(n{''.join(f', {size}' for size in tail)}{'' if tail else ','}) {dtype} on {device}"
