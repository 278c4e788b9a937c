"""Which rows are computed together: full micro-batches of about equal work."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dataproto.planning import balance, first_fit_decreasing, split_by_tokens


def plan_rows(
    lengths: Tensor,
    lead: Tensor,
    costs: Tensor,
    lead_costs: Tensor,
    token_budget: int,
    agree: Callable[[int], int] = int,
) -> list[np.ndarray]:
    """Row indices, ascending, of micro-batches of at most ``token_budget`` tokens; some are empty if others need more.

    Rows that share something with the row before (``lead_costs`` above 0) stay behind it as long as the budget lets them. As
    few micro-batches as first-fit decreasing finds, then as equal in cost as the budget lets them be: a small one at the end
    would not keep the device busy, and ranks wait for each other's largest.

    Args:
        lengths, costs: ``(B,)`` tokens and work of each row.
        lead, lead_costs: ``(B,)`` what a row has more as the first of its micro-batch.
        agree: from the number that these rows need to the number that all ranks make, at least as many.

    >>> ones, none = torch.ones(5), torch.zeros(5)
    >>> [part.tolist() for part in plan_rows(torch.tensor([6, 5, 4, 3, 2]), none, ones, none, token_budget=10)]
    [[0, 2], [1, 3, 4]]
    """
    pieces = _pieces(lengths, lead, lead_costs > 0, token_budget)
    tokens, work = (
        np.array([float(own[piece].sum() + first[piece.start]) for piece in pieces])
        for own, first in ((lengths, lead), (costs, lead_costs))
    )
    bins = first_fit_decreasing(np.minimum(tokens, token_budget), token_budget)
    count = agree(len(bins))
    parts = balance(work, count) if count else []
    if any(len(part) > 1 and tokens[part].sum() > token_budget for part in parts):
        parts = bins + [np.zeros(0, dtype=np.int64)] * (count - len(bins))
    rows = np.arange(len(lengths))
    return [np.concatenate([rows[:0], *(rows[pieces[number]] for number in sorted(part))]) for part in parts]


def _pieces(lengths: Tensor, lead: Tensor, follows: Tensor, token_budget: int) -> list[slice]:
    """Runs of rows that share something, cut where they exceed the budget."""
    starts = [row for row, behind in enumerate(follows.tolist()) if not behind or row == 0]
    pieces = []
    for start, stop in pairwise([*starts, len(lengths)]):
        for part in split_by_tokens(lengths[start:stop], token_budget, lead=lead[start:stop]):
            pieces.append(slice(start + part.start, start + part.stop))
    return pieces


def as_index(rows: np.ndarray) -> slice | Tensor:
    """The rows as a slice, which copies nothing, if they follow each other.

    >>> as_index(np.array([2, 3])), as_index(np.array([2, 4]))
    (slice(2, 4, None), tensor([2, 4]))
    """
    if len(rows) == 0:
        return slice(0, 0)
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
