"""Estimators of KL(policy || reference) per token, from log-probs of tokens that the policy sampled.

J. Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html). With d = log_probs - ref_log_prob:

| estimator | value | mean over samples of the policy | spread | as a loss term, the expected gradient is |
|---|---|---|---|---|
| `k1_kl` | d | KL | high, may be negative | zero: put it into the reward instead |
| `k2_kl` | d^2 / 2 | biased, close for small d | low | that of KL |
| `k3_kl` | exp(-d) - 1 + d | KL | low, never negative | that of KL(reference || policy) |

Dimension letters: B rows, R response tokens.
"""

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
