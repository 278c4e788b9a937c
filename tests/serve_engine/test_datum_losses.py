import math

import pytest
import torch

from dataproto.errors import InvalidConfig
from dataproto_server.engine.datum_losses import (
    cispo,
    cross_entropy,
    dro,
    importance_sampling,
    loss_options,
    ppo,
)

P = [math.log(0.5), math.log(0.9), math.log(0.2)]
Q = [math.log(0.25), math.log(0.9), math.log(0.4)]  # ratios 2, 1, 0.5
A = [1.0, -2.0, -1.0]


def numbers(values, grad=False):
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def slope(loss_fn, *arguments, **options):
    p = numbers(P, grad=True)
    loss = loss_fn(p, *arguments, **options)
    loss.sum().backward()
    return loss.detach()[0].tolist(), p.grad[0].tolist()


def test_cross_entropy_is_a_weighted_sum():
    loss, grad = slope(cross_entropy, numbers([0.0, 1.0, 0.5]))
    assert loss == pytest.approx([0.0, -P[1], -0.5 * P[2]])
    assert grad == pytest.approx([0.0, -1.0, -0.5])


def test_importance_sampling_weighs_by_the_ratio():
    loss, grad = slope(importance_sampling, numbers(Q), numbers(A))
    assert loss == pytest.approx([-2.0, 2.0, 0.5])
    assert grad == pytest.approx([-2.0, 2.0, 0.5])  # the derivative of exp(p - q) by p is exp(p - q)


def test_ppo_takes_the_larger_of_clipped_and_unclipped_loss():
    loss, grad = slope(ppo, numbers(Q), numbers(A))
    # A > 0, r = 2: min(2, 1.2); A < 0, r = 1: -2; A < 0, r = 0.5: min(-0.5, -0.8)
    assert loss == pytest.approx([-1.2, 2.0, 0.8])
    assert grad == pytest.approx([0.0, 2.0, 0.0])
    loss, grad = slope(ppo, numbers(Q), numbers(A), clip_low_threshold=0.4, clip_high_threshold=3.0)
    assert loss == pytest.approx([-2.0, 2.0, 0.5])
    assert grad == pytest.approx([-2.0, 2.0, 0.5])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    loss, grad = slope(cispo, numbers(Q), numbers(A), clip_low_threshold=0.8, clip_high_threshold=1.2)
    assert loss == pytest.approx([-1.2 * P[0], 2 * P[1], 0.8 * P[2]])
    assert grad == pytest.approx([-1.2, 2.0, 0.8])
    loss, _ = slope(cispo, numbers(Q), numbers(A))  # by default between 0 and 4
    assert loss == pytest.approx([-2 * P[0], 2 * P[1], 0.5 * P[2]])
    loss, _ = slope(cispo, numbers([P[0] - math.log(8), *Q[1:]]), numbers(A))
    assert loss[0] == pytest.approx(-4 * P[0])


def test_thresholds_may_differ_from_token_to_token():
    low, high = numbers([0.8, 0.8, 0.6]), numbers([1.5, 1.2, 1.2])
    loss, _ = slope(ppo, numbers(Q), numbers(A), clip_low_threshold=low, clip_high_threshold=high)
    assert loss == pytest.approx([-1.5, 2.0, 0.6])


def test_dro_has_a_squared_penalty():
    beta = 0.1
    loss, grad = slope(dro, numbers(Q), numbers(A), beta=beta)
    distance = [p - q for p, q in zip(P, Q)]
    assert loss == pytest.approx([-(p * a - 0.5 * beta * d**2) for p, a, d in zip(P, A, distance)])
    assert grad == pytest.approx([-a + beta * d for a, d in zip(A, distance)])


def test_options_out_of_range_raise_an_error():
    with pytest.raises(InvalidConfig, match="0 <= low <= high"):
        cispo(numbers(P), numbers(Q), numbers(A), clip_low_threshold=5.0)
    with pytest.raises(InvalidConfig, match="beta=-1"):
        dro(numbers(P), numbers(Q), numbers(A), beta=-1)


def test_unknown_losses_and_options_raise_an_error():
    with pytest.raises(InvalidConfig, match="'hinge' is unknown: choose one of cross_entropy"):
        loss_options("hinge", {})
    with pytest.raises(InvalidConfig, match="'gspo' has no public formula: choose one of cross_entropy"):
        loss_options("gspo", {})
    with pytest.raises(InvalidConfig, match="beta=nan is not a finite number"):
        loss_options("dro", {"beta": math.nan})
    with pytest.raises(InvalidConfig, match="'cross_entropy' has no option 'beta': it has none"):
        loss_options("cross_entropy", {"beta": 1})
