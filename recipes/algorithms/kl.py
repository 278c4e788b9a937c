"""Estimators of KL(policy || reference) for each token, from the log-probs of tokens that the policy sampled.

J. Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html). With d = log_probs - ref_log_prob:

| estimator | value | expectation under the policy | variance | expected gradient as a loss term |
|---|---|---|---|---|
| `k1_kl` | d | KL | high; may be negative | zero: use it in the reward |
| `k2_kl` | d^2 / 2 | biased, close for small d | low | the gradient of KL |
| `k3_kl` | exp(-d) - 1 + d | KL | low; never negative | the gradient of KL(reference || policy) |
| `unbiased_k3_kl` | as `k3_kl` | KL | low; never negative | the gradient of KL, as `k2_kl` |

The KL term is part of the loss or a penalty in the rewards; see `recipes.algorithms.penalties`.
Dimension letters: B rows, R response tokens.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def k1_kl(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """d = log_probs - ref_log_prob: unbiased, (B, R) and (B, R) to (B, R).

    >>> k1_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]))
    tensor([[ 0.5000, -1.0000]])
    """
    return log_probs - ref_log_prob


def k2_kl(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """d^2 / 2: (B, R) and (B, R) to (B, R). The gradient is zero where d is not finite, which may happen outside the mask.

    >>> k2_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]))
    tensor([[0.1250, 0.5000]])
    """
    difference = log_probs - ref_log_prob
    return 0.5 * torch.where(difference.isfinite(), difference, difference.detach()).square()


def k3_kl(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative, (B, R) and (B, R) to (B, R); GRPO's penalty (arXiv:2402.03300, eq. 4).

    Deviation, as in verl's ``low_var_kl``: d is clamped to [-20, 20] and the result to at most 10. The gradient is zero
    beyond both limits, so a token gets no gradient where d is above 11 or below -2.6.

    >>> k3_kl(torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, -1.0]]))
    tensor([[ 0.1065,  0.7183, 10.0000]])
    """
    difference = torch.clamp(log_probs - ref_log_prob, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(-difference) + difference).clamp(0, K3_LIMIT)


def unbiased_k3_kl(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """The value of `k3_kl` with the gradient of `k2_kl`: (B, R) and (B, R) to (B, R); verl's ``k3+``.

        k2 - sg(k2) + sg(k3),    with the stop-gradient operator sg

    Over samples of the policy, the expectation of k3 is KL(policy || reference), but its expected gradient is that of
    KL(reference || policy). The expected gradient of k2, d * grad(log_probs), is that of KL(policy || reference)
    (arXiv:2510.01555).

    >>> log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> unbiased_k3_kl(log_probs, torch.tensor([[-1.5, -1.0]])).detach()
    tensor([[0.1065, 0.7183]])
    >>> unbiased_k3_kl(log_probs, torch.tensor([[-1.5, -1.0]])).sum().backward()
    >>> log_probs.grad
    tensor([[ 0.5000, -1.0000]])
    """
    gradient = k2_kl(log_probs, ref_log_prob)
    return gradient - gradient.detach() + k3_kl(log_probs, ref_log_prob).detach()


def reverse_kl_advantage(old_log_probs: Tensor, ref_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """On-policy distillation: how much likelier the teacher finds a sampled token than the policy that sampled it.

        A_t = -(log p_policy(y_t | x, y_<t) - log p_teacher(y_t | x, y_<t))

    Its negative is the k1 estimate of the reverse KL divergence at a token. With these advantages and a discount of 0 the policy
    gradient is that of KL(policy || teacher) at each token of the policy's own responses: on-policy distillation with reverse KL
    (GKD, arXiv:2306.13649, section 3, lambda = 1), and the estimator of Thinking Machines' "On-Policy Distillation" (2025).

    Args:
        old_log_probs: (B, R) float, of the policy that sampled.
        ref_log_prob: (B, R) float, of the teacher, for the same tokens at the same temperature.
        response_mask: (B, R) of any dtype, nonzero where the policy sampled the token.

    Returns:
        (B, R) float32, without gradient.

    >>> policy, teacher = torch.tensor([[0.5, 0.5, 0.5]]).log(), torch.tensor([[0.5, 1.0, 0.25]]).log()
    >>> reverse_kl_advantage(policy, teacher, torch.tensor([[1, 1, 0]]))
    tensor([[0.0000, 0.6931, 0.0000]])
    """
    difference = ref_log_prob.detach().float() - old_log_probs.detach().float()
    return torch.where(response_mask != 0, difference, 0.0)


Estimate = Callable[[Tensor, Tensor], Tensor]
KL_ESTIMATORS: Mapping[str, Estimate] = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl, "k3+": unbiased_k3_kl}
"""The estimators by the names that `AlgorithmConfig` gives them."""
