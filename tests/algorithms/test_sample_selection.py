"""DAPO's filter and length penalty, and KL penalties in rewards."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.errors import InvalidConfig, RowCountMismatch
from recipes.algorithms.advantages import group_advantage, informative_rows
from recipes.algorithms.penalties import overlong_penalty, penalised_rewards


def test_groups_with_different_scores_are_informative():
    scores = [0.1, 0.1, 0.1, 1.0, 0.0, 0.5, 0.5]
    assert informative_rows(scores, ["a", "a", "b", "b", "c", "c", "c"]).tolist() == [False, False, *[True] * 5]
    assert informative_rows([1.0], ["alone"]).tolist() == [False]
    assert informative_rows([], []).tolist() == []
    assert informative_rows([1, True, 1.0], ["a"] * 3).tolist() == [False] * 3


def test_scores_and_uids_must_have_the_same_length():
    with pytest.raises(RowCountMismatch, match="2 scores, 1 uids"):
        informative_rows([1.0, 2.0], ["a"])


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0])), max_size=20))
def test_informative_means_that_some_advantage_is_not_zero(rows):
    uid, scores = [u for u, _ in rows], [s for _, s in rows]
    advantage = group_advantage(torch.tensor(scores)[:, None], uid, torch.ones(len(rows), 1))[:, 0]
    teaches = {u for u, a in zip(uid, advantage.tolist(), strict=True) if a != 0}
    assert informative_rows(scores, uid).tolist() == [u in teaches for u in uid]


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)]
)
def test_overlong_by_hand(length, expected):
    """The paper's numbers on a smaller scale: at most 100 tokens, with a penalty in the last 20."""
    mask = (torch.arange(101) < length).long()[None]
    assert overlong_penalty(mask, max_length=100, buffer=20).item() == pytest.approx(expected)


@given(st.integers(0, 12), st.integers(1, 10), st.integers(1, 10))
def test_overlong_equals_the_paper_case_by_case(length, longest, buffer):
    if buffer > longest:
        with pytest.raises(InvalidConfig, match="overlong buffer"):
            overlong_penalty(torch.ones(1, 12), longest, buffer)
        return
    if length <= longest - buffer:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - buffer) - length) / buffer
    else:
        expected = -1.0
    mask = (torch.arange(12) < length).long()[None]
    assert overlong_penalty(mask, longest, buffer).item() == pytest.approx(expected)


def test_penalised_rewards_by_hand():
    scores, kl = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]), torch.tensor([[0.4, 0.2, math.nan], [0.1, 0.3, 0.5]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    rewards, mean = penalised_rewards(scores, kl, mask, coef=0.5)
    torch.testing.assert_close(rewards, torch.tensor([[-0.2, 0.9, 0.0], [-0.05, -0.15, 1.75]]))
    assert mean == pytest.approx((0.3 + 0.3) / 2)
    with_inert = penalised_rewards(torch.cat([scores, scores]), torch.cat([kl, kl]), torch.cat([mask, 0 * mask]), 0.5)
    assert with_inert[1] == mean
    assert penalised_rewards(scores, kl, 0 * mask, 0.5)[1] == 0
