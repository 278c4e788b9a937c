import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.aggregated import aggregate
from recipes.algorithms.kl import k1_kl, k2_kl, k3_kl, unbiased_k3_kl

ESTIMATORS = [k1_kl, k2_kl, k3_kl, unbiased_k3_kl]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (k1_kl, [0.5, -1.0]),
        (k2_kl, [0.125, 0.5]),
        (k3_kl, [math.exp(-0.5) - 0.5, math.e - 2]),
        (unbiased_k3_kl, [math.exp(-0.5) - 0.5, math.e - 2]),
    ],
)
def test_hand_worked(estimator, expected):
    got = estimator(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]))
    assert got[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_give_exactly_zero(estimator):
    log_probs = torch.tensor([[-0.3, -7.1, 0.0]])
    assert torch.equal(estimator(log_probs, log_probs.clone()), torch.zeros(1, 3))


def test_expectations_over_a_whole_distribution():
    """The expectation of k1 and of k3 under the policy is the KL; k3 has the smaller variance."""
    policy = torch.tensor([0.5, 0.3, 0.2])
    reference = torch.tensor([0.4, 0.4, 0.2])
    true = (policy * (policy / reference).log()).sum()
    k1, k2, k3, unbiased = (estimator(policy.log(), reference.log()) for estimator in ESTIMATORS)
    torch.testing.assert_close(unbiased, k3)
    torch.testing.assert_close((policy * k1).sum(), true)
    torch.testing.assert_close((policy * k3).sum(), true)
    assert (policy * k2).sum().item() == pytest.approx(true.item(), rel=0.1)
    assert (policy * (k3 - true).square()).sum() < (policy * (k1 - true).square()).sum()


def test_expected_gradients_agree_with_the_table():
    logits = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()

    def gradient(value):
        return torch.autograd.grad(value, logits)[0]

    def log_policy():
        return logits.log_softmax(0)

    def expected(estimator):  # of the loss term only: samples have no gradient
        return gradient((log_policy().exp().detach() * estimator(log_policy(), reference)).sum())

    forward = gradient((log_policy().exp() * (log_policy() - reference)).sum())
    backward = gradient((reference.exp() * (reference - log_policy())).sum())
    torch.testing.assert_close(expected(k1_kl), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected(k2_kl), forward)
    torch.testing.assert_close(expected(k3_kl), backward)
    torch.testing.assert_close(expected(unbiased_k3_kl), forward)
    assert not torch.allclose(forward, backward)


@given(st.floats(-100, 0, width=32), st.floats(-100, 0, width=32))
def test_k3_is_between_zero_and_ten(log_prob, ref):
    value = k3_kl(torch.tensor([[log_prob]]), torch.tensor([[ref]])).item()
    d = max(min(log_prob - ref, 20.0), -20.0)
    assert 0.0 <= value <= 10.0
    assert value == pytest.approx(min(math.expm1(-d) + d, 10.0), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_values_outside_the_mask_give_no_gradient(estimator, garbage):
    log_probs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, garbage]])
    aggregate(estimator(log_probs, reference), torch.tensor([[1, 0]]), "token-mean").backward()
    assert log_probs.grad[0, 1] == 0.0
    assert log_probs.grad[0, 0] != 0.0
    assert torch.isfinite(log_probs.grad).all()
