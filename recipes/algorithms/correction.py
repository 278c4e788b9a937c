"""Corrections for an engine whose log-probs are not the actor's: rounding, kernels and stale weights make samples off-policy.

Dimension letters: B rows, R response tokens. What stands outside the mask is never looked at.
"""

from typing import Literal

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig

Correction = Literal["none", "token", "sequence", "mask"]
LOG_RATIO_LIMIT = 20.0


def importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, correction: Correction, limit: float
) -> Tensor:
    """What each token's loss is multiplied by, (B, R) float without gradient.

    With the log ratio d = old_log_probs - rollout_log_probs of the policy that learns to the one that sampled, and s the sum of d
    over a row's response:

        token     min(exp(d), limit)       truncated importance sampling per token (Yao et al. 2025, "Your Efficient RL Framework
                                           Secretly Brings You Off-Policy RL Training"; truncation: Ionides 2008)
        sequence  min(exp(s), limit)       the same per response: unbiased but for the truncation, of larger variance
        mask      1 if 1/limit <= exp(s) <= limit else 0     responses that the policy would not have given are left out

    Rows that are left out stay in the denominators of the loss. d and s are clamped to [-20, 20].

    Args:
        old_log_probs: (B, R) of the actor, before its update.
        rollout_log_probs: (B, R) of the engine, for the same tokens.
        mask: (B, R), 1 on tokens that were sampled.
        limit: above 1.

    >>> old, rollout = torch.tensor([[0.4, 0.9]]).log(), torch.tensor([[0.1, 0.6]]).log()
    >>> importance_weights(old, rollout, torch.ones(1, 2), "token", limit=2.0)
    tensor([[2.0000, 1.5000]])
    >>> importance_weights(old, rollout, torch.ones(1, 2), "sequence", limit=5.0)
    tensor([[5., 5.]])
    >>> importance_weights(old, rollout, torch.ones(1, 2), "mask", limit=2.0)
    tensor([[0., 0.]])
    """
    if limit <= 1:
        raise InvalidConfig(f"correction_limit={limit}: must be above 1")
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    if correction == "none":
        return torch.ones_like(log_ratio)
    if correction == "token":
        return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=limit)
    ratio = log_ratio.sum(-1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().expand_as(log_ratio)
    if correction == "sequence":
        return ratio.clamp(max=limit)
    return ((ratio >= 1 / limit) & (ratio <= limit)).to(log_ratio.dtype)


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), old_log_probs.detach() - rollout_log_probs, 0.0)
