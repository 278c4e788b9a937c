"""Selection of the tokens that lower the entropy most (Cui et al., "The Entropy Mechanism of RL", arXiv:2505.22617, section 4).

An optimizer step lowers the entropy by about the covariance of log-probs and advantages over the sampled tokens of a batch.
The contribution of a token is

    c_t = (log_probs_t - mean(log_probs)) (advantages_t - mean(advantages))

which is high for likely tokens of good responses and for unlikely tokens of bad ones. Both functions take a whole batch before
its update, so that the selection does not depend on how the batch is split. Deviations: the log-probs are those before the
first optimizer step of the batch (verl: before each step, for each micro-batch), and clipped tokens are not excluded (verl
excludes them).

Dimension letters: B rows, R response tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def random_high_covariance(
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cov_ratio: float = 2e-4,
    cov_bounds: tuple[float, float] = (1.0, 5.0),
    seed: int | Sequence[int] = 0,
) -> Tensor:
    """Clip-Cov: draws a share ``cov_ratio`` of the tokens, at least one, from those with low < c_t < high.

    Args:
        old_log_probs, advantages: (B, R) float.
        response_mask: (B, R) of any dtype, nonzero where the policy sampled the token.
        cov_ratio: share of the sampled tokens.
        cov_bounds: low and high.
        seed: seed of the draw.

    Returns:
        (B, R) bool, with fewer tokens if fewer are within the bounds.

    >>> log_probs, advantages = torch.tensor([[-1.0, -3.0, -2.0]]), torch.tensor([[2.0, -2.0, 0.0]])
    >>> random_high_covariance(log_probs, advantages, torch.ones(1, 3), 0.5, (1.0, 5.0), seed=0)
    tensor([[ True, False, False]])
    """
    covariance, sampled = _covariances(old_log_probs, advantages, response_mask), response_mask != 0
    within = (sampled & (covariance > cov_bounds[0]) & (covariance < cov_bounds[1])).flatten().nonzero().squeeze(1)
    count = min(max(int(cov_ratio * int(sampled.sum())), 1), len(within))
    drawn = np.random.default_rng(seed).permutation(len(within))[:count]
    return _mask_of(within[torch.from_numpy(drawn).to(within.device)], sampled)


def highest_covariance(
    old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, cov_ratio: float = 2e-4
) -> Tensor:
    """KL-Cov: selects the share ``cov_ratio`` of the tokens, at least one, with the highest c_t.

    Args, returns: as `random_high_covariance`.

    >>> log_probs, advantages = torch.tensor([[-1.0, -3.0, -2.0]]), torch.tensor([[2.0, -2.5, 0.5]])
    >>> highest_covariance(log_probs, advantages, torch.ones(1, 3), 0.5)
    tensor([[False,  True, False]])
    """
    sampled = response_mask != 0
    tokens = int(sampled.sum())
    if not tokens:
        return sampled
    covariance = _covariances(old_log_probs, advantages, response_mask).masked_fill(~sampled, -torch.inf)
    return _mask_of(covariance.flatten().topk(max(int(cov_ratio * tokens), 1)).indices, sampled)


def _covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The contributions c_t, (B, R) float64; 0 outside the mask."""
    sampled = mask != 0
    centred = []
    for values in (log_probs, advantages):
        kept = torch.where(sampled, values.detach(), 0.0).double()
        centred.append(torch.where(sampled, kept - kept.sum() / sampled.sum().clamp(min=1), 0.0))
    return centred[0] * centred[1]


def _mask_of(indices: Tensor, like: Tensor) -> Tensor:
    """A mask that is True at the flat ``indices``: (B, R) bool, shaped ``like`` the other."""
    mask = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    mask[indices] = True
    return mask.view(like.shape)
