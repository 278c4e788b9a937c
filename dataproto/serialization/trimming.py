"""Padded columns ``(..., L)`` as the inner parts of their rows: what a message holds of a column that is half padding or more.

A row begins and ends with a run of elements of which each differs from the one before by the same number: padding (by 0), or
positions that continue after a response (by 1). A run is its first element, its step and its length. Elements are compared as
whole numbers of the same bits, whose arithmetic wraps around, so every dtype comes back bit for bit: NaNs and negative zeros too.

A few rows tell whether a column is worth a search, and a search reads each row from its ends, no further than its runs go.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}  # by bytes of an element
_LEAST = 1 << 16  # bytes of a column; below, a message costs more than its bytes
_NARROWEST = 64  # elements of a row; a row of runs alone costs about eight
_WORTH = 1 / 2  # of a column's bytes: where more remain, a column travels as it is, without a copy
_ROWS = 64  # that are compared at a time; so many of a column tell whether a search is worth its time
_BLOCK = 1 << 16  # elements that are compared at a time


@dataclass(frozen=True)
class Runs:
    """The runs at both ends of N rows ``(N, L)``."""

    bounds: np.ndarray  # (N, 2) int32: where the inner part begins and ends; a row that is one run begins at L
    values: np.ndarray  # (N, 4) whole numbers: first element and step of the run before, and of the run after

    @property
    def nbytes(self) -> int:
        return self.bounds.nbytes + self.values.nbytes


def trim(bits: np.ndarray, shape: Sequence[int], item_bytes: int) -> tuple[Runs, np.ndarray] | None:
    """The runs of a column, and the bytes ``(n,)`` uint8 of its inner parts; ``None`` where they are more than half of it.

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
    few = _inner(rows[:: -(-len(rows) // _ROWS)])
    if (few[:, 1] - few[:, 0]).mean() > _WORTH * rows.shape[1]:
        return None
    bounds = np.concatenate([_inner(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)])
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


def _inner(rows: np.ndarray) -> np.ndarray:
    """Begin and end ``(N, 2)`` of the inner part of each row."""
    width = rows.shape[1]
    begin = _run_lengths(rows, np.arange(len(rows)))
    behind = _run_lengths(rows[:, ::-1], np.flatnonzero(begin < width))
    return np.stack([begin, np.where(begin < width, np.maximum(width - behind, begin), width)], axis=1)


def _run_lengths(rows: np.ndarray, running: np.ndarray) -> np.ndarray:
    """The length ``(N,)`` of the run with which each of the rows ``running`` begins, two elements at least; ``L`` of others."""
    width, step = rows.shape[1], rows[:, 1:2] - rows[:, :1]
    lengths = np.full(len(rows), width)
    start, size = 2, 16
    while start < width and len(running):
        part = rows[running, start - 1 : start + size]
        turns = part[:, 1:] - part[:, :-1] != step[running]
        turn = turns.argmax(1)
        ends = turns[np.arange(len(running)), turn]
        lengths[running[ends]] = start + turn[ends]
        running, start = running[~ends], start + size
        size = min(4 * size, max(_BLOCK // max(len(running), 1), 16))
    return lengths


def _run_values(rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """First element and step ``(N, 4)`` of the runs before and behind the inner parts at ``bounds (N, 2)``."""
    number, width = np.arange(len(rows)), rows.shape[1]
    last, behind = np.minimum(bounds[:, 1], width - 1), np.minimum(bounds[:, 1] + 1, width - 1)
    start, end = rows[:, 0], rows[number, last]
    return np.stack([start, rows[:, 1] - start, end, rows[number, behind] - end], axis=1)
