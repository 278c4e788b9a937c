"""Estimators of KL(policy || reference) per token, from log-probs of tokens that the policy sampled.

J. Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html). With d = log_probs - ref_log_prob:

| estimator | value | mean over samples of the policy | spread | as a loss term, the expected gradient is |
|---|---|---|---|---|
| `k1_kl` | d | KL | high, may be negative | zero: put it into the reward instead |
| `k2_kl` | d^2 / 2 | biased, close for small d | low | that of KL |
| `k3_kl` | exp(-d) - 1 + d | KL | low, never negative | that of KL(reference || policy) |
| `unbiased_k3_kl` | as `k3_kl` | KL | low, never negative | that of KL: it is `k2_kl`'s |

A KL term stands in the loss, or as a penalty in the rewards (`penalised_rewards`) with a weight that is fixed or follows a
target (`KLController`). Dimension letters: B rows, R response tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def k1_kl(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """d = log_probs - ref_log_prob: unbiased, (B, R) and (B, R) to (B, R).

    >>> k1_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]))
    tensor([[ 0.5000, -1.0000]])
    """
    return log_probs - ref_log_prob


def k2_kl(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """d^2 / 2: (B, R) and (B, R) to (B, R). No gradient flows where d is not finite (as may be in masked places).

    >>> k2_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]))
    tensor([[0.1250, 0.5000]])
    """
    difference = log_probs - ref_log_prob
    return 0.5 * torch.where(difference.isfinite(), difference, difference.detach()).square()


def k3_kl(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative, (B, R) and (B, R) to (B, R); GRPO's penalty (arXiv:2402.03300, eq. 4).

    Deviation, as verl's ``low_var_kl``: d is clamped to [-20, 20] and the result to at most 10, beyond which no
    gradient flows; so a token that the reference finds some 11 nats less likely is no longer pulled back.

    >>> k3_kl(torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, -1.0]]))
    tensor([[ 0.1065,  0.7183, 10.0000]])
    """
    difference = torch.clamp(log_probs - ref_log_prob, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(-difference) + difference).clamp(0, K3_LIMIT)


def unbiased_k3_kl(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """The value of `k3_kl` with the gradient of `k2_kl`: (B, R) and (B, R) to (B, R); verl's ``k3+``.

        k2 - sg(k2) + sg(k3),    sg the stop of the gradient

    Over samples of the policy, the mean of k3 is KL(policy || reference), but its mean gradient is that of
    KL(reference || policy); the mean gradient of k2, d * grad(log_probs), is that of KL(policy || reference) (arXiv:2510.01555).

    >>> log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> unbiased_k3_kl(log_probs, torch.tensor([[-1.5, -1.0]])).detach()
    tensor([[0.1065, 0.7183]])
    >>> unbiased_k3_kl(log_probs, torch.tensor([[-1.5, -1.0]])).sum().backward()
    >>> log_probs.grad
    tensor([[ 0.5000, -1.0000]])
    """
    gradient = k2_kl(log_probs, ref_log_prob)
    return gradient - gradient.detach() + k3_kl(log_probs, ref_log_prob).detach()


def penalised_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, coef: float) -> tuple[Tensor, float]:
    """Rewards minus ``coef`` times the KL estimate of each sampled token, and the mean estimate (arXiv:1909.08593, eq. 2).

    The mean is over a row's tokens first, then over rows, as in verl; deviation: rows without a sampled token are left out.

    Args:
        scores: (B, R) float, token-level.
        kl: (B, R) float, of the policy that sampled; see the estimators above. Not read where the mask is zero.
        response_mask: (B, R) of any dtype, not zero where the policy sampled the token.

    Returns:
        (B, R) float32 without gradient, and the mean; 0 if nothing was sampled.

    >>> rewards, mean = penalised_rewards(
    ...     torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, -0.1]]), torch.ones(1, 2), coef=0.1
    ... )
    >>> rewards, round(mean, 3)
    (tensor([[-0.0500,  1.0100]]), 0.2)
    """
    sampled = response_mask != 0
    kept = torch.where(sampled, kl.detach().float(), 0.0)
    tokens = sampled.sum(-1)
    rows = (kept.double().sum(-1) / tokens.clamp(min=1)).sum() / (tokens > 0).sum().clamp(min=1)
    return scores.detach().float() - coef * kept, float(rows)


@dataclass
class KLController:
    """The weight of a KL penalty: fixed, or with a ``target`` adapted so that the KL stays near it.

    After each batch, with e = clamp(KL / target - 1, -0.2, 0.2) (arXiv:1909.08593, section 2.2),

        coef <- coef * (1 + e * rows / horizon)

    Deviations: the paper's K = 0.1 is rows / horizon, as in its code; KL is a mean over tokens, as in verl.

    >>> controller = KLController(0.1, target=0.02, horizon=1000)
    >>> controller.update(kl=0.05, rows=100)
    >>> round(controller.coef, 4)
    0.102
    """

    coef: float
    target: float | None = None
    horizon: int = 10_000  # rows

    def __post_init__(self) -> None:
        if self.coef < 0 or self.horizon < 1 or (self.target is not None and self.target <= 0):
            raise InvalidConfig(
                f"KL controller: coef={self.coef} must not be negative, target={self.target} be above 0 and "
                f"horizon={self.horizon} at least 1"
            )

    def update(self, kl: float, rows: int) -> None:
        """Takes in the KL of a batch of so many rows."""
        if self.target is not None:
            self.coef *= 1 + min(max(kl / self.target - 1, -0.2), 0.2) * rows / self.horizon
