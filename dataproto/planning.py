"""Decides which rows share a micro-batch, a rank or a bin. Pure functions of numbers.

Tokens and costs are whole numbers, one a row; costs usually come from `VLMFamily.row_costs`. Dimension letters: B rows.
"""

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from dataproto.errors import InvalidConfig, InvalidRow, RowCountMismatch

Numbers: TypeAlias = Sequence[int] | np.ndarray | Tensor
Groups: TypeAlias = Iterable[Hashable] | np.ndarray | Tensor
Item = TypeVar("Item")


# Contiguous splits


def split_by_size(items: Iterable[tuple[Item, int]], limit: int) -> Iterator[list[Item]]:
    """Items with their sizes, in order, in lists of at most ``limit`` together; a larger item is a list by itself.

    >>> list(split_by_size([("a", 2), ("b", 1), ("c", 9), ("d", 1)], limit=3))
    [['a', 'b'], ['c'], ['d']]
    """
    part: list[Item] = []
    filled = 0
    for item, size in items:
        if part and filled + size > limit:
            yield part
            part, filled = [], 0
        part.append(item)
        filled += size
    if part:
        yield part


def split_by_tokens(lengths: Numbers, budget: int, lead: Numbers | None = None) -> list[slice]:
    """Splits rows, in order, into contiguous parts of at most ``budget`` tokens, as few as a greedy pass finds.

    The order keeps the samples of a prompt together, so that their images and prompt are computed once. A row that exceeds the
    budget is a part by itself.

    Args:
        lengths: ``(B,)`` tokens of each row.
        lead: ``(B,)`` tokens that a row adds as the first of its part (of the prompt that it otherwise shares with the row
            before); default: none.

    Raises:
        InvalidConfig: the budget is below 1.
        RowCountMismatch: an argument does not have one number for each row.

    >>> split_by_tokens([3, 3, 3, 9, 1], budget=6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    >>> split_by_tokens([5, 2, 2, 2], budget=9, lead=[0, 3, 3, 3])
    [slice(0, 3, None), slice(3, 4, None)]
    """
    tokens, limit = _amounts(lengths), _positive("token budget", budget)
    first = np.zeros_like(tokens) if lead is None else _amounts(lead, len(tokens))
    ends = np.cumsum(tokens)
    parts: list[slice] = []
    start = 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + limit - first[start], side="right"))
        parts.append(slice(start, max(stop, start + 1)))
        start = parts[-1].stop
    return parts


# Parts in any order


def balance(costs: Numbers, parts: int, groups: Groups | None = None) -> list[np.ndarray]:
    """Divides rows into parts of nearly equal cost; returns the row indices of each, ascending. Deterministic.

    Takes the better of two solutions: largest first (Graham 1969: at most 4/3 - 1/(3 ``parts``) of the optimal maximum) and
    largest differencing (Karmarkar and Karp 1982: usually much closer).

    Args:
        costs: ``(B,)``, at least 0.
        groups: ``(B,)`` a key for each row, such as its ``uid``: rows of a group go to one part.

    Raises:
        InvalidConfig: ``parts`` is below 1, or a cost is negative or not finite; names the row.
        RowCountMismatch: there is not one group for each row.

    >>> [part.tolist() for part in balance([7, 5, 4, 3, 1], parts=2)]
    [[0, 3], [1, 2, 4]]
    >>> [part.tolist() for part in balance([1, 1, 2, 2], parts=2, groups=["a", "a", "b", "b"])]
    [[2, 3], [0, 1]]
    """
    if parts < 1:
        raise InvalidConfig(f"{parts} parts: must be at least 1")
    each = _amounts(costs)
    if groups is None:
        return [np.array(sorted(part), dtype=np.int64) for part in _best(each, parts)]
    number_of = _numbers(groups)
    if len(number_of) != len(each):
        raise RowCountMismatch(f"{len(each)} costs, but {len(number_of)} groups")
    sums = np.zeros(int(number_of.max(initial=-1)) + 1, dtype=each.dtype)
    np.add.at(sums, number_of, each)
    owner = np.zeros(len(sums), dtype=np.int64)
    for part, members in enumerate(_best(sums, parts)):
        owner[members] = part
    return [np.flatnonzero(owner[number_of] == part) for part in range(parts)]


def _best(costs: np.ndarray, parts: int) -> list[list[int]]:
    found = [_largest_first(costs, parts), _largest_differencing(costs, parts)]
    return min(found, key=lambda chosen: max(costs[part].sum() for part in chosen))


def _largest_first(costs: np.ndarray, parts: int) -> list[list[int]]:
    """Assigns each row, the costliest first, to the part that is cheapest so far."""
    chosen: list[list[int]] = [[] for _ in range(parts)]
    queue = [(0, part) for part in range(parts)]
    amounts = costs.tolist()
    for row in np.argsort(-costs, kind="stable").tolist():
        total, part = heapq.heappop(queue)
        chosen[part].append(row)
        heapq.heappush(queue, (total + amounts[row], part))
    return chosen


def _largest_differencing(costs: np.ndarray, parts: int) -> list[list[int]]:
    """Merges solutions of few rows, the two with the largest differences between their parts first, so that costly parts of one
    join cheap parts of the other.
    """
    amounts = costs.tolist()
    solutions = [[(amounts[row], [row])] for row in np.argsort(-costs, kind="stable").tolist()]
    queue = [(-_difference(solution, parts), number) for number, solution in enumerate(solutions)]
    heapq.heapify(queue)
    while len(queue) > 1:
        one, other = solutions[heapq.heappop(queue)[1]], solutions[heapq.heappop(queue)[1]]
        solutions.append(_merged(one, other, parts))
        heapq.heappush(queue, (-_difference(solutions[-1], parts), len(solutions) - 1))
    chosen = [members for _, members in solutions[-1]] if solutions else []
    return chosen + [[] for _ in range(parts - len(chosen))]


_Solution: TypeAlias = list[tuple[float, list[int]]]
"""Costs and rows of the parts that are not empty, the costliest first."""


def _difference(solution: _Solution, parts: int) -> float:
    return solution[0][0] - (solution[-1][0] if len(solution) == parts else 0)


def _merged(one: _Solution, other: _Solution, parts: int) -> _Solution:
    """Joins cheap parts of one with empty and costly parts of the other."""
    meeting = max(len(one) + len(other) - parts, 0)
    apart = one[: len(one) - meeting] + other[: len(other) - meeting]
    pairs = zip(one[len(one) - meeting :], reversed(other[len(other) - meeting :]))
    together = [(cost + cost_there, rows + rows_there) for (cost, rows), (cost_there, rows_there) in pairs]
    return sorted(apart + together, key=lambda part: -part[0])


def first_fit_decreasing(lengths: Numbers, capacity: int) -> list[np.ndarray]:
    """Puts rows into bins of at most ``capacity`` tokens, the longest first, each into the first bin with room.

    Needs at most 11/9 of the minimal number of bins, plus 6/9 (Dósa 2007).

    Returns:
        The row indices of each bin, ascending.

    Raises:
        InvalidConfig: ``capacity`` is below 1.
        InvalidRow: a row does not fit into an empty bin; its ``index`` says which.

    >>> [bin.tolist() for bin in first_fit_decreasing([5, 7, 3, 2, 4], capacity=10)]
    [[1, 2], [0, 4], [3]]
    """
    capacity, sizes = int(_positive("capacity", capacity)), np.ceil(_amounts(lengths)).astype(np.int64)
    if (wrong := np.flatnonzero(sizes > capacity)).size:
        row = int(wrong[0])
        raise InvalidRow(row, f"{sizes[row]} tokens do not fit into a bin of {capacity}: cut the row or leave it out")
    if len(sizes) == 0:
        return []
    order = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(len(sizes), dtype=np.int64)
    bin_of[order] = _first_fits(sizes[order].tolist(), capacity)
    return np.split(np.argsort(bin_of, kind="stable"), np.cumsum(np.bincount(bin_of))[:-1])


def _first_fits(sizes: list[int], capacity: int) -> list[int]:
    """The first bin with room for each size in turn, found in a tree of the largest rooms: O(n log n)."""
    leaves = 1 << (len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # room[n] is the larger of nodes 2n and 2n + 1; leaves are bins.
    chosen = []
    for size in sizes:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        chosen.append(node - leaves)
        room[node] -= size
        while node > 1:
            node //= 2
            larger = max(room[2 * node], room[2 * node + 1])
            if room[node] == larger:
                break
            room[node] = larger
    return chosen


def cut_minibatches(groups: Groups, prompts: int) -> list[np.ndarray]:
    """Divides rows into the fewest mini-batches of at most ``prompts`` prompts, all samples of a prompt together, in order of
    appearance; returns the row indices of each.

    If the number of prompts does not divide, sizes differ by at most one prompt, so that samples weigh about the same in every
    step; verl refuses such a number.

    >>> [part.tolist() for part in cut_minibatches(["a", "a", "b", "c", "b"], prompts=2)]
    [[0, 1, 2, 4], [3]]
    >>> [len(part) for part in cut_minibatches(range(9), prompts=4)]
    [3, 3, 3]
    """
    if not isinstance(prompts, int | np.integer) or prompts < 1:
        raise InvalidConfig(f"a mini-batch of {prompts!r} prompts: must be a whole number of at least 1")
    numbers = _numbers(groups)
    count = int(numbers.max(initial=-1)) + 1
    numbers = numbers * -(-count // prompts) // max(count, 1)
    ends = np.cumsum(np.bincount(numbers))
    return np.split(np.argsort(numbers, kind="stable"), ends[:-1]) if len(ends) else []


def places_in_groups(groups: Sequence[object]) -> np.ndarray:
    """The number of rows of the same group before each row, ``(B,)``.

    >>> places_in_groups(["a", "b", "a", "a"]).tolist()
    [0, 0, 1, 2]
    """
    seen: dict[object, int] = {}
    places = []
    for group in groups:
        places.append(seen.get(group, 0))
        seen[group] = places[-1] + 1
    return np.array(places, dtype=np.int64)


def _numbers(groups: Groups) -> np.ndarray:
    """Groups numbered in order of appearance ``(B,)``."""
    order: dict[object, int] = {}
    named = groups.tolist() if isinstance(groups, np.ndarray | Tensor) else groups
    return np.array([order.setdefault(group, len(order)) for group in named], dtype=np.int64)


def _positive(name: str, number: float) -> float:
    if not number >= 1:
        raise InvalidConfig(f"{name} {number}: must be at least 1")
    return number


def _amounts(numbers: Numbers, rows: int | None = None) -> np.ndarray:
    """Numbers ``(B,)`` as int64, or float64 if they are not whole; checks that they are finite and at least 0."""
    array = numbers.detach().cpu().numpy() if isinstance(numbers, Tensor) else np.asarray(numbers)
    array = array.astype(np.int64 if array.size == 0 or array.dtype.kind in "biu" else np.float64)
    if array.ndim != 1 or (rows is not None and len(array) != rows):
        raise RowCountMismatch(
            f"one number for each{'' if rows is None else f' of {rows}'} row is needed, not {array.shape}"
        )
    if (wrong := np.flatnonzero(~(np.isfinite(array) & (array >= 0)))).size:
        raise InvalidConfig(f"row {wrong[0]}: {array[wrong[0]]} is not a finite number of at least 0")
    return array
