"""Supervised rows as columns: token lists padded to one width, or side by side in bins.

Rows are lists of numbers, arrays, tensors, or one :class:`RaggedTensor`, which needs no conversion.

Dimension letters: B rows, L tokens of the longest row, R = L - 1; S segments: the rows and, at the end of each bin that is not
full, the cells that are left.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidColumn, InvalidRow, RowCountMismatch
from dataproto.planning import first_fit_decreasing
from dataproto.protocol import DataProto
from dataproto.ragged import RaggedTensor
from dataproto.tensordict_utils import rows_at

Rows: TypeAlias = Sequence[Any] | RaggedTensor
Code: TypeAlias = Literal["q", "B", "f"]
_DTYPES = {"q": torch.int64, "B": torch.uint8, "f": torch.float32}


def ragged_rows(rows: Rows, code: Code = "q", name: str = "rows") -> RaggedTensor:
    """Rows of numbers as one column of int64 (``"q"``), uint8 (``"B"``) or float32 (``"f"``), without a Python loop over tokens.

    Raises:
        InvalidRow: a row holds anything else.
        InvalidColumn: ``rows`` is a ragged tensor of another dtype.

    >>> ragged_rows([[5, 6], [], [7]]).values
    tensor([5, 6, 7])
    """
    if isinstance(rows, RaggedTensor):
        if rows.dtype != _DTYPES[code] or rows.tail:
            raise InvalidColumn(f"{name} are {_DTYPES[code]}, one a token, not {rows!r}")
        return rows
    parts = []
    for row, numbers in enumerate(rows):
        try:
            parts.append(_packed(numbers, code))
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            raise InvalidRow(row, f"{name} are {_DTYPES[code]}, one a token: {error}") from error
    values = np.frombuffer(bytearray().join(parts), dtype=code)
    return RaggedTensor(torch.from_numpy(values), np.fromiter(map(len, rows), np.int64, len(parts)))


def _packed(numbers: Any, code: str) -> Any:
    """The bytes of a row; of a list by the fastest way that refuses other numbers."""
    if isinstance(numbers, list | tuple):
        return bytes(numbers) if code == "B" else struct.pack(f"{len(numbers)}{code}", *numbers)
    if np.ndim(numbers) != 1:
        raise ValueError(f"shape {np.shape(numbers)}")
    return np.ascontiguousarray(np.asarray(numbers).astype(code, casting="same_kind", copy=False))


def pad_rows(rows: RaggedTensor, width: int, fill: float) -> tuple[Tensor, Tensor]:
    """Pads rows on the right to ``(B, width)``; also returns which cells hold tokens, ``(B, width)`` bool.

    Raises:
        InvalidRow: a row is longer than ``width``.

    >>> pad_rows(ragged_rows([[5, 6], [7]]), 3, 0)[0].tolist()
    [[5, 6, 0], [7, 0, 0]]
    """
    lengths = rows.lengths.numpy()
    if (long := np.flatnonzero(lengths > width)).size:
        raise InvalidRow(int(long[0]), f"{lengths[long[0]]} tokens do not fit into {width}")
    filled = np.arange(width) < lengths[:, None]
    padded = torch.full(filled.shape, fill, dtype=rows.dtype)
    padded.numpy()[filled] = rows.values.numpy()
    return padded, torch.from_numpy(filled)


def collate_supervised(
    input_ids: Rows,
    loss_mask: Rows | None = None,
    token_types: Rows | None = None,
    *,
    pad_token_id: int,
    width: int | None = None,
) -> DataProto:
    """Puts supervised rows, padded on the right, into the columns of a rollout: every token but the first is a response.

    The columns are ``input_ids``, ``attention_mask`` and ``position_ids`` ``(B, L)``, ``response_mask`` ``(B, R)`` with
    R = L - 1, and with ``token_types`` also ``mm_token_type_ids`` ``(B, L)``, from which, with the media of the rows, a model
    family makes the m-RoPE ``position_ids`` ``(B, 4, L)``.

    Args:
        loss_mask: 1 on tokens to learn, 0 elsewhere; default: all. The first token of a row is never learnt.
        token_types: 0 text, 1 image, 2 video placeholder.
        width: L; default: the length of the longest row.

    Raises:
        InvalidRow: a row is longer than ``width``, holds other values, or differs in length between the arguments.

    >>> data = collate_supervised([[5, 6, 7], [8, 9]], [[0, 0, 1], [0, 1]], pad_token_id=0)
    >>> data["input_ids"].tolist(), data["response_mask"].tolist()
    ([[5, 6, 7], [8, 9, 0]], [[0, 1], [1, 0]])
    """
    ids = ragged_rows(input_ids, name="input_ids")
    length = int(ids.lengths.max()) if width is None and len(ids) else width or 0
    padded, filled = pad_rows(ids, length, pad_token_id)
    attention = filled.to(torch.int64)
    learnt = attention[:, 1:] if loss_mask is None else pad_rows(loss_masks(loss_mask, ids), length, 0)[0][:, 1:]
    columns = {
        "input_ids": padded,
        "attention_mask": attention,
        "position_ids": torch.arange(length).mul(attention),
        "response_mask": learnt.to(torch.int64),
    }
    if token_types is not None:
        columns["mm_token_type_ids"] = pad_rows(_alike(token_types, ids, "token_types", 2), length, 0)[0].to(torch.int8)
    return DataProto.from_dict(columns)


def loss_masks(rows: Rows, like: RaggedTensor) -> RaggedTensor:
    """Loss masks of 0 and 1 as a column of uint8; checks that their lengths are those of the rows ``like``."""
    return _alike(rows, like, "loss_mask", 1)


def _alike(rows: Rows, like: RaggedTensor, name: str, most: int) -> RaggedTensor:
    """Numbers from 0 to ``most`` as a column of uint8 with the lengths of the rows ``like``."""
    if isinstance(rows, RaggedTensor) and not rows.dtype.is_floating_point:
        storage = rows.storage.to(torch.uint8)
        if rows.dtype not in (
            torch.bool,
            torch.uint8,
        ):  # a number that uint8 cannot hold must not wrap around to 0 or 1
            storage[storage != rows.storage] = 255
        rows = RaggedTensor.windows(storage, rows.starts, rows.lengths)
    made = ragged_rows(rows, "B", name)
    if len(made) != len(like):
        raise RowCountMismatch(f"{len(like)} rows of input_ids, but {len(made)} of {name}")
    if (wrong := (made.lengths != like.lengths).nonzero()).numel():
        row = int(wrong[0])
        raise InvalidRow(row, f"{int(like.lengths[row])} input_ids, but {int(made.lengths[row])} of {name}")
    if len(made.storage) and int(made.storage.max()) > most:  # the storage may hold more than the rows
        for row, numbers in enumerate(made):
            if (numbers > most).any():
                raise InvalidRow(row, f"{name} are numbers from 0 to {most}, not {numbers.tolist()}")
    return made


# Bins

NO_LABEL = -100
"""The label that losses of PyTorch and Hugging Face ignore."""


@dataclass(frozen=True)
class BinLayout:
    """The place of each row in a grid ``(bins, capacity)``: one after the other, each starting at a multiple of ``align``.

    >>> layout = BinLayout.of([3, 2, 4], [np.array([0, 1]), np.array([2])], capacity=6)
    >>> layout.position_ids.tolist(), layout.cu_seqlens.values.tolist()
    ([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]], [0, 3, 5, 6, 0, 4, 6])
    >>> layout.place(RaggedTensor(torch.arange(9), [3, 2, 4]), -1).tolist()
    [[0, 1, 2, 3, 4, -1], [5, 6, 7, 8, -1, -1]]
    """

    bins: int
    capacity: int
    rows: np.ndarray  # (S,) the row of each segment, -1 for what is left at the end of a bin
    tokens: np.ndarray  # (S,) number of tokens of each segment
    sizes: np.ndarray  # (S,) number of cells of each segment
    segments: np.ndarray  # (bins,) number of segments of each bin

    @classmethod
    def of(
        cls, lengths: Sequence[int] | np.ndarray | Tensor, bins: Sequence[np.ndarray], capacity: int, align: int = 1
    ) -> "BinLayout":
        """The layout of rows of ``lengths`` ``(B,)`` in ``bins`` of row indices, as `first_fit_decreasing` returns them.

        Raises:
            InvalidColumn: the bins do not hold every row once, or a bin holds more than ``capacity``; names it.
        """
        each, rows = np.asarray(lengths, dtype=np.int64), np.concatenate([np.zeros(0, dtype=np.int64), *bins])
        if not np.array_equal(np.sort(rows), np.arange(len(each))):
            raise InvalidColumn(f"bins hold each of {len(each)} rows once, not {rows.tolist()}")
        tokens = each[rows]
        sizes = -(-tokens // align) * align
        counts = np.fromiter(map(len, bins), np.int64, len(bins))
        ends = np.cumsum(counts)
        left = capacity - np.diff(np.append(0, np.cumsum(sizes))[ends], prepend=0)
        if (wrong := np.flatnonzero(left < 0)).size:
            raise InvalidColumn(f"bin {wrong[0]} holds {capacity - left[wrong[0]]} tokens, more than {capacity}")
        places, rest = ends[left > 0], left[left > 0]
        return cls(
            bins=len(bins),
            capacity=capacity,
            rows=np.insert(rows, places, -1),
            tokens=np.insert(tokens, places, 0),
            sizes=np.insert(sizes, places, rest),
            segments=counts + (left > 0),
        )

    @cached_property
    def position_ids(self) -> Tensor:
        """The position of each cell in its segment, ``(bins, capacity)`` int64."""
        return torch.from_numpy(runs(np.zeros_like(self.sizes), self.sizes)).view(self.bins, self.capacity)

    @cached_property
    def filled(self) -> Tensor:
        """Which cells hold tokens, ``(bins, capacity)`` bool."""
        spans = np.stack([self.tokens, self.sizes - self.tokens], axis=1).ravel()
        return torch.from_numpy(np.repeat(np.arange(len(spans)) % 2 == 0, spans)).view(self.bins, self.capacity)

    @cached_property
    def cu_seqlens(self) -> RaggedTensor:
        """The start of each segment of a bin and the end of the last, int32, one row a bin, as attention kernels take them."""
        first = np.cumsum(self.segments) - self.segments
        ends = np.cumsum(self.sizes) - np.repeat(np.arange(self.bins) * self.capacity, self.segments)
        return RaggedTensor(torch.from_numpy(np.insert(ends, first, 0).astype(np.int32)), self.segments + 1)

    def place(self, rows: RaggedTensor, fill: float) -> Tensor:
        """Puts rows ``(n_i, *tail)`` into their cells of ``(bins, capacity, *tail)``, ``fill`` into the others; gradients flow.

        Raises:
            InvalidColumn: the lengths of the rows are not those of the layout.
        """
        used = self.rows >= 0
        order = self.rows[used]
        if len(rows) != len(order) or not np.array_equal(rows.lengths.numpy()[order], self.tokens[used]):
            raise InvalidColumn(f"{rows!r} are not the rows of this layout")
        if len(rows) == 0 or len(rows.storage) == 0:
            return rows.storage.new_full((self.bins, self.capacity, *rows.tail), fill)
        chosen = rows_at(rows.storage, torch.from_numpy(self._sources(rows)).to(rows.device))
        empty = ~self.filled.to(rows.device).view(self.bins, self.capacity, *[1] * len(rows.tail))
        return chosen.view(self.bins, self.capacity, *rows.tail).masked_fill_(empty, fill)

    def _sources(self, rows: RaggedTensor) -> np.ndarray:
        """The index of each cell's value in the storage, ``(bins * capacity,)``; cached for columns of equal windows."""
        key = (len(rows.storage), rows.starts.numpy().tobytes())
        if key not in self._found:
            first = np.where(self.rows >= 0, rows.starts.numpy()[self.rows], 0)
            small = len(rows.storage) + self.capacity < 2**31
            index = runs(first, self.sizes, np.int32 if small else np.int64)
            if (first + self.sizes > len(rows.storage)).any():
                np.minimum(index, len(rows.storage) - 1, out=index)  # cells without tokens
            self._found[key] = index
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[int, bytes], np.ndarray]:
        return {}

    def take(self, grid: Tensor) -> RaggedTensor:
        """The inverse of :meth:`place`: the rows of a grid ``(bins, capacity, *tail)``, in their original order."""
        used = self.rows >= 0
        return RaggedTensor(grid[self.filled.to(grid.device)], self.tokens[used])[np.argsort(self.rows[used])]


def runs(first: np.ndarray, sizes: np.ndarray, dtype: type[np.signedinteger] = np.int64) -> np.ndarray:
    """Runs of consecutive numbers, one after the other: ``sizes[i]`` numbers from ``first[i]`` on.

    >>> runs(np.array([0, 7, 5]), np.array([3, 0, 2]))
    array([0, 1, 2, 5, 6])
    """
    first, sizes = first[sizes > 0], sizes[sizes > 0]
    numbers = np.ones(int(sizes.sum()), dtype=dtype)
    if len(sizes):
        numbers[0] = first[0]
        numbers[np.cumsum(sizes)[:-1]] = np.diff(first) - sizes[:-1] + 1
    return np.cumsum(numbers, dtype=dtype, out=numbers)


def pack_supervised(
    input_ids: Rows,
    loss_mask: Rows | None = None,
    *,
    capacity: int,
    pad_token_id: int,
    bins: Sequence[np.ndarray] | None = None,
    align: int = 1,
) -> DataProto:
    """Packs supervised rows into bins; the batch has one row a bin.

    The columns are ``input_ids``, ``position_ids`` (from 0 in each segment) and ``shift_labels``, ``(bins, capacity)`` int64, and
    ``cu_seqlens``, ragged int32. The label of a token is the next token of its row, or -100 if there is none or it is not to be
    learnt; Hugging Face's models take labels under this name and do not shift them again. A `BinLayout` places further columns.

    Args:
        loss_mask: 1 on tokens to learn, 0 elsewhere; default: all. The first token of a row is never learnt.
        bins: row indices of each bin; default: those of `first_fit_decreasing`.
        align: each row starts at a multiple of it.

    Raises:
        InvalidRow: a row is longer than ``capacity``, or holds other values.
        InvalidColumn: loss masks have other lengths, or the bins do not hold every row once or hold too much.

    >>> data = pack_supervised([[5, 6, 7], [8, 9]], [[0, 0, 1], [0, 1]], capacity=6, pad_token_id=0)
    >>> data["input_ids"].tolist(), data["shift_labels"].tolist()
    ([[5, 6, 7, 8, 9, 0]], [[-100, 7, -100, 9, -100, -100]])
    """
    ids = ragged_rows(input_ids, name="input_ids")
    if bins is None:
        bins = first_fit_decreasing(ids.lengths, capacity, align)
    layout = BinLayout.of(ids.lengths, bins, capacity, align)
    tokens = layout.place(ids, pad_token_id)
    learnt = layout.filled if loss_mask is None else layout.place(loss_masks(loss_mask, ids), 0).bool()
    follows = learnt.view(-1)[1:] & (layout.position_ids.view(-1)[1:] > 0)  # the first token of a row is no label
    labels = torch.empty_like(tokens)
    flat = labels.view(-1)
    torch.where(follows, tokens.view(-1)[1:], torch.tensor(NO_LABEL), out=flat[:-1])
    flat[-1:] = NO_LABEL
    return DataProto.from_dict(
        {"input_ids": tokens, "position_ids": layout.position_ids, "shift_labels": labels},
        {"cu_seqlens": layout.cu_seqlens},
    )
