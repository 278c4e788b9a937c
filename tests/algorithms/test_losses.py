import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.errors import InvalidConfig
from helpers.aggregated import aggregate
from recipes.algorithms.losses import clipped_policy_loss


def loss_of(ratio, advantage, **options):
    log_probs = torch.tensor([[math.log(ratio)]])
    loss, metrics = clipped_policy_loss(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), **options)
    return loss.item(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped", "lower"),
    [
        (1.0, 2.0, -2.0, 0, 0),
        (1.1, 2.0, -2.2, 0, 0),
        (1.5, 2.0, -2.0 * 1.28, 1, 0),  # no gain above 1 + high
        (0.5, 2.0, -1.0, 0, 0),  # a good action that became less likely has the full gradient
        (0.5, -2.0, 2.0 * 0.8, 1, 0),  # no gain below 1 - low
        (1.5, -2.0, 3.0, 0, 0),  # a bad action that became more likely has the full gradient
        (5.0, -2.0, 6.0, 0, 1),  # up to the dual clip at 3
        (5.0, 0.0, 0.0, 0, 0),
    ],
)
def test_hand_worked(ratio, advantage, expected, clipped, lower):
    loss, metrics = loss_of(ratio, advantage, clip=(0.2, 0.28), dual_clip=3.0)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert metrics["actor/pg_clipfrac"] == clipped
    assert metrics["actor/pg_clipfrac_lower"] == lower
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio))


def test_without_dual_clip():
    loss, metrics = loss_of(5.0, -2.0, dual_clip=None)
    assert loss == pytest.approx(10.0)
    assert metrics["actor/pg_clipfrac_lower"] == 0


def test_low_and_high_clips_are_separate():
    assert loss_of(1.5, 1.0, clip=(0.1, 0.4))[0] == pytest.approx(-1.4)
    assert loss_of(0.5, -1.0, clip=(0.1, 0.4))[0] == pytest.approx(0.9)


def gradient_of(ratio, advantage):
    log_probs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    clipped_policy_loss(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]))[0].sum().backward()
    return log_probs.grad.item()


def test_gradients():
    assert gradient_of(1.0, 2.0) == pytest.approx(-2.0)  # on-policy: the plain policy gradient
    assert gradient_of(0.5, 2.0) == pytest.approx(-1.0)
    assert gradient_of(1.5, 2.0) == 0.0
    assert gradient_of(0.5, -2.0) == 0.0
    assert gradient_of(1.5, -2.0) == pytest.approx(3.0)
    assert gradient_of(5.0, -2.0) == 0.0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("place", ["new", "old", "both"])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_values_outside_the_mask_give_no_gradient(garbage, place, advantage):
    new, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.1, -1.1]])
    new[0, 1] = garbage if place != "old" else -1.0
    old[0, 1] = garbage if place != "new" else -1.0
    new.requires_grad_()
    loss, _ = clipped_policy_loss(new, old, torch.tensor([[1.0, advantage]]))
    aggregate(loss, torch.tensor([[1, 0]]), "token-mean").backward()
    assert new.grad[0, 1] == 0.0
    assert new.grad[0, 0] != 0.0
    assert torch.isfinite(new.grad).all()


def test_a_nan_in_a_sampled_token_is_not_hidden():
    loss, _ = clipped_policy_loss(torch.tensor([[math.nan]]), torch.zeros(1, 1), torch.ones(1, 1))
    assert loss.isnan().all()


def test_extreme_ratios_stay_finite():
    log_probs = torch.tensor([[-1e4, 1e4]], requires_grad=True)
    loss, metrics = clipped_policy_loss(log_probs, torch.zeros(1, 2), -torch.ones(1, 2), dual_clip=None)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert metrics["actor/ppo_kl"].tolist() == [[20.0, -20.0]]
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    "options", [{"dual_clip": 1.0}, {"dual_clip": 0.5}, {"clip": (-0.1, 0.2)}, {"clip": (0.2, -1)}]
)
def test_invalid_clips_raise_an_error(options):
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        loss_of(1.0, 1.0, **options)


def naive(ratio, advantage, low, high, dual):
    value = min(ratio * advantage, max(min(ratio, 1 + high), 1 - low) * advantage)
    return -max(value, dual * advantage) if advantage < 0 else -value


reals = st.floats(-3, 3, width=32)


@given(st.lists(st.tuples(reals, reals, reals), min_size=1, max_size=8), st.floats(0, 0.9), st.floats(0, 0.9))
def test_equals_a_plain_loop(tokens, low, high):
    new, old, advantages = (torch.tensor([column]) for column in zip(*tokens))
    loss, _ = clipped_policy_loss(new, old, advantages, (low, high), 2.5)
    expected = [naive(math.exp(n - o), a, low, high, 2.5) for n, o, a in tokens]
    assert loss[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
