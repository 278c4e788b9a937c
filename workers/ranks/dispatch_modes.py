"""How a call reaches the ranks of a group and how their results become one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dataproto import DataProto
from dataproto.errors import InvalidConfig

Method = TypeVar("Method", bound=Callable[..., Any])


class Arguments(NamedTuple):
    """What one rank is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Split = Callable[
    [Arguments, int], Sequence[Arguments]
]  # the call and the number of data-parallel ranks -> one call for each
Join = Callable[[Sequence[Any]], Any]  # the results of the data-parallel ranks -> the result


@dataclass(frozen=True)
class Dispatch:
    """How a method is spread: over which ranks, how its arguments are split, how results are joined.

    Ranks of one data-parallel position (pp, sp, tp) get the same arguments; the first one's result counts.
    """

    split: Split
    join: Join
    rank_zero_only: bool = False


def same_for_all(call: Arguments, parts: int) -> list[Arguments]:
    """The same arguments for every rank."""
    return [call] * parts


def split_rows(call: Arguments, parts: int) -> list[Arguments]:
    """Cuts every batch among the arguments into contiguous parts of about equal cost; the rest goes to every rank.

    A part may have no rows where there are fewer rows than ranks.

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
    bounds = even_bounds(row_sizes(value), parts)
    return [value[start:stop] for start, stop in pairwise(bounds)]


def row_counts(calls: Sequence[Arguments]) -> list[int]:
    """How many rows of the caller's batch each call holds; nothing where calls hold none."""
    batches = [
        next((v for v in [*call.args, *call.kwargs.values()] if isinstance(v, DataProto)), None) for call in calls
    ]
    if any(batch is None for batch in batches):
        return []
    return [len(batch) for batch in batches]  # type: ignore[arg-type]


def row_ranges(counts: Sequence[int]) -> list[str]:
    """Which rows of the caller's batch each call holds, for messages.

    >>> row_ranges([2, 0, 1])
    ['rows 0 to 1', 'no rows', 'rows 2 to 2']
    """
    ends = np.cumsum(counts).tolist()
    return [f"rows {end - count} to {end - 1}" if count else "no rows" for count, end in zip(counts, ends)]


def row_sizes(data: DataProto) -> np.ndarray:
    """How much work each row ``(B,)`` roughly is: its tokens, or 1 where a batch has none."""
    if "attention_mask" not in data:
        return np.ones(len(data))
    return np.asarray(data["attention_mask"].sum(1).cpu(), dtype=np.float64) + 1.0


def even_bounds(sizes: np.ndarray, parts: int) -> list[int]:
    """Where to cut rows of ``sizes`` ``(B,)``, in order, into parts of about equal sums; no part is empty while rows last.

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
    """Batches one after the other (rollouts as wide as the widest, see `DataProto.concat`), as many rows as went in or the
    same number of samples of each; of anything else, the first rank's.
    """
    if not isinstance(results[0], DataProto):
        return results[0]
    return DataProto.concat([result for result in results if len(result)] or list(results[:1]))


def misfit(results: Sequence[Any], rows: Sequence[int]) -> tuple[int, str] | None:
    """The first result that `join_rows` must not join, by its place, and what is wrong with it: not a batch where others are one,
    or not as many rows, or samples of each, as the others make of the ``rows`` that they were given.

    >>> three, two = (DataProto.from_dict(non_tensors={"name": ["a"] * count}) for count in (3, 2))
    >>> misfit([three, two], rows=[3, 2]), misfit([three, None], rows=[3, 2]), misfit([three, two], rows=[3, 3])
    (None, (1, 'returned a NoneType instead of rows'), (1, 'returned 2 rows for the 3 it was given'))
    """
    batches = [isinstance(result, DataProto) for result in results]
    if not any(batches):
        return None
    if not all(batches):
        place = batches.index(False)
        return place, f"returned a {type(results[place]).__name__} instead of rows"
    whole = [len(result) // count for result, count in zip(results, rows) if count and len(result) % count == 0]
    samples = max(set(whole), key=whole.count, default=0)
    for place, (result, count) in enumerate(zip(results, rows)):
        if len(result) != samples * count or (count and not samples):
            return place, f"returned {len(result)} rows for the {count} it was given"
    return None


def first_result(results: Sequence[Any]) -> Any:
    """The first rank's result."""
    return results[0]


MODES = {
    "dp": Dispatch(split_rows, join_rows),
    "all": Dispatch(same_for_all, first_result),
    "rank_zero": Dispatch(same_for_all, first_result, rank_zero_only=True),
}


def dispatch(
    mode: str | None = None, *, split: Split = same_for_all, join: Join = first_result
) -> Callable[[Method], Method]:
    """Marks a worker's method as callable through a group.

    Args:
        mode: ``"dp"``: rows are split over the data-parallel ranks and joined again; ``"all"``: every rank gets the same
            arguments; ``"rank_zero"``: only the first rank is called.
        split, join: instead of a mode, how arguments are split and results joined.

    Raises:
        InvalidConfig: an unknown mode.
    """
    if mode is not None and mode not in MODES:
        raise InvalidConfig(f"dispatch mode {mode!r} is unknown: choose one of {sorted(MODES)}, or give split and join")
    how = Dispatch(split, join) if mode is None else MODES[mode]

    def mark(method: Method) -> Method:
        method.dispatch = how  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_of(worker_class: type, name: str) -> Dispatch:
    """How a method of a worker is spread.

    Raises:
        InvalidConfig: there is no method of that name that a group may call; names those that there are.
    """
    how = getattr(getattr(worker_class, name, None), "dispatch", None)
    if not isinstance(how, Dispatch):
        names = sorted(
            each
            for each in dir(worker_class)
            if isinstance(getattr(getattr(worker_class, each), "dispatch", None), Dispatch)
        )
        raise InvalidConfig(f"{worker_class.__name__} has no method {name!r} to call through a group; it has {names}")
    return how
