"""Dispatch modes: how a group splits the arguments of a call over its ranks and joins their results."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from workers.ranks.layout import Layout

Method = TypeVar("Method", bound=Callable[..., Any])


class Arguments(NamedTuple):
    """The arguments of one rank's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def first(self, name: str) -> Any:
        """The first argument, which may have been given by its ``name``."""
        return self.kwargs[name] if name in self.kwargs else self.args[0]

    def with_first(self, name: str, values: Iterable[Any]) -> "list[Arguments]":
        """The call with each of the ``values`` in the place of the first argument."""
        if name in self.kwargs:
            return [Arguments(self.args, self.kwargs | {name: value}) for value in values]
        return [Arguments((value, *self.args[1:]), self.kwargs) for value in values]


Split = Callable[[Arguments, int], Sequence[Arguments]]
"""The arguments of a call and the number of data-parallel ranks, to the arguments of each of them."""

Join = Callable[[Sequence[Any]], Any]
"""The results of the data-parallel ranks to the result of the call."""


@dataclass(frozen=True)
class Dispatch:
    """How a group calls a method: on which ranks, how it splits arguments and how it joins results.

    All ranks of one data-parallel position get the same arguments, and one of them returns the result (`returns_result`).
    """

    split: Split
    join: Join
    rank_zero_only: bool = False


def replicate(call: Arguments, parts: int) -> list[Arguments]:
    """Passes the same arguments to every rank."""
    return [call] * parts


def split_rows(call: Arguments, parts: int) -> list[Arguments]:
    """Splits each `DataProto` among the arguments into contiguous parts with similar numbers of tokens; copies other arguments.

    A part has no rows if there are fewer rows than ranks.

    >>> data = DataProto.from_dict(non_tensors={"name": ["a", "b", "c"]})
    >>> [part.args[0]["name"].tolist() for part in split_rows(Arguments((data,), {}), 2)]
    [['a'], ['b', 'c']]
    """
    args = [_parts(value, parts) for value in call.args]
    kwargs = {name: _parts(value, parts) for name, value in call.kwargs.items()}
    return [
        Arguments(tuple(value[part] for value in args), {name: value[part] for name, value in kwargs.items()})
        for part in range(parts)
    ]


def _parts(value: Any, parts: int) -> Sequence[Any]:
    if not isinstance(value, DataProto):
        return [value] * parts
    return [value[start:stop] for start, stop in pairwise(even_bounds(_row_sizes(value), parts))]


def row_counts(calls: Sequence[Arguments]) -> list[int]:
    """The number of rows of the caller's batch in each call; empty if the call has no batch."""
    batches = [
        next((v for v in [*call.args, *call.kwargs.values()] if isinstance(v, DataProto)), None) for call in calls
    ]
    if any(batch is None for batch in batches):
        return []
    return [len(batch) for batch in batches]  # type: ignore[arg-type]


def row_ranges(counts: Sequence[int]) -> list[str]:
    """The rows of the caller's batch in each call, for messages.

    >>> row_ranges([2, 0, 1])
    ['rows 0 to 1', 'no rows', 'rows 2 to 2']
    """
    ends = np.cumsum(counts).tolist()
    return [f"rows {end - count} to {end - 1}" if count else "no rows" for count, end in zip(counts, ends)]


def _row_sizes(data: DataProto) -> np.ndarray:
    """Estimated cost of each row ``(B,)``: its number of tokens, or 1 if the batch has no tokens."""
    if "attention_mask" not in data:
        return np.ones(len(data))
    return np.asarray(data["attention_mask"].sum(1).cpu(), dtype=np.float64) + 1.0


def even_bounds(sizes: np.ndarray, parts: int) -> list[int]:
    """Bounds that split rows of ``sizes`` ``(B,)``, in order, into parts with similar sums, none empty if there are enough rows.

    >>> even_bounds(np.array([1, 1, 1, 3]), 2), even_bounds(np.array([5]), 2)
    ([0, 3, 4], [0, 1, 1])
    """
    ends = np.cumsum(sizes)
    total = float(ends[-1]) if len(ends) else 0.0
    bounds = [0]
    for part in range(1, parts):
        cut = int(np.searchsorted(ends - sizes / 2, total * part / parts))
        first, last = min(bounds[-1] + 1, len(sizes)), max(len(sizes) - (parts - part), 0)
        bounds.append(max(min(cut, last), first))
    return [*bounds, len(sizes)]


def join_rows(results: Sequence[Any]) -> Any:
    """Concatenates batches of contiguous parts; of other results returns the first.

    Rollouts are padded to the widest, see `DataProto.concat`.
    """
    if not isinstance(results[0], DataProto):
        return results[0]
    return DataProto.concat([result for result in results if len(result)] or list(results[:1]))


def find_mismatch(results: Sequence[Any], rows: Sequence[int]) -> tuple[int, str] | None:
    """The first result that `join_rows` cannot join: its index and the problem, or ``None`` if all fit.

    Either every result is a batch, or none. All batches must have the same number of rows (samples) for each of the ``rows``
    that their ranks were given.

    >>> three, two = (DataProto.from_dict(non_tensors={"name": ["a"] * count}) for count in (3, 2))
    >>> find_mismatch([three, two], rows=[3, 2]), find_mismatch([three, two], rows=[3, 3])
    (None, (1, 'returned 2 rows for the 3 it was given'))
    >>> find_mismatch([three, None], rows=[3, 2])
    (1, 'returned a NoneType instead of a batch')
    """
    batches = [isinstance(result, DataProto) for result in results]
    if not any(batches):
        return None
    if not all(batches):
        index = batches.index(False)
        return index, f"returned a {type(results[index]).__name__} instead of a batch"
    multiples = [len(result) // count for result, count in zip(results, rows) if count and len(result) % count == 0]
    samples = max(set(multiples), key=multiples.count, default=0)
    for index, (result, count) in enumerate(zip(results, rows)):
        if len(result) != samples * count or (count and not samples):
            return index, f"returned {len(result)} rows for the {count} it was given"
    return None


def first_result(results: Sequence[Any]) -> Any:
    """Returns the result of the first rank."""
    return results[0]


DISPATCH_MODES = {
    "dp": Dispatch(split_rows, join_rows),
    "all": Dispatch(replicate, first_result),
    "rank_zero": Dispatch(replicate, first_result, rank_zero_only=True),
}


def dispatch(
    mode: str | None = None, *, split: Split = replicate, join: Join = first_result
) -> Callable[[Method], Method]:
    """Makes a worker's method callable through a group. The method itself is returned unchanged.

    Args:
        mode: ``"dp"`` splits the rows over the data-parallel ranks and joins their results; ``"all"`` passes the same arguments
            to every rank and returns the first result; ``"rank_zero"`` calls only the first rank.
        split, join: custom functions, instead of a mode.

    Raises:
        InvalidConfig: the mode is unknown.
    """
    if mode is not None and mode not in DISPATCH_MODES:
        raise InvalidConfig(
            f"dispatch mode {mode!r} is unknown: choose one of {sorted(DISPATCH_MODES)}, or give split and join"
        )
    chosen = Dispatch(split, join) if mode is None else DISPATCH_MODES[mode]

    def mark(method: Method) -> Method:
        method.dispatch = chosen  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_of(worker_class: type, name: str) -> Dispatch:
    """The dispatch of a worker's method.

    Raises:
        InvalidConfig: the worker has no such method, or it is not marked by `dispatch`; the message lists the methods that are.
    """
    found = getattr(getattr(worker_class, name, None), "dispatch", None)
    if not isinstance(found, Dispatch):
        names = sorted(
            each
            for each in dir(worker_class)
            if isinstance(getattr(getattr(worker_class, each), "dispatch", None), Dispatch)
        )
        raise InvalidConfig(f"{worker_class.__name__} has no method {name!r} to call through a group; it has {names}")
    return found


def returns_result(layout: Layout, rank: int) -> bool:
    """Whether a rank returns the result of its data-parallel position: the first rank of sp and tp in the last pipeline stage.

    >>> [rank for rank in range(8) if returns_result(Layout(dp=2, tp=2, pp=2), rank)]
    [4, 6]
    """
    position = layout.coordinates(rank)
    return position["tp"] == position["sp"] == 0 and position["pp"] == layout.pp - 1
