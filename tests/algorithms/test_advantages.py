import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.errors import InvalidColumn, RowCountMismatch
from recipes.algorithms.advantages import group_advantage, informative_rows


def outcome(scores, width=3):
    """Token-level rewards (B, R) with the scores (B,) on the last token, and a mask of ones."""
    rewards = torch.zeros(len(scores), width)
    rewards[:, -1] = torch.tensor(scores)
    return rewards, torch.ones(len(scores), width, dtype=torch.int64)


def test_hand_worked_with_standard_deviation():
    rewards, mask = outcome([1.0, 0.0, 0.0, 1.0, 0.5, 0.2])
    got = group_advantage(rewards, ["a", "a", "a", "a", "b", "b"], mask)
    deviation = math.sqrt(4 * 0.25 / 3) + 1e-6  # of 1, 0, 0, 1 about 0.5, divided by n - 1
    pair = math.sqrt(2 * 0.15**2) + 1e-6
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5]) / deviation
    expected = torch.cat([expected, torch.tensor([0.15, -0.15]) / pair])
    torch.testing.assert_close(got, expected[:, None].expand(6, 3))
    assert got.dtype == torch.float32


def test_hand_worked_without_standard_deviation():
    rewards, mask = outcome([1.0, 0.0, 0.5, 0.9])
    got = group_advantage(rewards, ["a", "b", "a", "b"], mask, normalise_std=False)
    torch.testing.assert_close(got[:, 0], torch.tensor([0.25, -0.45, -0.25, 0.45]))


def test_rewards_of_all_tokens_count_and_masked_tokens_get_zero():
    rewards = torch.tensor([[0.25, 0.75], [0.0, 0.0]])
    got = group_advantage(rewards, [7, 7], torch.tensor([[0, 1], [1, 0]]), normalise_std=False)
    assert torch.equal(got, torch.tensor([[0.0, 0.5], [-0.5, 0.0]]))


@pytest.mark.parametrize("normalise_std", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("score", [0.1, 0.9, 1 / 3, -1e7, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_are_exactly_zero(normalise_std, eps, score, dtype):
    rewards, mask = outcome([score] * 7)
    got = group_advantage(rewards.to(dtype), ["p"] * 7, mask, normalise_std, eps)
    assert torch.equal(got, torch.zeros(7, 3))


def test_a_group_of_one_is_zero():
    rewards, mask = outcome([0.9, 0.3, 0.1])
    got = group_advantage(rewards, ["a", "b", "b"], mask)
    assert torch.equal(got[0], torch.zeros(3))
    assert got[1, 0] > 0 > got[2, 0]


def test_rows_without_a_sampled_token_change_nothing():
    rewards, mask = outcome([1.0, 0.0, 0.0])
    alone = group_advantage(rewards[:2], ["a", "a"], mask[:2])
    mask[2] = 0
    for garbage in (0.0, 100.0, math.nan):
        rewards[2] = garbage
        got = group_advantage(rewards, ["a", "a", "a"], mask)
        assert torch.equal(got[:2], alone)
        assert torch.equal(got[2], torch.zeros(3))


def test_uids_of_any_hashable_kind():
    rewards, mask = outcome([1.0, 0.0, 1.0, 1.0])
    expected = group_advantage(rewards, ["a", "a", "b", "b"], mask)
    for uid in (np.array(["a", "a", "b", "b"], dtype=object), np.array([3, 3, 1, 1]), [("x", 1), ("x", 1), None, None]):
        assert torch.equal(group_advantage(rewards, uid, mask), expected)


def test_uids_in_a_tensor_are_compared_by_value():
    rewards, mask = outcome([1.0, 0.0, 1.0, 1.0])
    uid = torch.tensor([3, 3, 1, 1])
    assert torch.equal(group_advantage(rewards, uid, mask), group_advantage(rewards, ["a", "a", "b", "b"], mask))
    assert group_advantage(rewards, uid, mask)[0, 0] > 0
    assert informative_rows([1.0, 0.0, 1.0, 1.0], uid).tolist() == [True, True, False, False]


def test_no_gradient_and_no_change_of_the_input():
    rewards, mask = outcome([1.0, 0.0])
    rewards.requires_grad_()
    before = rewards.clone()
    assert not group_advantage(rewards, ["a", "a"], mask).requires_grad
    assert torch.equal(rewards, before)


def test_an_empty_batch():
    assert group_advantage(torch.zeros(0, 4), [], torch.zeros(0, 4)).shape == (0, 4)


def test_mismatched_arguments_raise_an_error_that_names_them():
    rewards, mask = outcome([1.0, 0.0])
    with pytest.raises(RowCountMismatch, match="3 uids"):
        group_advantage(rewards, ["a", "a", "a"], mask)
    with pytest.raises(RowCountMismatch, match=r"\(2, 2\)"):
        group_advantage(rewards, ["a", "a"], mask[:, :2])


def test_uids_that_are_tensors_or_arrays_of_one_number_are_compared_by_value_and_others_refused():
    rewards, mask = outcome([1.0, 0.0, 1.0, 1.0])
    expected = group_advantage(rewards, ["a", "a", "b", "b"], mask)
    for make in (torch.tensor, np.array):
        assert torch.equal(group_advantage(rewards, [make(number) for number in (3, 3, 1, 1)], mask), expected)
        with pytest.raises(InvalidColumn, match=r"row 0 has \[1, 2\], and must have one value"):
            group_advantage(rewards, [make([1, 2])] * 4, mask)


def naive(scores, uid, normalise_std):
    out = []
    for i, score in enumerate(scores):
        group = [s for s, u in zip(scores, uid) if u == uid[i]]
        mean = math.fsum(group) / len(group)
        value = 0.0 if len(group) == 1 else score - mean
        if normalise_std and len(group) > 1:
            value /= math.sqrt(math.fsum((s - mean) ** 2 for s in group) / (len(group) - 1)) + 1e-6
        out.append(value)
    return out


groups = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])), min_size=1, max_size=24)


@given(groups, st.booleans(), st.randoms(use_true_random=False))
def test_equals_a_plain_loop_sums_to_zero_and_follows_permutations(rows, normalise_std, random):
    uid, scores = [u for u, _ in rows], [s for _, s in rows]
    rewards, mask = outcome(scores, width=2)
    got = group_advantage(rewards, uid, mask, normalise_std)
    assert got[:, 0].tolist() == pytest.approx(naive(rewards[:, -1].tolist(), uid, normalise_std), abs=2e-6)
    for name in set(uid):
        assert got[[u == name for u in uid], 0].sum().item() == pytest.approx(0.0, abs=1e-5)
    order = list(range(len(rows)))
    random.shuffle(order)
    permuted = group_advantage(rewards[order], [uid[i] for i in order], mask, normalise_std)
    torch.testing.assert_close(permuted, got[order])
