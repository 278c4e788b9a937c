"""Advantages: how much better a response did than expected. Dimension letters: B rows, R response tokens."""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from dataproto.errors import RowCountMismatch


def group_advantage(
    token_level_rewards: Tensor,
    uid: Iterable[Hashable],
    response_mask: Tensor,
    normalise_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantage: a response against the other responses to the same prompt.

    With score r_i = the sum of a row's token-level rewards and G_i the rows that share its ``uid``,

        A_i = (r_i - mean(r[G_i])) / (std(r[G_i]) + eps)       GRPO, arXiv:2402.03300, section 4.1.2
        A_i =  r_i - mean(r[G_i])                              Dr. GRPO, arXiv:2503.20783, ``normalise_std=False``

    the same for each of the row's sampled tokens, zero elsewhere. ``std`` has Bessel's correction, as in verl and TRL.

    Scores are centred on the group's lowest first, in float64: equal scores give exactly zero whatever their value.

    Deviations: a group of one says nothing relative and gets 0 (verl: the score itself). A row without a sampled token
    gets 0 and stays out of its group's mean and deviation, so inert rows change nothing (verl counts them).

    Args:
        token_level_rewards: (B, R) float.
        uid: B hashables, equal for the samples of one prompt.
        response_mask: (B, R) of any dtype, not zero where the policy sampled the token.
        normalise_std: divide by the group's standard deviation.
        eps: added to the standard deviation.

    Returns:
        (B, R) float32, without gradient.

    Raises:
        RowCountMismatch: the three disagree in rows or shape.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    >>> mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    >>> group_advantage(rewards, ["a", "a", "b", "b"], mask, normalise_std=False)
    tensor([[ 0.5000,  0.5000],
            [-0.5000,  0.0000],
            [ 0.0000,  0.0000],
            [ 0.0000,  0.0000]])
    """
    group = _group_index(uid, token_level_rewards, response_mask)
    sampled = response_mask != 0
    counts = sampled.any(-1).double()
    scores = torch.where(counts > 0, token_level_rewards.detach().sum(-1).double(), torch.inf)
    rows = scores.shape[0]

    lowest = torch.full_like(scores, torch.inf).scatter_reduce(0, group, scores, "amin")
    offsets = torch.where(counts > 0, scores - lowest[group], 0.0)
    size = torch.zeros_like(scores).index_add(0, group, counts)
    mean = torch.zeros_like(scores).index_add(0, group, offsets) / size.clamp(min=1)
    centred = torch.where((counts > 0) & (size[group] > 1), offsets - mean[group], 0.0)
    if normalise_std:
        variance = torch.zeros_like(scores).index_add(0, group, centred.square()) / (size - 1).clamp(min=1)
        centred = torch.where(centred == 0, 0.0, centred / (variance.sqrt()[group] + eps))
    return torch.where(sampled, centred.reshape(rows, 1), 0.0).float()


def _group_index(uid: Iterable[Hashable], rewards: Tensor, mask: Tensor) -> Tensor:
    """(B,) int64: 0 for the first uid met, 1 for the next new one, and so on."""
    seen: dict[Hashable, int] = {}
    index = [seen.setdefault(name, len(seen)) for name in uid]
    if rewards.shape != mask.shape or len(index) != rewards.shape[0]:
        raise RowCountMismatch(
            f"rewards {tuple(rewards.shape)}, response_mask {tuple(mask.shape)} and {len(index)} uids disagree"
        )
    return torch.tensor(index, dtype=torch.int64, device=rewards.device)
