"""Penalties in the rewards: for distance from the reference policy, and for responses that are too long.

Dimension letters: B rows, R response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataproto.errors import InvalidConfig

if TYPE_CHECKING:  # options are read without torch
    from torch import Tensor


def penalised_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, coef: float) -> tuple[Tensor, float]:
    """Subtracts ``coef`` times the KL estimate of each sampled token from its reward (arXiv:1909.08593, eq. 2).

    The mean estimate is the mean over rows of the mean over a row's tokens, as in verl. Deviation: rows without sampled
    tokens are left out of it.

    Args:
        scores: (B, R) float, token-level.
        kl: (B, R) float, estimates for the policy that sampled; see `recipes.algorithms.kl`. Ignored where the mask is zero.
        response_mask: (B, R) of any dtype, nonzero where the policy sampled the token.
        coef: weight of the penalty.

    Returns:
        The rewards, (B, R) float32 without gradient, and the mean estimate, which is 0 if nothing was sampled.

    >>> import torch
    >>> rewards, mean = penalised_rewards(
    ...     torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, -0.1]]), torch.ones(1, 2), coef=0.1
    ... )
    >>> rewards, round(mean, 3)
    (tensor([[-0.0500,  1.0100]]), 0.2)
    """
    sampled = response_mask != 0
    estimates = kl.detach().float().where(sampled, 0.0)
    lengths = sampled.sum(-1)
    mean = (estimates.double().sum(-1) / lengths.clamp(min=1)).sum() / (lengths > 0).sum().clamp(min=1)
    return scores.detach().float() - coef * estimates, float(mean)


def overlong_penalty(response_mask: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft penalty for responses near the maximum length (arXiv:2503.14476, section 3.4, eq. 13).

    It is 0 for rows of at most ``max_length - buffer`` sampled tokens, and falls linearly to -1 at ``max_length``.

    Args:
        response_mask: (B, R) of any dtype, nonzero where the policy sampled the token.
        max_length: the length at which responses are truncated, in tokens.
        buffer: length of the interval with a penalty, in tokens.

    Returns:
        (B,) float32 from -1 to 0.

    Raises:
        InvalidConfig: ``buffer`` is not between 1 and ``max_length``.

    >>> import torch
    >>> overlong_penalty(torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]), max_length=4, buffer=2)
    tensor([ 0.0000, -0.5000, -1.0000])
    """
    if not 1 <= buffer <= max_length:
        raise InvalidConfig(f"the overlong buffer of {buffer} tokens must be from 1 to the maximum length {max_length}")
    excess = (response_mask != 0).sum(-1) - (max_length - buffer)
    return 0.0 - (excess / buffer).clamp(0.0, 1.0).float()
