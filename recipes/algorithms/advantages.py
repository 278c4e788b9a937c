"""Advantages: how much better a response, or a token of it, did than expected.

Dimension letters: B rows, R response tokens. All are functions of the whole batch, without gradient, and zero where
``response_mask`` is.

| function | baseline | an advantage for each | paper |
|---|---|---|---|
| `group_advantage` | the mean of the row's group | row | GRPO, Dr. GRPO |
| `leave_one_out_advantage` | the mean of the others in the group | row | RLOO |
| `length_weighted_advantage` | the mean of the row's group, weighted by length | row | OPO |
| `greedy_baseline_advantage` | the score of the greedy response | token | ReMax |
| `reinforce_plus_plus` | the mean of the batch | token | REINFORCE++ |
| `reinforce_plus_plus_baseline` | the mean of the row's group, then that of the batch | row | REINFORCE++ |
| `gae` | the critic's values | token | GAE |
"""

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
    """Group-relative advantage: a response against all responses to the same prompt, itself included.

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
    centred, size = _centred(token_level_rewards, group, response_mask)
    if normalise_std:
        variance = torch.zeros_like(centred).index_add(0, group, centred.square()) / (size - 1).clamp(min=1)
        centred = torch.where(centred == 0, 0.0, centred / (variance.sqrt()[group] + eps))
    return _spread(centred, response_mask)


def leave_one_out_advantage(token_level_rewards: Tensor, uid: Iterable[Hashable], response_mask: Tensor) -> Tensor:
    """RLOO: a response against the mean of the other responses to the same prompt (arXiv:2402.14740).

    With score r_i = the sum of a row's token-level rewards and the n rows of its group,

        A_i = r_i - sum(r_j, j != i) / (n - 1) = n / (n - 1) * (r_i - mean(r))

    the same for each of the row's sampled tokens, so `group_advantage` without deviation, larger by n / (n - 1).

    Deviations: those of `group_advantage` (a group of one gets 0; rows without a sampled token count nowhere).

    Args, returns, raises: as `group_advantage`.

    >>> rewards, mask = torch.tensor([[1.0], [0.0], [0.5]]), torch.ones(3, 1)
    >>> leave_one_out_advantage(rewards, ["a", "a", "a"], mask).squeeze(1)
    tensor([ 0.7500, -0.7500,  0.0000])
    """
    group = _group_index(uid, token_level_rewards, response_mask)
    centred, size = _centred(token_level_rewards, group, response_mask)
    return _spread(centred * (size / (size - 1).clamp(min=1))[group], response_mask)


def length_weighted_advantage(token_level_rewards: Tensor, uid: Iterable[Hashable], response_mask: Tensor) -> Tensor:
    """OPO: a response against the mean of its group weighted by length, which is the baseline of least variance where a
    gradient's norm grows with the length of the response (arXiv:2505.23585, section 3).

    With score r_i = the sum of a row's token-level rewards and l_i its sampled tokens,

        A_i = r_i - sum(l_j r_j) / sum(l_j)    over the rows j of its group, itself included

    the same for each of the row's sampled tokens.

    Deviations: those of `group_advantage` (a group of one gets 0, in verl its score; rows without a sampled token count nowhere).

    Args, returns, raises: as `group_advantage`.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> length_weighted_advantage(rewards, ["a", "a"], mask)
    tensor([[ 0.3333,  0.3333],
            [-0.6667,  0.0000]])
    """
    group = _group_index(uid, token_level_rewards, response_mask)
    lengths = (response_mask != 0).sum(-1).double()
    centred, size = _centred(token_level_rewards, group, response_mask)
    total = torch.zeros_like(centred).index_add(0, group, lengths)
    weighted = torch.zeros_like(centred).index_add(0, group, lengths * centred) / total.clamp(min=1)
    return _spread(torch.where((lengths > 0) & (size[group] > 1), centred - weighted[group], 0.0), response_mask)


def greedy_baseline_advantage(token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor) -> Tensor:
    """ReMax: the rewards to come less the score of the greedy response to the same prompt (arXiv:2310.10505, algorithm 1).

        A_t = sum(r_k, k = t .. T) - b

    over a row's sampled tokens t = 0 .. T. The baseline is a score without the KL penalty that rewards may hold, as in verl.

    Args:
        token_level_rewards: (B, R) float.
        reward_baselines: (B,) numbers, b: the score of the greedy response to the row's prompt.
        response_mask: (B, R) of any dtype, not zero where the policy sampled the token.

    Returns:
        (B, R) float32, zero where the mask is.

    Raises:
        RowCountMismatch: the three disagree in rows or shape.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.5, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> greedy_baseline_advantage(rewards, torch.tensor([0.25, 1.0]), mask)
    tensor([[ 0.7500,  0.7500],
            [-0.5000,  0.0000]])
    """
    baselines = torch.as_tensor(reward_baselines, dtype=torch.float32)
    if baselines.shape != token_level_rewards.shape[:1]:
        raise RowCountMismatch(f"{tuple(baselines.shape)} baselines for rewards {tuple(token_level_rewards.shape)}")
    _same_shape(token_level_rewards, response_mask)
    returns, _ = gae(token_level_rewards, torch.zeros_like(token_level_rewards), response_mask)
    return torch.where(response_mask != 0, returns - baselines.to(returns.device)[:, None], 0.0)


def reinforce_plus_plus(token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """REINFORCE++: the discounted rewards to come, whitened over all sampled tokens of the batch (arXiv:2501.03262).

        G_t = sum(gamma^(k - t) r_k, k = t .. T),    A = whiten(G)

    over a row's sampled tokens t = 0 .. T; it is `gae` with lam = 1 where all values are zero. The paper's KL term is part
    of the rewards, see `recipes.algorithms.kl.penalised_rewards`.

    Args, returns, raises: as `gae` and `whiten`.

    >>> reinforce_plus_plus(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2))
    tensor([[ 0.8660,  0.8660],
            [-0.8660, -0.8660]])
    """
    returns, _ = gae(token_level_rewards, torch.zeros_like(token_level_rewards), response_mask, gamma, lam=1.0)
    return whiten(returns, response_mask)


def reinforce_plus_plus_baseline(token_level_rewards: Tensor, uid: Iterable[Hashable], response_mask: Tensor) -> Tensor:
    """REINFORCE++ with baseline: scores minus their group's mean, whitened over all sampled tokens of the batch.

    arXiv:2501.03262, its variant for several samples a prompt: the deviation is that of the batch, not of the group as in
    GRPO, so that a group with almost equal scores is not blown up.

    Args, returns, raises: as `group_advantage`, whose deviations hold here too.

    >>> rewards, mask = torch.tensor([[1.0], [0.0], [3.0], [3.0]]), torch.ones(4, 1)
    >>> reinforce_plus_plus_baseline(rewards, ["a", "a", "b", "b"], mask).squeeze(1)
    tensor([ 1.2247, -1.2247,  0.0000,  0.0000])
    """
    return whiten(group_advantage(token_level_rewards, uid, response_mask, normalise_std=False), response_mask)


def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), and the returns that the critic learns.

    Over a row's sampled tokens t = 0 .. T, with V_t the value of the state before token t is sampled,

        delta_t = r_t + gamma V_(t+1) - V_t,    V_(T+1) = 0
        A_t = delta_t + gamma lam A_(t+1),      A_(T+1) = 0
        returns_t = A_t + V_t

    Tokens that the policy did not sample (observations between turns) are passed over as if they were not there: the
    next sampled token is the next state, and reward and value on one of them, NaN even, are not seen. The last sampled
    token ends the episode, also where the response was cut at its maximal length. All of that as in verl, which also
    whitens the advantages here; see `whiten`.

    Args:
        token_level_rewards, values: (B, R) float.
        response_mask: (B, R) of any dtype, not zero where the policy sampled the token.
        gamma: discount, from 0 to 1.
        lam: 0 trusts the critic alone, 1 the rewards alone.

    Returns:
        advantages and returns, (B, R) float32 each, zero where the mask is.

    Raises:
        RowCountMismatch: the three differ in shape.

    >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.8]])
    >>> gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=0.5)
    (tensor([[0.2500, 0.3000, 0.2000]]), tensor([[0.7500, 0.9000, 1.0000]]))
    """
    _same_shape(token_level_rewards, response_mask, values=values)
    sampled = response_mask != 0
    rewards, old = (torch.where(sampled, each.detach().float(), 0.0) for each in (token_level_rewards, values))
    advantages = torch.zeros_like(rewards)
    following = next_value = rewards.new_zeros(rewards.shape[0])  # A and V of the next sampled token
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - old[:, t]
        following = torch.where(sampled[:, t], delta + gamma * lam * following, following)
        next_value = torch.where(sampled[:, t], old[:, t], next_value)
        advantages[:, t] = torch.where(sampled[:, t], following, 0.0)
    return advantages, advantages + old


def whiten(values: Tensor, response_mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shifts and scales so that mean and variance over the mask are 0 and 1: (x - mean) / sqrt(variance + eps).

    With Bessel's correction, as verl's ``masked_whiten``, and in float64. Equal values give exactly zero. Deviation: so
    does a single one (verl refuses it), and masked places are zero.

    Args:
        values: (B, R) float.
        response_mask: (B, R) of any dtype; places where it is zero have no part in this.

    Returns:
        (B, R) float32, zero where the mask is.

    Raises:
        RowCountMismatch: the two differ in shape.

    >>> whiten(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
    tensor([[-0.7071,  0.7071,  0.0000]])
    """
    _same_shape(values, response_mask)
    kept = response_mask != 0
    chosen = values.detach().double()[kept]
    if not len(chosen):
        return torch.zeros_like(values, dtype=torch.float32)
    offsets = chosen - chosen.min()
    centred = offsets - offsets.mean()
    variance = centred.square().sum() / max(len(chosen) - 1, 1)
    return torch.zeros_like(values, dtype=torch.float32).masked_scatter(
        kept, (centred / (variance + eps).sqrt()).float()
    )


def _centred(rewards: Tensor, group: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (B,) float64 minus the mean of their group, and the size of each group (B,), of which the first entries are in use.

    Rows without a sampled token, and groups of one, are 0.
    """
    counts = (mask != 0).any(-1).double()
    scores = torch.where(counts > 0, rewards.detach().sum(-1).double(), torch.inf)
    lowest = torch.full_like(scores, torch.inf).scatter_reduce(0, group, scores, "amin")
    offsets = torch.where(counts > 0, scores - lowest[group], 0.0)
    size = torch.zeros_like(scores).index_add(0, group, counts)
    mean = torch.zeros_like(scores).index_add(0, group, offsets) / size.clamp(min=1)
    return torch.where((counts > 0) & (size[group] > 1), offsets - mean[group], 0.0), size


def _spread(scores: Tensor, mask: Tensor) -> Tensor:
    """(B,) to (B, R) float32: a row's number on each of its sampled tokens."""
    return torch.where(mask != 0, scores.reshape(-1, 1), 0.0).float()


def _group_index(uid: Iterable[Hashable], rewards: Tensor, mask: Tensor) -> Tensor:
    """(B,) int64: 0 for the first uid met, 1 for the next new one, and so on."""
    seen: dict[Hashable, int] = {}
    index = [seen.setdefault(name, len(seen)) for name in uid]
    if rewards.shape != mask.shape or len(index) != rewards.shape[0]:
        raise RowCountMismatch(
            f"rewards {tuple(rewards.shape)}, response_mask {tuple(mask.shape)} and {len(index)} uids disagree"
        )
    return torch.tensor(index, dtype=torch.int64, device=rewards.device)


def _same_shape(first: Tensor, mask: Tensor, **others: Tensor) -> None:
    shapes = {"response_mask": mask, **others}
    if any(each.shape != first.shape for each in shapes.values()):
        told = ", ".join(f"{name} {tuple(each.shape)}" for name, each in shapes.items())
        raise RowCountMismatch(f"{tuple(first.shape)} was expected of all: {told}")
