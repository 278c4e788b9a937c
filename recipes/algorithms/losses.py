"""Policy losses per token. The worker masks, aggregates and averages. Dimension letters: B rows, R response tokens."""

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig

LOG_RATIO_LIMIT = 20.0


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, negated, with separate low and high clips and the dual clip.

    With the ratio w = exp(log_probs - old_log_probs), A = advantages, clip = (low, high), c = dual_clip,

        L = max(-A w, -A clamp(w, 1 - low, 1 + high))    PPO, arXiv:1707.06347, eq. 7
                                                         with low < high: DAPO, arXiv:2503.14476, eq. 10
        L = min(L, -A c)  where A < 0                    dual clip, arXiv:1912.09729, eq. 5; off with ``None``

    Deviation: log_probs - old_log_probs is clamped to [-20, 20], as in verl. Outside, and where it is NaN, no gradient
    flows, so log-probs in masked places may be anything once the worker gives those places weight zero.

    Args:
        log_probs: (B, R) float, with gradient.
        old_log_probs: (B, R) float, of the policy before this update.
        advantages: (B, R) float, finite everywhere.
        clip: how far below and above 1 the ratio may pay.
        dual_clip: bound on the ratio where the advantage is negative; above 1.

    Returns:
        The loss (B, R), and metrics by name, each (B, R) without gradient and to be averaged over the mask:
        ``actor/pg_clipfrac`` (1 where the clip is active), ``actor/pg_clipfrac_lower`` (1 where the dual clip is),
        ``actor/ppo_kl`` (k1 estimate of KL(old || new)).

    Raises:
        InvalidConfig: a negative clip, or a dual clip that is not above 1.

    >>> log_probs = torch.tensor([[0.5, 1.5, 4.0]]).log()
    >>> advantages = torch.tensor([[1.0, 1.0, -1.0]])
    >>> loss, metrics = clipped_policy_loss(log_probs, torch.zeros(1, 3), advantages, clip=(0.2, 0.28))
    >>> loss
    tensor([[-0.5000, -1.2800,  3.0000]])
    >>> metrics["actor/pg_clipfrac"], metrics["actor/pg_clipfrac_lower"]
    (tensor([[0., 1., 0.]]), tensor([[0., 0., 1.]]))
    """
    low, high = clip
    if low < 0 or high < 0:
        raise InvalidConfig(f"clip must not be negative, got {clip}")
    if dual_clip is not None and dual_clip <= 1:
        raise InvalidConfig(f"dual_clip must be above 1, got {dual_clip}")

    log_ratio = torch.clamp(log_probs - old_log_probs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(unclipped, clipped)
    lower = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        lower = (advantages < 0) & (loss > bound)
        loss = torch.where(lower, bound, loss)
    metrics = {
        "actor/pg_clipfrac": (clipped > unclipped).float(),
        "actor/pg_clipfrac_lower": lower.float(),
        "actor/ppo_kl": -log_ratio.detach(),
    }
    return loss, metrics
