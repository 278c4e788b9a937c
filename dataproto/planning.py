"""Decides which rows share a micro-batch, a rank or a bin. Pure functions of numbers.

Tokens and costs are whole numbers, one a row; costs usually come from `VLMFamily.row_costs`. Dimension letters: B rows.
"""

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from torch import Tensor

from dataproto.errors import InvalidConfig, InvalidRow, RowCountMismatch

Numbers: TypeAlias = Sequence[int] | np.ndarray | Tensor
Groups: TypeAlias = Iterable[Hashable] | np.ndarray | Tensor


# Contiguous splits


def split_by_tokens(lengths: Numbers, budget: int, lead: Numbers | None = None) -> list[slice]:
    """`split_by_budget` with a token budget only.

    >>> split_by_tokens([3, 3, 3, 9, 1], budget=6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    return split_by_budget(lengths, budget, lead=lead)


def split_by_budget(
    lengths: Numbers,
    token_budget: int,
    costs: Numbers | None = None,
    cost_budget: float | None = None,
    lead: Numbers | None = None,
    lead_costs: Numbers | None = None,
) -> list[slice]:
    """Splits rows, in order, into the fewest contiguous parts within both budgets that a greedy pass finds.

    The order keeps the samples of a prompt together, so that their images and prompt are computed once. A row that exceeds a
    budget is a part by itself.

    Args:
        lengths, costs: ``(B,)`` tokens and cost of each row.
        lead, lead_costs: ``(B,)`` tokens and cost that a row adds as the first of its part (of the prompt and images that it
            otherwise shares with the row before).

    Raises:
        InvalidConfig: a budget is below 1, or only one of costs and their budget is given.
        RowCountMismatch: an argument does not have one number for each row.

    >>> split_by_budget([5, 2, 2, 2], token_budget=9, lead=[0, 3, 3, 3])
    [slice(0, 3, None), slice(3, 4, None)]
    >>> split_by_budget([1, 1, 1, 1], token_budget=4, costs=[10, 70, 40, 40], cost_budget=80)
    [slice(0, 2, None), slice(2, 4, None)]
    """
    if (costs is None) != (cost_budget is None) or (costs is None and lead_costs is not None):
        raise InvalidConfig("costs and their budget go together: give both or none")
    tokens = _Running.of(lengths, lead)
    limits = [(tokens, float(_positive("token budget", token_budget)))]
    if costs is not None and cost_budget is not None:
        limits.append((_Running.of(costs, lead_costs, rows=len(tokens)), _positive("cost budget", cost_budget)))
    return _greedy(limits)


def split_into(
    lengths: Numbers,
    count: int,
    token_budget: int,
    costs: Numbers | None = None,
    lead: Numbers | None = None,
    lead_costs: Numbers | None = None,
) -> list[slice]:
    """Splits rows, in order, into ``count`` contiguous parts within the token budget, the costliest of them as cheap as possible.

    Use it to run the same number of micro-batches on all ranks: ``count`` is the maximum over ranks of the number that
    `split_by_budget` finds. With fewer rows than parts, the last parts are empty.

    Args:
        costs: ``(B,)`` costs to balance; default: the tokens.
        lead, lead_costs: as in `split_by_budget`.

    Raises:
        InvalidConfig: the rows need more than ``count`` parts under this budget; says how many.

    >>> split_into([2, 2, 2, 2, 2, 2], count=3, token_budget=8)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    >>> split_into([2, 2, 2], count=2, token_budget=8, costs=[1, 1, 5])
    [slice(0, 2, None), slice(2, 3, None)]
    """
    if count < 1:
        raise InvalidConfig(f"{count} parts: must be at least 1")
    tokens = _Running.of(lengths, lead)
    work = tokens if costs is None else _Running.of(costs, lead_costs, rows=len(tokens))
    within = (tokens, float(_positive("token budget", token_budget)))
    parts = _greedy([within])
    if len(parts) > count:
        raise InvalidConfig(f"{len(tokens)} rows need {len(parts)} parts of {token_budget} tokens, not {count}")
    low, high = 0.0, float(max((work.between(part) for part in parts), default=0))
    while low < (bound := (low + high) / 2) < high and high - low > 1e-9 * high:
        found = _greedy([within, (work, bound)], strict=True)
        if found and len(found) <= count:
            parts, high = found, float(max(work.between(part) for part in found))
        else:
            low = bound
    return _cut_further(parts, count, work)


class _Running:
    """Amounts of rows as running totals, and what a row adds as the first of a part."""

    def __init__(self, ends: np.ndarray, lead: np.ndarray) -> None:
        self.ends, self.lead = ends, lead

    @classmethod
    def of(cls, amounts: Numbers, lead: Numbers | None, rows: int | None = None) -> "_Running":
        each = _amounts(amounts, rows)
        more = np.zeros_like(each) if lead is None else _amounts(lead, len(each))
        return cls(np.cumsum(each), more)

    def __len__(self) -> int:
        return len(self.ends)

    def before(self, row: int) -> float:
        return float(self.ends[row - 1]) if row else 0.0

    def between(self, part: slice) -> float:
        """Amount of a part that is not empty."""
        return float(self.ends[part.stop - 1]) - self.before(part.start) + float(self.lead[part.start])

    def reach(self, start: int, limit: float) -> int:
        """The end of the longest part from ``start`` that stays within a limit."""
        return int(np.searchsorted(self.ends, self.before(start) + limit - self.lead[start], side="right"))


def _greedy(limits: list[tuple[_Running, float]], strict: bool = False) -> list[slice]:
    """Parts as long as the limits permit. A row that exceeds a limit is a part by itself; with ``strict`` the result is ``[]``.

    The first limit, that of tokens, is never strict.
    """
    parts: list[slice] = []
    start, rows = 0, len(limits[0][0])
    while start < rows:
        stops = [amounts.reach(start, limit) for amounts, limit in limits]
        if strict and min(stops[1:]) <= start:
            return []
        parts.append(slice(start, max(min(stops), start + 1)))
        start = parts[-1].stop
    return parts


def _cut_further(parts: list[slice], count: int, work: _Running) -> list[slice]:
    """Halves the costliest part of two or more rows until there are ``count`` parts; then adds empty ones."""
    queue = [(-work.between(part), part.start, part.stop) for part in parts if part.stop - part.start > 1]
    heapq.heapify(queue)
    bounds = {part.start for part in parts}
    while len(bounds) < count and queue:
        _, start, stop = heapq.heappop(queue)
        middle = (work.before(start) + float(work.ends[stop - 1])) / 2
        cut = min(max(int(np.searchsorted(work.ends, middle, side="left")), start + 1), stop - 1)
        bounds.add(cut)
        for half in (slice(start, cut), slice(cut, stop)):
            if half.stop - half.start > 1:
                heapq.heappush(queue, (-work.between(half), half.start, half.stop))
    starts, rows = sorted(bounds), len(work)
    cuts = [*starts, *[rows] * (count - len(starts) + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


# Parts in any order


def balance(costs: Numbers, parts: int, equal_counts: bool = False, groups: Groups | None = None) -> list[np.ndarray]:
    """Divides rows into parts of nearly equal cost; returns the row indices of each, ascending. Deterministic.

    Takes the better of two solutions: largest first (Graham 1969: at most 4/3 - 1/(3 ``parts``) of the optimal maximum) and
    largest differencing (Karmarkar and Karp 1982: usually much closer).

    Args:
        costs: ``(B,)``, at least 0.
        equal_counts: the numbers of rows (or groups) of parts differ by at most 1.
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
        return [np.array(sorted(part), dtype=np.int64) for part in _best(each, parts, equal_counts)]
    number_of = _numbers(groups)
    if len(number_of) != len(each):
        raise RowCountMismatch(f"{len(each)} costs, but {len(number_of)} groups")
    sums = np.zeros(int(number_of.max(initial=-1)) + 1, dtype=each.dtype)
    np.add.at(sums, number_of, each)
    owner = np.zeros(len(sums), dtype=np.int64)
    for part, members in enumerate(_best(sums, parts, equal_counts)):
        owner[members] = part
    return [np.flatnonzero(owner[number_of] == part) for part in range(parts)]


def _best(costs: np.ndarray, parts: int, equal_counts: bool) -> list[list[int]]:
    found = [_largest_first(costs, parts, equal_counts), _largest_differencing(costs, parts, equal_counts)]
    return min(found, key=lambda chosen: max(costs[part].sum() for part in chosen))


def _largest_first(costs: np.ndarray, parts: int, equal_counts: bool) -> list[list[int]]:
    """Assigns each row, the costliest first, to the part that is cheapest so far."""
    rows = len(costs)
    room = [rows // parts + (part < rows % parts) if equal_counts else rows for part in range(parts)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    queue = [(0, part) for part in range(parts) if room[part]]
    amounts = costs.tolist()
    for row in np.argsort(-costs, kind="stable").tolist():
        total, part = heapq.heappop(queue)
        chosen[part].append(row)
        if len(chosen[part]) < room[part]:
            heapq.heappush(queue, (total + amounts[row], part))
    return chosen


def _largest_differencing(costs: np.ndarray, parts: int, equal_counts: bool) -> list[list[int]]:
    """Merges solutions of few rows, the two with the largest differences between their parts first, so that costly parts of one
    join cheap parts of the other. If each initial solution has one row a part, the counts of rows are equal.
    """
    amounts = costs.tolist()
    order: list[int] = np.argsort(-costs, kind="stable").tolist()
    step = parts if equal_counts else 1
    starts = range(0, len(order), step)
    solutions = [[(amounts[row], [row]) for row in order[start : start + step]] for start in starts]
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
    alone = one[: len(one) - meeting] + other[: len(other) - meeting]
    pairs = zip(one[len(one) - meeting :], reversed(other[len(other) - meeting :]))
    together = [(cost + cost_there, rows + rows_there) for (cost, rows), (cost_there, rows_there) in pairs]
    return sorted(alone + together, key=lambda part: -part[0])


def first_fit_decreasing(lengths: Numbers, capacity: int, align: int = 1) -> list[np.ndarray]:
    """Puts rows into bins of at most ``capacity`` tokens, the longest first, each into the first bin with room.

    Needs at most 11/9 of the minimal number of bins, plus 6/9 (Dósa 2007). A row takes its length rounded up to a multiple of
    ``align``.

    Returns:
        The row indices of each bin, ascending.

    Raises:
        InvalidConfig: ``capacity`` or ``align`` is below 1.
        InvalidRow: a row does not fit into an empty bin; its ``index`` says which.

    >>> [bin.tolist() for bin in first_fit_decreasing([5, 7, 3, 2, 4], capacity=10)]
    [[1, 2], [0, 4], [3]]
    >>> [bin.tolist() for bin in first_fit_decreasing([5, 7, 3, 2, 4], capacity=10, align=4)]
    [[0], [1], [2, 3], [4]]
    """
    capacity, align = int(_positive("capacity", capacity)), int(_positive("align", align))
    exact = np.ceil(_amounts(lengths)).astype(np.int64)
    sizes = -(-exact // align) * align
    if (wrong := np.flatnonzero(sizes > capacity)).size:
        row = int(wrong[0])
        aligned = f", {sizes[row]} when aligned to {align}," if sizes[row] != exact[row] else ""
        raise InvalidRow(
            row, f"{exact[row]} tokens{aligned} do not fit into a bin of {capacity}: cut the row or leave it out"
        )
    if len(sizes) == 0:
        return []
    order = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(len(sizes), dtype=np.int64)
    bin_of[order] = _first_fits(sizes[order].tolist(), capacity)
    return np.split(np.argsort(bin_of, kind="stable"), np.cumsum(np.bincount(bin_of))[:-1])


def _first_fits(sizes: list[int], capacity: int) -> list[int]:
    """The first bin with room for each size in turn, found in a tree of the largest rooms: O(n log n)."""
    leaves = 1 << (len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # room[n] is the larger of nodes 2n and 2n + 1; leaves are bins
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
    if prompts < 1:
        raise InvalidConfig(f"a mini-batch of {prompts} prompts: must be at least 1")
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
