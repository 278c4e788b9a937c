"""Padded columns ``(..., L)`` as the inner parts of their rows: what a message holds of a column where that is smaller.

A row begins and ends with a run of elements of which each differs from the one before by the same number: padding (by 0), or
positions that go on behind a response (by 1). A run is its first element, its step and its length. Elements are compared as whole
numbers of the same bits, whose arithmetic wraps around, so every dtype comes back bit for bit: NaNs and negative zeros too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}  # by bytes of an element
_LEAST = 1 << 16  # bytes of a column; below, a message costs more than its bytes
_NARROWEST = 64  # elements of a row; a row of runs alone costs about eight
_WORTH = 7 / 8  # of a column's bytes: where more remain, a column travels as it is, without a copy
_BLOCK = 1 << 18  # elements that are compared at a time


@dataclass(frozen=True)
class Runs:
    """The runs at both ends of N rows ``(N, L)``."""

    bounds: np.ndarray  # (N, 2) int32: where the inner part begins and ends; a row that is one run begins at L
    values: np.ndarray  # (N, 4) whole numbers: first element and step of the run before, and of the run behind

    @property
    def nbytes(self) -> int:
        return self.bounds.nbytes + self.values.nbytes


def trim(bits: np.ndarray, shape: Sequence[int], item_bytes: int) -> tuple[Runs, np.ndarray] | None:
    """The runs of a column, and the bytes ``(n,)`` uint8 of its inner parts; ``None`` where they are not smaller.

    Args:
        bits: the bytes of the column ``(n,)`` uint8.
        shape: of the column, rows in the last dimension.

    >>> column = np.pad(np.arange(640, dtype=np.int32)[:, None] ** 2 % 7, ((0, 0), (100, 50)), constant_values=9)
    >>> runs, inner = trim(column.view(np.uint8).reshape(-1), column.shape, 4)
    >>> runs.bounds[1].tolist(), column.nbytes, runs.nbytes + inner.nbytes
    ([100, 101], 386560, 17920)
    """
    if len(shape) < 2 or item_bytes not in _WORDS or bits.nbytes < _LEAST or shape[-1] < _NARROWEST:
        return None
    rows = bits.view(_WORDS[item_bytes]).reshape(-1, shape[-1])
    bounds = np.concatenate([_inner(rows[start:stop]) for start, stop in _blocks(*rows.shape)])
    runs = Runs(bounds.astype(np.int32), _run_values(rows, bounds))
    if int((bounds[:, 1] - bounds[:, 0]).sum()) * item_bytes + runs.nbytes > _WORTH * bits.nbytes:
        return None
    inner = np.concatenate([row[begin:end] for row, (begin, end) in zip(rows, bounds.tolist(), strict=True)])
    return runs, inner.view(np.uint8)


def untrim(runs: Runs, inner: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The inverse of :func:`trim`: the bytes ``(n,)`` uint8 of the column, in new memory."""
    word, width = runs.values.dtype, shape[-1]
    rows, places = np.empty((math.prod(shape[:-1]), width), word), np.arange(width).astype(word)
    inner, taken = inner.view(word), 0
    for row, (begin, end), (first, step, last, last_step) in zip(rows, runs.bounds.tolist(), runs.values, strict=True):
        row[:begin] = first + step * places[:begin] if step else first
        row[begin:end] = inner[taken : (taken := taken + end - begin)]
        row[end:] = last + last_step * places[: width - end] if last_step else last
    return rows.reshape(-1).view(np.uint8)


def _blocks(rows: int, width: int) -> list[tuple[int, int]]:
    size = max(_BLOCK // width, 1)
    return [(start, start + size) for start in range(0, rows, size)]


def _inner(rows: np.ndarray) -> np.ndarray:
    """Begin and end ``(N, 2)`` of the inner part of each row."""
    width = rows.shape[1]
    steps = rows[:, 1:] - rows[:, :-1]
    turns = steps[:, 1:] != steps[:, :-1]  # (N, L - 2): whether the step changes at the element behind
    first = turns.argmax(1)
    last = width - 3 - turns[:, ::-1].argmax(1)
    one_run = ~turns[np.arange(len(rows)), first]
    begin = np.where(one_run, width, first + 2)
    return np.stack([begin, np.where(one_run, width, np.maximum(last + 1, begin))], axis=1)


def _run_values(rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """First element and step ``(N, 4)`` of the runs before and behind the inner parts at ``bounds (N, 2)``."""
    number, width = np.arange(len(rows)), rows.shape[1]
    last, behind = np.minimum(bounds[:, 1], width - 1), np.minimum(bounds[:, 1] + 1, width - 1)
    start, end = rows[:, 0], rows[number, last]
    return np.stack([start, rows[:, 1] - start, end, rows[number, behind] - end], axis=1)
