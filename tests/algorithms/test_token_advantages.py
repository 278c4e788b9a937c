"""GAE, REINFORCE++, RLOO and whitening, on hand-worked numbers and compared with plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.errors import RowCountMismatch
from recipes.algorithms.advantages import (
    gae,
    greedy_baseline_advantage,
    group_advantage,
    leave_one_out_advantage,
    length_weighted_advantage,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    whiten,
)


def test_gae_by_hand():
    rewards = torch.tensor([[0.0, 0.5, 1.0]])
    values = torch.tensor([[0.2, 0.4, 0.6]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.9, lam=0.5)
    last = 1.0 - 0.6
    middle = 0.5 + 0.9 * 0.6 - 0.4 + 0.45 * last
    first = 0.0 + 0.9 * 0.4 - 0.2 + 0.45 * middle
    torch.testing.assert_close(advantages, torch.tensor([[first, middle, last]]))
    torch.testing.assert_close(returns, torch.tensor([[first + 0.2, middle + 0.4, last + 0.6]]))


def test_gae_interpolates_between_rewards_and_one_step_of_the_critic():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.3, 0.5, 0.9]])
    mask = torch.ones(1, 3)
    _, to_the_end = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(to_the_end, torch.ones(1, 3))  # the score, independent of the critic
    one_step, _ = gae(rewards, values, mask, gamma=1.0, lam=0.0)
    torch.testing.assert_close(one_step, torch.tensor([[0.2, 0.4, 0.1]]))  # differences of values


def test_gae_skips_tokens_that_the_policy_did_not_sample():
    """An observation between two turns is skipped, and its values are ignored."""
    rewards = torch.tensor([[0.1, math.nan, 5.0, 1.0, math.inf]])
    values = torch.tensor([[0.2, math.nan, 9.0, 0.6, math.nan]])
    mask = torch.tensor([[1, 0, 0, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    short, short_returns = gae(torch.tensor([[0.1, 1.0]]), torch.tensor([[0.2, 0.6]]), torch.ones(1, 2), 0.9, 0.8)
    for got, expected in ((advantages, short), (returns, short_returns)):
        assert got[0, [0, 3]].tolist() == expected[0].tolist()
        assert got[0, [1, 2, 4]].tolist() == [0.0, 0.0, 0.0]


def test_leave_one_out_by_hand():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.25], [0.0, 0.5], [0.0, 0.7], [0.0, 3.0]])
    got = leave_one_out_advantage(rewards, ["a", "a", "b", "a", "b", "c"], torch.ones(6, 2))
    torch.testing.assert_close(got[:, 1], torch.tensor([0.75, -0.75, -0.45, 0.0, 0.45, 0.0]))
    torch.testing.assert_close(got[:, 0], got[:, 1])


def test_reinforce_plus_plus_by_hand():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    got = reinforce_plus_plus(rewards, torch.tensor([[1, 1], [0, 1]]), gamma=0.5)
    returns = torch.tensor([0.5, 1.0, 2.0])
    expected = (returns - returns.mean()) / returns.std()
    torch.testing.assert_close(got, torch.tensor([[expected[0], expected[1]], [0.0, expected[2]]]))


def test_reinforce_plus_plus_baseline_by_hand():
    """The statistics of the batch count each token, so a row of two tokens counts twice."""
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    got = reinforce_plus_plus_baseline(rewards, ["a", "a"], mask)
    tokens = torch.tensor([0.5, 0.5, -0.5])
    expected = (tokens - tokens.mean()) / tokens.std()
    torch.testing.assert_close(got, torch.tensor([[expected[0], expected[1]], [expected[2], 0.0]]))


def test_whitened_values_have_mean_zero_and_variance_one_over_the_mask():
    values = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)) * 3 + 100
    mask = torch.rand(6, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    values[~mask] = math.nan
    got = whiten(values, mask)
    assert got[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert got[mask].std().item() == pytest.approx(1, abs=1e-6)
    assert not got[~mask].any()


@pytest.mark.parametrize("value", [0.1, -1e7, 1 / 3, 0.0])
def test_equal_values_and_a_single_one_whiten_to_exactly_zero(value):
    assert torch.equal(whiten(torch.full((3, 2), value), torch.ones(3, 2)), torch.zeros(3, 2))
    assert torch.equal(whiten(torch.full((1, 1), value), torch.ones(1, 1)), torch.zeros(1, 1))


def test_empty_masks_and_empty_batches_are_valid():
    for shape in ((2, 3), (0, 3), (2, 0)):
        zeros, mask, uid = torch.zeros(shape), torch.zeros(shape), ["a"] * shape[0]
        for got in (
            whiten(zeros, mask),
            gae(zeros, zeros, mask)[1],
            reinforce_plus_plus(zeros, mask),
            reinforce_plus_plus_baseline(zeros, uid, mask),
            leave_one_out_advantage(zeros, uid, mask),
        ):
            assert torch.equal(got, zeros)


def test_rows_without_a_token_change_nothing():
    """Inert rows, which a worker group adds so that ranks have equal numbers of rows."""
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.5]]), torch.tensor([[1, 1], [1, 1], [0, 1]])
    values, uid = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.0, 0.6]]), ["a", "a", "a"]

    def every(rows):
        extra = torch.full((rows, 2), 7.0)
        reward, value = torch.cat([rewards, extra]), torch.cat([values, extra])
        kept, names = torch.cat([mask, torch.zeros(rows, 2)]), uid + ["a"] * rows
        return [
            leave_one_out_advantage(reward, names, kept),
            reinforce_plus_plus(reward, kept),
            reinforce_plus_plus_baseline(reward, names, kept),
            *gae(reward, value, kept, 0.9, 0.7),
        ]

    for with_extra, alone in zip(every(2), every(0), strict=True):
        assert torch.equal(with_extra[:3], alone)
        assert not with_extra[3:].any()


def test_different_shapes_raise_an_error_that_names_them():
    with pytest.raises(RowCountMismatch, match=r"values \(2, 2\)"):
        gae(torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2, 3))
    with pytest.raises(RowCountMismatch, match=r"response_mask \(2, 2\)"):
        whiten(torch.zeros(2, 3), torch.ones(2, 2))
    with pytest.raises(RowCountMismatch, match="3 uids"):
        leave_one_out_advantage(torch.zeros(2, 3), ["a"] * 3, torch.ones(2, 3))


def test_results_have_no_gradient():
    rewards, values = torch.rand(2, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)
    mask = torch.ones(2, 3)
    results = (*gae(rewards, values, mask), whiten(values, mask), leave_one_out_advantage(rewards, ["a", "a"], mask))
    assert not any(result.requires_grad for result in results)


# Independent references, token by token


def naive_gae(rewards, values, mask, gamma, lam):
    """The definition: A_t = sum of (gamma lam)^l delta_(t+l) over the sampled tokens."""
    advantages = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        places = [t for t, sampled in enumerate(row) if sampled]
        deltas = []
        for k, t in enumerate(places):
            following = values[i][places[k + 1]] if k + 1 < len(places) else 0.0
            deltas.append(rewards[i][t] + gamma * following - values[i][t])
        for k, t in enumerate(places):
            advantages[i][t] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(places)))
    return advantages


def naive_whiten(values, mask):
    chosen = [v for row, kept in zip(values, mask) for v, k in zip(row, kept) if k]
    mean = sum(chosen) / len(chosen)
    variance = sum((v - mean) ** 2 for v in chosen) / max(len(chosen) - 1, 1)
    scale = math.sqrt(variance + 1e-8)
    return [[(v - mean) / scale if k else 0.0 for v, k in zip(row, kept)] for row, kept in zip(values, mask)]


numbers = st.floats(-2, 2, width=16)
cells = st.tuples(numbers, numbers, st.booleans())
tables = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), min_size=1, max_size=5)
)


def columns(table):
    return [[[cell[k] for cell in row] for row in table] for k in range(3)]


@given(tables, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_a_plain_loop(table, gamma, lam):
    rewards, values, mask = columns(table)
    advantages, returns = gae(torch.tensor(rewards), torch.tensor(values), torch.tensor(mask), gamma, lam)
    expected = torch.tensor(naive_gae(rewards, values, mask, gamma, lam))
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=1e-4)
    masked = torch.where(torch.tensor(mask), torch.tensor(values), 0.0)
    torch.testing.assert_close(returns, expected + masked, atol=1e-4, rtol=1e-4)


@given(tables, st.floats(0, 1))
def test_reinforce_plus_plus_equals_a_plain_loop(table, gamma):
    rewards, _, mask = columns(table)
    if not any(map(any, mask)):
        return
    zeros = [[0.0] * len(row) for row in rewards]
    returns = naive_gae(rewards, zeros, mask, gamma, 1.0)
    got = reinforce_plus_plus(torch.tensor(rewards), torch.tensor(mask), gamma)
    torch.testing.assert_close(got, torch.tensor(naive_whiten(returns, mask)), atol=2e-3, rtol=1e-3)


groups = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=16)


@given(groups)
def test_leave_one_out_equals_a_plain_loop_and_is_a_multiple_of_the_group_advantage(rows):
    uid, scores = [u for u, _ in rows], [s for _, s in rows]
    rewards, mask = torch.tensor(scores)[:, None], torch.ones(len(rows), 1)
    got = leave_one_out_advantage(rewards, uid, mask)
    expected = []
    for i, score in enumerate(scores):
        others = [s for j, s in enumerate(scores) if uid[j] == uid[i] and j != i]
        expected.append(score - sum(others) / len(others) if others else 0.0)
    assert got[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    sizes = torch.tensor([float(uid.count(u)) for u in uid])
    centred = group_advantage(rewards, uid, mask, normalise_std=False)
    torch.testing.assert_close(got[:, 0], centred[:, 0] * sizes / (sizes - 1).clamp(min=1))


@given(groups)
def test_reinforce_plus_plus_baseline_equals_a_plain_loop(rows):
    uid, scores = [u for u, _ in rows], [s for _, s in rows]
    widths = [1 + i % 3 for i in range(len(rows))]
    mask = [[t < width for t in range(3)] for width in widths]
    centred = []
    for i, score in enumerate(scores):
        group = [s for s, u in zip(scores, uid) if u == uid[i]]
        centred.append([score - sum(group) / len(group) if len(group) > 1 else 0.0] * 3)
    rewards = torch.tensor([[s, 0.0, 0.0] for s in scores])
    got = reinforce_plus_plus_baseline(rewards, uid, torch.tensor(mask))
    torch.testing.assert_close(got, torch.tensor(naive_whiten(centred, mask)), atol=1e-3, rtol=1e-3)


def test_opo_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 9.0], [0.0, 0.0, 0.7], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    rewards[1, 2] = 0.0
    got = length_weighted_advantage(rewards, ["a", "a", "b", "a"], mask)
    baseline = (2 * 1.0 + 1 * 0.5) / 3
    first, second = 1 - baseline, 0.5 - baseline
    torch.testing.assert_close(got, torch.tensor([[first, 0, first], [second, 0, 0], [0, 0, 0], [0, 0, 0]]))
    # the baseline makes the weighted mean of the advantages zero
    assert got.sum().item() == pytest.approx(0, abs=1e-6)
    ties = length_weighted_advantage(torch.full((3, 1), 0.1), ["a"] * 3, torch.tensor([[1], [1], [1]]))
    assert not ties.any()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.floats(-2, 2, width=32)), min_size=1, max_size=12))
def test_opo_equals_a_plain_loop(rows):
    uid, lengths, scores = zip(*rows)
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(len(rows), 4)
    rewards[:, 0] = torch.tensor(scores)
    got = length_weighted_advantage(rewards, uid, mask)
    for row, (name, length, score) in enumerate(rows):
        group = [(n, s) for other, n, s in rows if other == name and n > 0]
        expected = 0.0
        if length and len(group) > 1:
            expected = score - sum(n * s for n, s in group) / sum(n for n, _ in group)
        assert got[row, :length].tolist() == pytest.approx([expected] * length, abs=1e-5)
        assert not got[row, length:].any()


def test_remax_by_hand():
    rewards = torch.tensor([[-0.1, math.nan, 1.0], [0.0, 0.5, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    got = greedy_baseline_advantage(rewards, torch.tensor([0.4, 0.5]), mask)
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.0, 0.6], [0.0, 0.0, 0.0]]))
    with pytest.raises(RowCountMismatch, match="baselines"):
        greedy_baseline_advantage(rewards, torch.tensor([0.4]), mask)
    with pytest.raises(RowCountMismatch):
        greedy_baseline_advantage(rewards, torch.tensor([0.4, 0.5]), mask[:, :2])
