"""Corrections for an engine whose log-probs are not the actor's: rounding, kernels and stale weights make samples off-policy.

With the log ratio d = old_log_probs - rollout_log_probs of the policy that learns to the one that sampled, a token or a response
has the ratio

| level | ratio | of | source |
|---|---|---|---|
| `token` | exp(d) | each token | Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" |
| `sequence` | exp(sum of d over the response) | each response | Liu et al. 2025, "When Speed Kills Stability" |
| `geometric` | exp(mean of d over the response) | each response | the same; GSPO's ratio, arXiv:2507.18071, eq. 7 |

`importance_weights` multiplies losses by a ratio, cut at a limit: truncated importance sampling, TIS (Ionides 2008).
`kept_tokens` leaves out of the loss, and of its denominators, what has a ratio outside of bounds. Both at one level are masked
importance sampling, MIS: the ratio is the weight inside of the bounds. All ratios are without gradient.

Dimension letters: B rows, R response tokens. Values outside of the mask are never read.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig

Correction = Literal["none", "token", "sequence", "geometric"]
Rejection = Literal["none", "token", "sequence", "geometric", "max"]
Bounds = tuple[float, float]
LOG_RATIO_LIMIT = 20.0


def importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: Correction, limit: float | Bounds
) -> Tensor:
    """What each token's loss is multiplied by: its ratio, or its response's, as a weight that is not too large.

        min(ratio, limit)                          with one number: truncated, as TRL's ``*_truncate``
        ratio if low <= ratio <= high else 0       with two: IcePop (arXiv:2510.18855), as TRL's ``*_mask``

    A token of weight 0 stays in the denominators of the loss; `kept_tokens` removes it from them. The log of a ratio is clamped
    to [-20, 20], as in verl.

    Args:
        old_log_probs: (B, R) of the actor, before its update.
        rollout_log_probs: (B, R) of the engine, for the same tokens.
        mask: (B, R) of any dtype, not zero where the policy sampled the token.
        level: whose ratio; ``none`` gives 1 everywhere.
        limit: the largest weight, above 1; or bounds around 1.

    Returns:
        (B, R) float, 1 where the mask is 0.

    Raises:
        InvalidConfig: an impossible limit.

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
        ratio = torch.where((ratio >= limit[0]) & (ratio <= limit[1]), ratio, 0.0)
    else:
        ratio = ratio.clamp(max=limit)
    return torch.where(mask != 0, ratio, 1.0)


def kept_tokens(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: Rejection, bounds: Bounds
) -> Tensor:
    """The mask without what the policy that learns would hardly have sampled, or far more often: rejection by ratio.

        token                   a token goes if its ratio is outside of the bounds
        sequence, geometric     a response goes if its ratio is
        max                     a response goes if the ratio of any of its tokens is: one catastrophic token vetoes it

    The same as verl's ``token_k1``, ``seq_sum_k1``, ``seq_mean_k1`` and, with bounds (1 / c, c), ``seq_max_k2`` with a threshold
    of log(c)^2 / 2. Deviation: bounds are those of the ratio; verl 0.9 compares ``k1`` = -d with them, so bounds of its inverse.

    Args, raises: as `importance_weights`.

    Returns:
        (B, R) of the mask's dtype. It may be 0 everywhere.

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
    return torch.where(inside, mask, torch.zeros_like(mask))


def correction_metrics(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
) -> dict[str, float]:
    """How far apart the two policies are, and what was done about it, under verl's names.

    Always, with d over all tokens T or rows: ``kl`` (mean of -d) and ``k3_kl`` of the engine's policy to the actor's,
    ``training_ppl``, ``rollout_ppl``, ``ppl_ratio``, ``log_ppl_diff`` and ``log_ppl_abs_diff`` (perplexities of rows),
    ``chi2_token`` and ``chi2_seq`` (mean squared ratio - 1). Of ``weights``: ``rollout_is_mean``, ``_max``, ``_min``, ``_std``
    and ``_eff_sample_size`` (mean^2 / mean of squares, a share of the tokens). Of ``kept``: ``rollout_rs_masked_fraction`` and
    ``rollout_rs_seq_masked_fraction`` (rows that lost a token). Rows without a token are left out (verl counts them).

    Returns:
        Names behind ``rollout_corr/``; none if there is no token.
    """
    sampled = mask != 0
    if not sampled.any():
        return {}
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask, "token").double()
    rows, tokens = sampled.any(-1), log_ratio[sampled]
    lengths = sampled.sum(-1)[rows]
    training, rollout = (
        -torch.where(sampled, each.detach(), 0.0).double().sum(-1)[rows] / lengths
        for each in (old_log_probs, rollout_log_probs)
    )
    sums = log_ratio.sum(-1)[rows].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    clamped = tokens.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    found = {
        "kl": -tokens.mean(),
        "k3_kl": (tokens.exp() - 1 - tokens).mean(),
        "training_ppl": training.exp().mean(),
        "rollout_ppl": rollout.exp().mean(),
        "ppl_ratio": (training - rollout).exp().mean(),
        "log_ppl_diff": (training - rollout).mean(),
        "log_ppl_abs_diff": (training - rollout).abs().mean(),
        "chi2_token": (2 * clamped).exp().mean() - 1,
        "chi2_seq": (2 * sums).exp().mean() - 1,
    }
    if weights is not None:
        chosen = weights[sampled].double()
        found |= {
            "rollout_is_mean": chosen.mean(),
            "rollout_is_max": chosen.max(),
            "rollout_is_min": chosen.min(),
            "rollout_is_std": chosen.std(correction=0),
            "rollout_is_eff_sample_size": chosen.mean() ** 2 / chosen.square().mean().clamp(min=1e-12),
        }
    if kept is not None:
        rejected = sampled & (kept == 0)
        found |= {
            "rollout_rs_masked_fraction": rejected[sampled].double().mean(),
            "rollout_rs_seq_masked_fraction": rejected.any(-1)[rows].double().mean(),
        }
    return {f"rollout_corr/{name}": float(value) for name, value in found.items()}


def check_limit(limit: float | Bounds) -> None:
    if isinstance(limit, tuple):
        check_bounds(limit, "correction_limit")
    elif not limit > 1:
        raise InvalidConfig(f"correction_limit={limit}: must be above 1, or two bounds around 1")


def check_bounds(bounds: Bounds, name: str = "rejection_bounds") -> None:
    if not 0 <= bounds[0] <= 1 <= bounds[1]:
        raise InvalidConfig(f"{name}={bounds}: must be bounds of a ratio, from 0 to 1 and from 1 up")


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: Correction) -> Tensor:
    """(B, R): that of the token, or of its response; 0 outside of the mask."""
    sampled = mask != 0
    if level == "none":
        return torch.zeros_like(old_log_probs)
    log_ratio = torch.where(sampled, old_log_probs.detach() - rollout_log_probs, 0.0)
    if level == "token":
        return log_ratio
    whole = log_ratio.sum(-1, keepdim=True)
    if level == "geometric":
        whole = whole / sampled.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(sampled, whole, 0.0)
