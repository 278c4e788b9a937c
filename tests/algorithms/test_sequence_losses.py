"""GSPO, CISPO and the value loss and their gradients, on hand-worked numbers and compared with plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.errors import InvalidConfig
from helpers.aggregated import aggregate
from recipes.algorithms.losses import clipped_policy_loss, clipped_weight_loss, sequence_policy_loss, value_loss


def rows(*values):
    return torch.tensor([list(row) for row in values])


def test_gspo_by_hand():
    """Token ratios 2 and 0.5 give the sequence ratio 1; 1.1 and 1.1 give 1.1, which is clipped at 1.05."""
    log_probs = rows((2.0, 0.5, 9.0), (1.1, 1.1, 9.0)).log()
    mask = rows((1, 1, 0), (1, 1, 0))
    loss, metrics = sequence_policy_loss(log_probs, torch.zeros(2, 3), torch.ones(2, 3), mask, clip=(0.05, 0.05))
    torch.testing.assert_close(loss[:, :2], rows((-1.0, -1.0), (-1.05, -1.05)))
    assert metrics["actor/pg_clipfrac"][:, :2].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    torch.testing.assert_close(metrics["actor/ppo_kl"][0, :2], -log_probs[0, :2])
    # a bad response has no gradient if it became less likely, and a gradient if it became more likely
    bad, _ = sequence_policy_loss(-log_probs, torch.zeros(2, 3), -torch.ones(2, 3), mask, clip=(0.05, 0.05))
    torch.testing.assert_close(bad[:, :2], rows((1.0, 1.0), (0.95, 0.95)))


def test_the_gradient_of_gspo_is_that_of_the_sequence_ratio():
    log_probs = rows((1.2, 0.9, 5.0, 1.05)).log().requires_grad_()
    mask, advantages = rows((1, 1, 0, 1)), torch.full((1, 4), 0.7)
    loss, _ = sequence_policy_loss(log_probs, torch.zeros(1, 4), advantages, mask, clip=(0.5, 0.5))
    aggregate(loss, mask, "seq-mean-token-mean").backward()
    other = log_probs.detach().clone().requires_grad_()
    (-0.7 * (other * mask).sum(1).div(3).exp()).sum().backward()  # -A s, as in the paper's eq. 5 and 7
    torch.testing.assert_close(log_probs.grad, other.grad)
    assert log_probs.grad[0, 2] == 0


def test_cispo_by_hand():
    log_probs = rows((0.1, 1.5, 6.0)).log()
    advantages, mask = rows((1.0, -2.0, 1.0)), torch.ones(1, 3)
    loss, metrics = clipped_weight_loss(log_probs, torch.zeros(1, 3), advantages, mask, clip=(0.5, 3.0))
    expected = [-0.5 * math.log(0.1), 2 * 1.5 * math.log(1.5), -4.0 * math.log(6.0)]
    assert loss[0].tolist() == pytest.approx(expected)
    assert metrics["actor/pg_clipfrac"].tolist() == [[1.0, 0.0, 1.0]]


def test_cispo_keeps_the_gradient_of_tokens_that_ppo_drops():
    log_probs = rows((3.0, 9.0)).log().requires_grad_()
    loss, _ = clipped_weight_loss(log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), clip=(1.0, 4.0))
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, rows((-3.0, -5.0)))
    other = log_probs.detach().requires_grad_()
    clipped_policy_loss(other, torch.zeros(1, 2), torch.ones(1, 2))[0].sum().backward()
    assert other.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("loss_fn", [sequence_policy_loss, clipped_weight_loss])
def test_on_policy_all_losses_have_the_gradient_of_reinforce(loss_fn):
    log_probs = rows((-0.7, -0.1), (-1.0, -3.0)).requires_grad_()
    advantages = rows((2.0, -1.0), (0.5, 0.5))
    loss, metrics = loss_fn(log_probs, log_probs.detach(), advantages, torch.ones(2, 2))
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages)
    assert not metrics["actor/pg_clipfrac"].any()


@pytest.mark.parametrize("loss_fn", [sequence_policy_loss, clipped_weight_loss])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("place", ["new", "old", "both"])
def test_values_outside_the_mask_change_nothing(loss_fn, garbage, place):
    mask, advantages = rows((1, 0, 1)), torch.ones(1, 3)

    def gradient(value):
        new, old = rows((-1.0, -1.0, -2.0)), rows((-1.1, -1.1, -2.0))
        new[0, 1] = value if place != "old" else -1.0
        old[0, 1] = value if place != "new" else -1.0
        new.requires_grad_()
        aggregate(loss_fn(new, old, advantages, mask)[0], mask, "seq-mean-token-mean").backward()
        return new.grad

    assert torch.equal(gradient(garbage), gradient(0.0))
    assert gradient(garbage)[0, 1] == 0


@pytest.mark.parametrize("loss_fn", [sequence_policy_loss, clipped_weight_loss])
def test_a_nan_in_a_sampled_token_is_not_hidden(loss_fn):
    ones = torch.ones(1, 1)
    assert loss_fn(torch.tensor([[math.nan]]), torch.zeros(1, 1), ones, ones)[0].isnan().all()
    assert loss_fn(torch.zeros(1, 1), torch.tensor([[math.nan]]), ones, ones)[0].isnan().all()


@pytest.mark.parametrize("loss_fn", [sequence_policy_loss, clipped_weight_loss])
def test_extreme_ratios_stay_finite_and_rows_without_tokens_are_valid(loss_fn):
    log_probs = rows((-1e4, -1e4), (1e4, 1e4), (0.0, 0.0)).requires_grad_()
    mask = rows((1, 1), (1, 1), (0, 0))
    loss, metrics = loss_fn(log_probs, torch.zeros(3, 2), -torch.ones(3, 2), mask)
    aggregate(loss, mask, "seq-mean-token-mean").backward()
    assert torch.isfinite(log_probs.grad).all()
    assert torch.isfinite(loss).all()
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("loss_fn", [sequence_policy_loss, clipped_weight_loss])
def test_negative_clips_raise_an_error(loss_fn):
    ones = torch.ones(1, 1)
    with pytest.raises(InvalidConfig, match="clip"):
        loss_fn(ones, ones, ones, ones, clip=(0.1, -0.1))


def naive_gspo(new, old, advantages, mask, low, high):
    out = []
    for n, o, a, m in zip(new, old, advantages, mask):
        ratios = [math.exp(x - y) for x, y, kept in zip(n, o, m) if kept]
        s = math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0
        clipped = min(max(s, 1 - low), 1 + high)
        out.append([-min(s * each, clipped * each) if kept else 0.0 for each, kept in zip(a, m)])
    return out


def naive_cispo(new, old, advantages, mask, low, high):
    weight = [[min(max(math.exp(x - y), 1 - low), 1 + high) for x, y in zip(n, o)] for n, o in zip(new, old)]
    return [
        [-w * each * x if kept else 0.0 for w, each, x, kept in zip(ws, a, n, m)]
        for ws, a, n, m in zip(weight, advantages, new, mask)
    ]


cells = st.tuples(st.floats(-3, 0, width=16), st.floats(-3, 0, width=16), st.floats(-2, 2, width=16), st.booleans())
tables = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), min_size=1, max_size=4)
)


@pytest.mark.parametrize(("loss_fn", "naive"), [(sequence_policy_loss, naive_gspo), (clipped_weight_loss, naive_cispo)])
@given(tables, st.floats(0, 0.9), st.floats(0, 2))
def test_equals_a_plain_loop(loss_fn, naive, table, low, high):
    new, old, advantages, mask = ([[cell[k] for cell in row] for row in table] for k in range(4))
    loss, _ = loss_fn(*map(torch.tensor, (new, old, advantages, mask)), (low, high))
    expected = torch.tensor(naive(new, old, advantages, mask, low, high))
    torch.testing.assert_close(torch.where(torch.tensor(mask), loss, 0.0), expected, atol=1e-4, rtol=1e-4)


# The critic's loss


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "expected", "active"),
    [
        (1.0, 1.0, 3.0, 0.5, 2.0, 0),
        (1.4, 1.0, 3.0, 0.5, 0.5 * 1.6**2, 0),
        (2.0, 1.0, 3.0, 0.5, 0.5 * 1.5**2, 1),  # moved too far towards the target: no gain
        (0.0, 1.0, 3.0, 0.5, 0.5 * 3.0**2, 0),  # moved away: the full gradient
        (2.0, 1.0, 3.0, None, 0.5, 0),
    ],
)
def test_value_loss_by_hand(value, old, target, clip, expected, active):
    given_value = torch.tensor([[value]], requires_grad=True)
    loss, metrics = value_loss(given_value, torch.tensor([[old]]), torch.tensor([[target]]), clip)
    assert loss.item() == pytest.approx(expected)
    assert metrics["critic/vf_clipfrac"].item() == active
    assert metrics["critic/vf_loss"].item() == pytest.approx(expected)
    assert metrics["critic/vpred_mean"].item() == pytest.approx(value)
    assert not any(each.requires_grad for each in metrics.values())
    loss.sum().backward()
    assert given_value.grad.item() == (0 if active else pytest.approx(value - target))


@pytest.mark.parametrize("clip", [0.0, -1.0])
def test_invalid_value_clips_raise_an_error(clip):
    with pytest.raises(InvalidConfig, match="clip"):
        value_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), clip)


@given(st.lists(st.tuples(*[st.floats(-3, 3, width=16)] * 3), min_size=1, max_size=8), st.floats(0.01, 2))
def test_value_loss_equals_a_plain_loop(tokens, clip):
    values, old, returns = (torch.tensor([column]) for column in zip(*tokens))
    loss, _ = value_loss(values, old, returns, clip)
    expected = [max((v - r) ** 2, (min(max(v, o - clip), o + clip) - r) ** 2) / 2 for v, o, r in tokens]
    assert loss[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
