"""SAPO, Clip-Cov and KL-Cov, and the tokens that the latter two select, compared with plain loops."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dataproto.errors import InvalidConfig
from helpers.aggregated import aggregate
from recipes.algorithms.covariances import highest_covariance, random_high_covariance
from recipes.algorithms.losses import clip_cov_loss, gated_policy_loss, kl_cov_loss

LOSSES = [
    gated_policy_loss,
    lambda *columns: clip_cov_loss(*columns, torch.zeros_like(columns[0], dtype=torch.bool)),
    lambda *columns: kl_cov_loss(*columns, torch.ones_like(columns[0], dtype=torch.bool), 0.0),
]


def rows(*values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_on_policy_all_have_the_gradient_of_reinforce(loss_fn):
    log_probs = rows((-0.7, -0.1), (-1.0, -3.0)).requires_grad_()
    advantages = rows((2.0, -1.0), (0.5, 0.5))
    loss, metrics = loss_fn(log_probs, log_probs.detach(), advantages)
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages)
    assert not metrics["actor/pg_clipfrac"].any()
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("place", ["new", "old"])
def test_values_outside_the_mask_give_no_gradient(loss_fn, garbage, place):
    new, old = rows((-1.0, -1.0, -2.0)), rows((-1.1, -1.1, -2.0))
    (new if place == "new" else old)[0, 1] = garbage
    new.requires_grad_()
    aggregate(loss_fn(new, old, torch.ones(1, 3))[0], rows((1, 0, 1)), "token-mean").backward()
    assert new.grad[0, 1] == 0
    assert new.grad.isfinite().all()
    assert new.grad[0, 0] != 0


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_extreme_ratios_stay_finite_and_nan_is_not_hidden(loss_fn):
    far, zero = rows((-1e4, 1e4)), torch.zeros(1, 2)
    assert loss_fn(far, zero, -torch.ones(1, 2))[0].isfinite().all()
    assert loss_fn(rows((math.nan, 0.0)), zero, torch.ones(1, 2))[0][0, 0].isnan()


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=6),
    st.floats(0.1, 5),
    st.floats(0.1, 5),
)
def test_sapo_equals_a_plain_loop(tokens, positive, negative):
    log_ratios, advantages = (torch.tensor([each], dtype=torch.float64) for each in zip(*tokens))
    log_probs = log_ratios.clone().requires_grad_()
    loss, _ = gated_policy_loss(log_probs, torch.zeros_like(log_ratios), advantages, (positive, negative))
    loss.sum().backward()
    for column, (d, advantage) in enumerate(tokens):
        t, w = positive if advantage > 0 else negative, math.exp(d)
        s = 1 / (1 + math.exp(-t * (w - 1)))
        assert loss[0, column].item() == pytest.approx(-advantage * 4 / t * s, rel=1e-6, abs=1e-9)
        assert log_probs.grad[0, column].item() == pytest.approx(-advantage * 4 * s * (1 - s) * w, rel=1e-6, abs=1e-9)


def test_a_temperature_of_zero_raises_an_error():
    with pytest.raises(InvalidConfig, match="sapo_temperatures"):
        gated_policy_loss(rows((0.0,)), rows((0.0,)), rows((1.0,)), (1.0, 0.0))


def test_selected_tokens_have_no_gradient_or_a_penalty():
    new = rows((0.2, 0.2, -0.2)).requires_grad_()
    chosen, advantages = torch.tensor([[True, False, True]]), rows((1.0, 1.0, -1.0))
    loss, metrics = clip_cov_loss(new, torch.zeros(1, 3), advantages, chosen, clip=(0.1, 0.1))
    torch.testing.assert_close(loss.detach(), rows((0.0, -1.1, 0.0)))
    assert metrics["actor/pg_clipfrac"].tolist() == [[1.0, 0.0, 1.0]]
    loss.sum().backward()
    assert new.grad.tolist() == [[0.0, 0.0, 0.0]]  # two are selected, one is clipped
    loss, _ = kl_cov_loss(new, torch.zeros(1, 3), advantages, chosen, kl_cov_coef=0.5)
    expected = rows((-math.exp(0.2) + 0.1, -math.exp(0.2), math.exp(-0.2) + 0.1))
    torch.testing.assert_close(loss.detach(), expected)
    new.grad = None
    loss.sum().backward()
    torch.testing.assert_close(new.grad, rows((-math.exp(0.2) + 0.5, -math.exp(0.2), math.exp(-0.2) - 0.5)))


batches = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 10_000))


def make(batch):
    count, width, seed = batch
    draw = torch.Generator().manual_seed(seed)
    log_probs, advantages = (torch.randn(count, width, generator=draw, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(count, width, generator=draw) < 0.7).long()
    return torch.where(mask == 1, log_probs, math.nan), advantages, mask


def naive_covariances(log_probs, advantages, mask):
    cells = [tuple(cell) for cell in mask.nonzero().tolist()]
    mean = [sum(float(values[cell]) for cell in cells) / max(len(cells), 1) for values in (log_probs, advantages)]
    return {cell: (float(log_probs[cell]) - mean[0]) * (float(advantages[cell]) - mean[1]) for cell in cells}


@given(batches, st.floats(0.01, 1.0))
def test_highest_covariances_equal_a_plain_loop(batch, share):
    log_probs, advantages, mask = make(batch)
    found = naive_covariances(log_probs, advantages, mask)
    count = max(int(share * len(found)), 1) if found else 0
    chosen = highest_covariance(log_probs, advantages, mask, share)
    assert chosen.dtype == torch.bool
    values = [
        found[tuple(cell)] for cell in chosen.nonzero().tolist()
    ]  # with two tokens, both are equal up to rounding
    assert sorted(values, reverse=True) == pytest.approx(sorted(found.values(), reverse=True)[:count], abs=1e-9)


@given(batches, st.floats(0.01, 1.0), st.integers(0, 5))
def test_drawn_covariances_are_within_the_bounds_and_depend_on_the_seed(batch, share, seed):
    log_probs, advantages, mask = make(batch)
    found = naive_covariances(log_probs, advantages, mask)
    within = {cell for cell, value in found.items() if 0.1 < value < 1.0}
    assume(all(abs(value - bound) > 1e-9 for value in found.values() for bound in (0.1, 1.0)))
    chosen = random_high_covariance(log_probs, advantages, mask, share, (0.1, 1.0), (seed, 1))
    cells = {tuple(cell) for cell in chosen.nonzero().tolist()}
    assert cells <= within
    assert len(cells) == min(max(int(share * len(found)), 1), len(within))
    assert torch.equal(chosen, random_high_covariance(log_probs, advantages, mask, share, (0.1, 1.0), (seed, 1)))


def test_each_step_draws_other_tokens():
    log_probs, advantages, mask = torch.arange(100.0)[None], torch.arange(100.0)[None], torch.ones(1, 100)
    draws = [random_high_covariance(log_probs, advantages, mask, 0.1, (0.0, 1e9), (0, step)) for step in range(3)]
    assert all(draw.sum() == 10 for draw in draws)
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
