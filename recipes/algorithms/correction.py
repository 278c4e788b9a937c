"""Corrections for the mismatch of engine and actor: rounding, kernels and stale weights make samples off-policy.

With the log ratio d = old_log_probs - rollout_log_probs of the policy that learns to the policy that sampled, the importance
ratio is

| level | ratio | one ratio for each | source |
|---|---|---|---|
| `token` | exp(d) | token | Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" |
| `sequence` | exp(sum of d over the response) | response | Liu et al. 2025, "When Speed Kills Stability" |
| `geometric` | exp(mean of d over the response) | response | the same; GSPO's ratio, arXiv:2507.18071, eq. 7 |

`importance_weights` weighs losses by the ratio, truncated at a limit: truncated importance sampling, TIS (Ionides 2008).
`kept_tokens` removes tokens or responses with a ratio outside of bounds from the loss and its denominators. Both at the same
level are masked importance sampling, MIS. All ratios are without gradient. `recipes.algorithms.mismatch` has the metrics.

Dimension letters: B rows, R response tokens. Values outside the mask are ignored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from dataproto.errors import InvalidConfig

if TYPE_CHECKING:  # options are read without torch
    from torch import Tensor

Correction = Literal["none", "token", "sequence", "geometric"]
Rejection = Literal["none", "token", "sequence", "geometric", "max"]
Bounds = tuple[float, float]
LOG_RATIO_LIMIT = 20.0


def importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: Correction, limit: float | Bounds
) -> Tensor:
    """The weight of each token's loss: the ratio of the token or of its response, limited to avoid large weights.

        min(ratio, limit)                          with one number: truncation, as TRL's ``*_truncate``
        ratio if low <= ratio <= high else 0       with two numbers: IcePop (arXiv:2510.18855), as TRL's ``*_mask``

    A token of weight 0 still counts in the denominators of the loss; use `kept_tokens` to remove it from them. The log ratio
    is clamped to [-20, 20], as in verl.

    Args:
        old_log_probs: (B, R) float, of the actor before its update.
        rollout_log_probs: (B, R) float, of the engine, for the same tokens.
        mask: (B, R) of any dtype, nonzero where the policy sampled the token.
        level: the level of the ratio; ``none`` gives 1 everywhere.
        limit: the largest weight, above 1; or a lower and an upper bound around 1.

    Returns:
        (B, R) float, 1 where the mask is 0.

    Raises:
        InvalidConfig: ``limit`` is out of range.

    >>> import torch
    >>> old, rollout = torch.tensor([[0.4, 0.9]]).log(), torch.tensor([[0.1, 0.6]]).log()
    >>> importance_weights(old, rollout, torch.ones(1, 2), "token", limit=2.0)
    tensor([[2.0000, 1.5000]])
    >>> importance_weights(old, rollout, torch.ones(1, 2), "token", limit=(0.5, 2.0))
    tensor([[0.0000, 1.5000]])
    >>> importance_weights(old, rollout, torch.ones(1, 2), "sequence", limit=5.0)
    tensor([[5., 5.]])
    """
    check_limit(limit)
    ratio = _log_ratio(old_log_probs, rollout_log_probs, mask, level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if isinstance(limit, tuple):
        ratio = ratio.where((ratio >= limit[0]) & (ratio <= limit[1]), 0.0)
    else:
        ratio = ratio.clamp(max=limit)
    return ratio.where(mask != 0, 1.0)


def kept_tokens(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: Rejection, bounds: Bounds
) -> Tensor:
    """The mask without rejected tokens, whose ratio is outside of ``bounds``.

        token                   rejects a token if its ratio is outside
        sequence, geometric     rejects a response if its ratio is outside
        max                     rejects a response if the ratio of any of its tokens is outside

    The levels equal verl's ``token_k1``, ``seq_sum_k1``, ``seq_mean_k1`` and, with bounds (1 / c, c), ``seq_max_k2`` with the
    threshold log(c)^2 / 2. Deviation: ``bounds`` apply to the ratio exp(d); verl 0.9 applies them to its inverse.

    Args, raises: as `importance_weights`.

    Returns:
        (B, R) of the mask's dtype; it may be 0 everywhere.

    >>> import torch
    >>> old, rollout = torch.tensor([[0.4, 0.9]]).log(), torch.tensor([[0.1, 0.6]]).log()
    >>> kept_tokens(old, rollout, torch.ones(1, 2), "token", (0.5, 2.0))
    tensor([[0., 1.]])
    >>> kept_tokens(old, rollout, torch.ones(1, 2), "max", (0.5, 2.0))
    tensor([[0., 0.]])
    """
    check_bounds(bounds)
    low, high = (math.log(bound) if bound else -math.inf for bound in bounds)
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask, "token" if level == "max" else level)
    inside = (log_ratio >= low) & (log_ratio <= high)
    if level == "max":
        inside = (inside | (mask == 0)).all(-1, keepdim=True)
    return mask.where(inside, mask.new_zeros(()))


def check_limit(limit: float | Bounds) -> None:
    """Raises `InvalidConfig` if ``limit`` is not a valid limit for `importance_weights`."""
    if isinstance(limit, tuple):
        check_bounds(limit, "correction_limit")
    elif not limit > 1:
        raise InvalidConfig(
            f"correction_limit={limit}: must be a number above 1, or a lower and an upper bound around 1"
        )


def check_bounds(bounds: Bounds, name: str = "rejection_bounds") -> None:
    """Raises `InvalidConfig` if ``bounds`` do not enclose 1; ``name`` is the option named in the message."""
    if not 0 <= bounds[0] <= 1 <= bounds[1]:
        raise InvalidConfig(f"{name}={bounds}: the lower bound must be from 0 to 1, and the upper at least 1")


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: Correction) -> Tensor:
    """The log ratio of each token or of its response, (B, R); 0 outside the mask."""
    sampled = mask != 0
    if level == "none":
        return old_log_probs.new_zeros(old_log_probs.shape)
    log_ratio = (old_log_probs.detach() - rollout_log_probs).where(sampled, 0.0)
    if level == "token":
        return log_ratio
    whole = log_ratio.sum(-1, keepdim=True)
    if level == "geometric":
        whole = whole / sampled.sum(-1, keepdim=True).clamp(min=1)
    return whole.where(sampled, 0.0)
