"""Which rows are computed together."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.training.micro_batches import as_index, plan_rows

ROWS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), max_size=12)


@given(ROWS, st.integers(1, 20), st.integers(0, 3))
def test_every_row_once_within_the_budget_and_as_many_parts_as_agreed(rows, budget, more):
    lengths, lead = (torch.tensor([row[k] for row in rows], dtype=torch.int64) for k in (0, 1))
    if len(rows):
        lead[0] = 0  # the first row has nobody to share with
    parts = plan_rows(lengths, lead, lengths * 2, lead * 2, budget, agree=lambda count: count + more)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(rows)))
    alone = plan_rows(lengths, lead, lengths * 2, lead * 2, budget)
    assert len(parts) == len(alone) + more
    for part in parts:
        tokens = sum(
            int(lengths[row]) + (int(lead[row]) if at == 0 or part[at - 1] != row - 1 else 0)
            for at, row in enumerate(part.tolist())
        )
        assert tokens <= budget or len(part) == 1
        assert part.tolist() == sorted(part.tolist())


def test_samples_stay_with_their_prompt():
    lengths = torch.tensor([7, 2, 2, 7, 2, 2])
    lead = torch.tensor([0, 5, 5, 0, 5, 5])
    assert [part.tolist() for part in plan_rows(lengths, lead, lengths, lead, 11)] == [[0, 1, 2], [3, 4, 5]]
    halves = plan_rows(lengths, lead, lengths, lead, 9)  # the last sample computes its prompt again
    assert sorted(part.tolist() for part in halves) == [[0, 1], [2], [3, 4], [5]]


def test_parts_are_full_and_of_equal_work():
    lengths = torch.tensor([4, 3, 3, 2, 4, 4])  # in order and within 10: three parts, the last of them small
    none = torch.zeros_like(lengths)
    parts = plan_rows(lengths, none, lengths, none, token_budget=10)
    assert [int(lengths[part].sum()) for part in parts] == [10, 10]


def test_rows_that_follow_each_other_are_a_slice():
    assert as_index(np.array([], dtype=np.int64)) == slice(0, 0)
    assert as_index(np.array([4])) == slice(4, 5)
    assert torch.equal(as_index(np.array([0, 2])), torch.tensor([0, 2]))
