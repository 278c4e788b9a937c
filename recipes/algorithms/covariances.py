"""Tokens whose gradient takes much entropy away (Cui et al., "The Entropy Mechanism of RL", arXiv:2505.22617, section 4).

A step lowers the entropy by about the covariance of log-probs and advantages: likely tokens of good responses, and unlikely ones
of bad responses. Over the T sampled tokens of a batch, a token has the share

    c_t = (log_probs_t - mean(log_probs)) (advantages_t - mean(advantages))

Both functions look at a whole batch before its update, so that the choice does not depend on how it is split. Deviation: so
``log_probs`` are those of before the first optimizer step of a batch (verl: those of each step, of each micro-batch alone), and
no token has been clipped yet (verl leaves those out).

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
    cov_ratio: float,
    cov_bounds: tuple[float, float],
    seed: int | Sequence[int],
) -> Tensor:
    """Clip-Cov's choice: ``cov_ratio`` of the tokens, at least one, drawn from those with low < c_t < high.

    Args:
        old_log_probs, advantages: (B, R) float.
        response_mask: (B, R) of any dtype, not zero where the policy sampled the token.
        seed: of the draw.

    Returns:
        (B, R) bool; fewer tokens if there are not so many within the bounds.

    >>> log_probs, advantages = torch.tensor([[-1.0, -3.0, -2.0]]), torch.tensor([[2.0, -2.0, 0.0]])
    >>> random_high_covariance(log_probs, advantages, torch.ones(1, 3), 0.5, (1.0, 5.0), seed=0)
    tensor([[ True, False, False]])
    """
    covariance, sampled = _covariances(old_log_probs, advantages, response_mask), response_mask != 0
    within = (sampled & (covariance > cov_bounds[0]) & (covariance < cov_bounds[1])).flatten().nonzero().squeeze(1)
    count = min(max(int(cov_ratio * int(sampled.sum())), 1), len(within))
    drawn = np.random.default_rng(seed).permutation(len(within))[:count]
    return _marked(within[torch.from_numpy(drawn).to(within.device)], sampled)


def highest_covariance(old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, cov_ratio: float) -> Tensor:
    """KL-Cov's choice: the ``cov_ratio`` of the tokens, at least one, with the highest c_t.

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
    return _marked(covariance.flatten().topk(max(int(cov_ratio * tokens), 1)).indices, sampled)


def _covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(B, R) float64, 0 outside of the mask."""
    sampled = mask != 0
    centred = []
    for values in (log_probs, advantages):
        kept = torch.where(sampled, values.detach(), 0.0).double()
        centred.append(torch.where(sampled, kept - kept.sum() / sampled.sum().clamp(min=1), 0.0))
    return centred[0] * centred[1]


def _marked(places: Tensor, like: Tensor) -> Tensor:
    """(B, R) bool: True at the flat indices."""
    marked = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    marked[places] = True
    return marked.view(like.shape)
