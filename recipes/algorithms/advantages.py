"""Advantages: how much better a response, or a token of it, is than its baseline.

Dimension letters: B rows, R response tokens. All functions take a whole batch, return tensors without gradient, and return
zero where ``response_mask`` is zero.

| function | baseline | one advantage for each | paper |
|---|---|---|---|
| `group_advantage` | the mean of the row's group | row | GRPO, Dr. GRPO |
| `leave_one_out_advantage` | the mean of the other rows of the group | row | RLOO |
| `length_weighted_advantage` | the length-weighted mean of the row's group | row | OPO |
| `greedy_baseline_advantage` | the score of the greedy response | token | ReMax |
| `reinforce_plus_plus` | the mean of the batch | token | REINFORCE++ |
| `reinforce_plus_plus_baseline` | the mean of the row's group, then the mean of the batch | row | REINFORCE++ |
| `gae` | the critic's values | token | GAE |

`reverse_kl_advantage` of on-policy distillation is in `recipes.algorithms.kl`, those over turns are in
`recipes.algorithms.turn_advantages`. `informative_rows` finds the groups whose advantages are not all zero.

The rows of a trajectory, see `RolloutWorker.play`, are one response: it has one score, counts once in its group, and its tokens
follow each other in the order of its rows. Without ``trajectory`` each row is a response of its own.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidColumn, RowCountMismatch

Labels = Iterable[Hashable]
"""A label for each row, equal for rows that belong together."""


def group_advantage(
    token_level_rewards: Tensor,
    uid: Labels,
    response_mask: Tensor,
    normalise_std: bool = True,
    eps: float = 1e-6,
    trajectory: Labels | None = None,
) -> Tensor:
    """GRPO: the score of a response relative to all responses to the same prompt, itself included.

    With the score r_i = the sum of a row's token-level rewards, and the group G_i = the rows that share its ``uid``,

        A_i = (r_i - mean(r[G_i])) / (std(r[G_i]) + eps)       GRPO, arXiv:2402.03300, section 4.1.2
        A_i =  r_i - mean(r[G_i])                              Dr. GRPO, arXiv:2503.20783, ``normalise_std=False``

    for each sampled token of the row. ``std`` uses Bessel's correction, as in verl and TRL.

    Scores are first shifted by the lowest of their group, in float64, so that equal scores give exactly zero.

    Deviations: a group of one row gets 0 (verl: the score itself). A row without sampled tokens gets 0 and does not enter
    the mean and standard deviation of its group, so inert rows change nothing (verl counts them).

    Args:
        token_level_rewards: (B, R) float.
        uid: B hashables, equal for the samples of one prompt.
        response_mask: (B, R) of any dtype, nonzero where the policy sampled the token.
        normalise_std: whether to divide by the standard deviation of the group.
        eps: added to the standard deviation; verl's, while TRL's is 1e-4.
        trajectory: B hashables, equal for the rows of one response.

    Returns:
        (B, R) float32, without gradient.

    Raises:
        RowCountMismatch: the shapes, or the number of rows, differ.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    >>> mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    >>> group_advantage(rewards, ["a", "a", "b", "b"], mask, normalise_std=False)
    tensor([[ 0.5000,  0.5000],
            [-0.5000,  0.0000],
            [ 0.0000,  0.0000],
            [ 0.0000,  0.0000]])
    """
    responses = _Responses.find(token_level_rewards, uid, response_mask, trajectory)
    group, (centred, size) = responses.group, responses.centred()
    if normalise_std:
        variance = torch.zeros_like(centred).index_add(0, group, centred.square()) / (size - 1).clamp(min=1)
        centred = torch.where(centred == 0, 0.0, centred / (variance.sqrt()[group] + eps))
    return _spread(centred[responses.of], response_mask)


dr_grpo_advantage = partial(group_advantage, normalise_std=False)
"""Dr. GRPO: the score of a response minus the mean of all responses to the same prompt."""


def leave_one_out_advantage(
    token_level_rewards: Tensor, uid: Labels, response_mask: Tensor, trajectory: Labels | None = None
) -> Tensor:
    """RLOO: the score of a response minus the mean score of the other responses to the same prompt (arXiv:2402.14740).

    With the score r_i = the sum of a row's token-level rewards, and n rows in its group,

        A_i = r_i - sum(r_j, j != i) / (n - 1) = n / (n - 1) * (r_i - mean(r))

    for each sampled token of the row. This is `group_advantage` without ``normalise_std``, times n / (n - 1).

    Deviations: as in `group_advantage`.

    Args, returns, raises: as `group_advantage`.

    >>> rewards, mask = torch.tensor([[1.0], [0.0], [0.5]]), torch.ones(3, 1)
    >>> leave_one_out_advantage(rewards, ["a", "a", "a"], mask).squeeze(1)
    tensor([ 0.7500, -0.7500,  0.0000])
    """
    responses = _Responses.find(token_level_rewards, uid, response_mask, trajectory)
    centred, size = responses.centred()
    scaled = centred * (size / (size - 1).clamp(min=1))[responses.group]
    return _spread(scaled[responses.of], response_mask)


def length_weighted_advantage(
    token_level_rewards: Tensor, uid: Labels, response_mask: Tensor, trajectory: Labels | None = None
) -> Tensor:
    """OPO: the score of a response minus the length-weighted mean score of its group (arXiv:2505.23585, section 3).

    This baseline has the least variance if the squared norm of a response's gradient is proportional to its length. With the
    score r_i = the sum of a row's token-level rewards, and its number of sampled tokens l_i,

        A_i = r_i - sum(l_j r_j) / sum(l_j)    over the rows j of its group, itself included

    for each sampled token of the row.

    Deviations: as in `group_advantage`.

    Args, returns, raises: as `group_advantage`.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> length_weighted_advantage(rewards, ["a", "a"], mask)
    tensor([[ 0.3333,  0.3333],
            [-0.6667,  0.0000]])
    """
    responses = _Responses.find(token_level_rewards, uid, response_mask, trajectory)
    group, lengths, (centred, size) = responses.group, responses.lengths, responses.centred()
    total = torch.zeros_like(centred).index_add(0, group, lengths)
    weighted = torch.zeros_like(centred).index_add(0, group, lengths * centred) / total.clamp(min=1)
    found = torch.where((lengths > 0) & (size[group] > 1), centred - weighted[group], 0.0)
    return _spread(found[responses.of], response_mask)


def greedy_baseline_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, trajectory: Labels | None = None
) -> Tensor:
    """ReMax: the reward-to-go minus the score of the greedy response to the same prompt (arXiv:2310.10505, algorithm 1).

        A_t = sum(r_k, k = t .. T) - b

    for the sampled tokens t = 0 .. T of a row. The baseline b does not include the KL penalty that the rewards may include,
    as in verl.

    Args:
        token_level_rewards: (B, R) float.
        reward_baselines: (B,), the score b of the greedy response to the row's prompt.
        response_mask: (B, R) of any dtype, nonzero where the policy sampled the token.
        trajectory: B hashables, equal for the rows of one response.

    Returns:
        (B, R) float32, zero where the mask is zero.

    Raises:
        RowCountMismatch: the shapes, or the number of rows, differ.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.5, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> greedy_baseline_advantage(rewards, torch.tensor([0.25, 1.0]), mask)
    tensor([[ 0.7500,  0.7500],
            [-0.5000,  0.0000]])
    """
    baselines = torch.as_tensor(reward_baselines, dtype=torch.float32)
    if baselines.shape != token_level_rewards.shape[:1]:
        raise RowCountMismatch(f"{tuple(baselines.shape)} baselines for rewards {tuple(token_level_rewards.shape)}")
    _same_shape(response_mask, rewards=token_level_rewards)
    returns, _ = gae(token_level_rewards, torch.zeros_like(token_level_rewards), response_mask, trajectory=trajectory)
    return torch.where(response_mask != 0, returns - baselines.to(returns.device)[:, None], 0.0)


def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0, trajectory: Labels | None = None
) -> Tensor:
    """REINFORCE++: the discounted reward-to-go, whitened over all sampled tokens of the batch (arXiv:2501.03262).

        G_t = sum(gamma^(k - t) r_k, k = t .. T),    A = whiten(G)

    for the sampled tokens t = 0 .. T of a row. G equals `gae` with lam = 1 and all values zero. The KL term of the paper is
    part of the rewards; see `recipes.algorithms.penalties.penalised_rewards`.

    Args, returns, raises: as `gae` and `whiten`.

    >>> reinforce_plus_plus(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2))
    tensor([[ 0.8660,  0.8660],
            [-0.8660, -0.8660]])
    """
    zeros = torch.zeros_like(token_level_rewards)
    returns, _ = gae(token_level_rewards, zeros, response_mask, gamma, lam=1.0, trajectory=trajectory)
    return whiten(returns, response_mask)


def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, uid: Labels, response_mask: Tensor, trajectory: Labels | None = None
) -> Tensor:
    """REINFORCE++ with baseline: scores minus the mean of their group, whitened over all sampled tokens of the batch.

    This is the variant of arXiv:2501.03262 for several samples of each prompt. It divides by the standard deviation of the
    batch and not of the group, so that small differences within a group are not amplified.

    Args, returns, raises, deviations: as `group_advantage`.

    >>> rewards, mask = torch.tensor([[1.0], [0.0], [3.0], [3.0]]), torch.ones(4, 1)
    >>> reinforce_plus_plus_baseline(rewards, ["a", "a", "b", "b"], mask).squeeze(1)
    tensor([ 1.2247, -1.2247,  0.0000,  0.0000])
    """
    centred = group_advantage(token_level_rewards, uid, response_mask, normalise_std=False, trajectory=trajectory)
    return whiten(centred, response_mask)


def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    trajectory: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), and the returns that the critic learns.

    For the sampled tokens t = 0 .. T of a row, with V_t the value of the state before token t is sampled,

        delta_t = r_t + gamma V_(t+1) - V_t,    V_(T+1) = 0
        A_t = delta_t + gamma lam A_(t+1),      A_(T+1) = 0
        returns_t = A_t + V_t

    Tokens that the policy did not sample (observations between turns) are skipped: the next state is that of the next
    sampled token, and rewards and values of skipped tokens are ignored, even if they are NaN. The last sampled token ends
    the episode, even if the response was truncated at the maximum length. All of this follows verl. Deviation: verl also
    whitens the advantages here; see `whiten`.

    Args:
        token_level_rewards, values: (B, R) float.
        response_mask: (B, R) of any dtype, nonzero where the policy sampled the token.
        gamma: discount, from 0 to 1.
        lam: from 0 (one-step errors of the critic) to 1 (the full reward-to-go).
        trajectory: B hashables, equal for the rows of one response, which are in order.

    Returns:
        The advantages and the returns, each (B, R) float32 and zero where the mask is zero.

    Raises:
        RowCountMismatch: the shapes differ.

    >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.8]])
    >>> gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=0.5)
    (tensor([[0.2500, 0.3000, 0.2000]]), tensor([[0.7500, 0.9000, 1.0000]]))
    """
    _same_shape(response_mask, rewards=token_level_rewards, values=values)
    sampled = response_mask != 0
    rewards, values = (torch.where(sampled, each.detach().float(), 0.0) for each in (token_level_rewards, values))
    if trajectory is not None:
        cells, joined = _joined(sampled, trajectory)
        found, _ = gae(rewards.flatten()[cells], values.flatten()[cells], joined, gamma, lam)
        advantages = torch.zeros_like(rewards).flatten().index_put((cells[joined],), found[joined]).view_as(rewards)
        return advantages, advantages + values
    advantages = torch.zeros_like(rewards)
    next_advantage = next_value = rewards.new_zeros(rewards.shape[0])  # of the next sampled token
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(sampled[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(sampled[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(sampled[:, t], next_advantage, 0.0)
    return advantages, advantages + values


def whiten(values: Tensor, response_mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shifts and scales ``values`` to mean 0 and variance 1 over the mask: (x - mean) / sqrt(variance + eps).

    The variance uses Bessel's correction, as in verl's ``masked_whiten``, and float64. Equal values give exactly zero.
    Deviations: a single value gives zero (verl raises an error), and so do values outside the mask.

    Args:
        values: (B, R) float.
        response_mask: (B, R) of any dtype; values where it is zero are ignored.

    Returns:
        (B, R) float32, zero where the mask is zero.

    Raises:
        RowCountMismatch: the shapes differ.

    >>> whiten(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
    tensor([[-0.7071,  0.7071,  0.0000]])
    """
    _same_shape(response_mask, values=values)
    sampled = response_mask != 0
    whitened = torch.zeros_like(values, dtype=torch.float32)
    chosen = values.detach().double()[sampled]
    if not len(chosen):
        return whitened
    offsets = chosen - chosen.min()
    centred = offsets - offsets.mean()
    variance = centred.square().sum() / max(len(chosen) - 1, 1)
    return whitened.masked_scatter(sampled, (centred / (variance + eps).sqrt()).float())


def informative_rows(scores: Sequence[float], uid: Sequence[Hashable]) -> np.ndarray:
    """Selects the rows whose group has different scores: those that DAPO's dynamic sampling keeps (arXiv:2503.14476, eq. 11).

    Args:
        scores: B numbers; in the paper 1 for a correct answer and 0 for a wrong one.
        uid: B hashables, equal for the samples of one prompt.

    Returns:
        (B,) bool.

    Raises:
        RowCountMismatch: the lengths differ.

    >>> informative_rows([1.0, 1.0, 0.0, 1.0], ["a", "a", "b", "b"]).tolist()
    [False, False, True, True]
    """
    uid = _labels(uid)
    if len(scores) != len(uid):
        raise RowCountMismatch(f"{len(scores)} scores, {len(uid)} uids")
    distinct: dict[Hashable, set[float]] = defaultdict(set)
    for name, score in zip(uid, scores, strict=True):
        distinct[name].add(float(score))
    return np.array([len(distinct[name]) > 1 for name in uid], dtype=bool)


@dataclass(frozen=True)
class _Responses:
    """The responses of a batch, E in all: each is a row, or the rows of a trajectory."""

    of: Tensor  # (B,) int64, the response of each row
    group: Tensor  # (E,) int64
    scores: Tensor  # (E,) float64, the sum of the rewards
    lengths: Tensor  # (E,) float64, the number of sampled tokens

    @classmethod
    def find(cls, rewards: Tensor, uid: Labels, mask: Tensor, trajectory: Labels | None) -> "_Responses":
        group, rows = group_index(uid, mask, rewards=rewards), torch.arange(len(rewards), device=rewards.device)
        if trajectory is None:
            of, first = rows, rows
        else:
            of = group_index(trajectory, mask, "trajectories")
            count = int(of.max()) + 1 if len(of) else 0
            first = torch.full((count,), len(rows), device=rewards.device).scatter_reduce(0, of, rows, "amin")
        zeros = torch.zeros(len(first), dtype=torch.float64, device=rewards.device)
        scores = zeros.index_add(0, of, rewards.detach().sum(-1).double())
        return cls(of, group[first], scores, zeros.index_add(0, of, (mask != 0).sum(-1).double()))

    def centred(self) -> tuple[Tensor, Tensor]:
        """Scores minus the mean of their group, (E,) float64, and the number of responses of each group, (E,) with unused
        entries zero.

        Responses without sampled tokens, and groups of one response, get 0.
        """
        group, counts = self.group, (self.lengths > 0).double()
        scores = torch.where(counts > 0, self.scores, torch.inf)
        lowest = torch.full_like(scores, torch.inf).scatter_reduce(0, group, scores, "amin")
        offsets = torch.where(counts > 0, scores - lowest[group], 0.0)
        size = torch.zeros_like(scores).index_add(0, group, counts)
        mean = torch.zeros_like(scores).index_add(0, group, offsets) / size.clamp(min=1)
        return torch.where((counts > 0) & (size[group] > 1), offsets - mean[group], 0.0), size


def _joined(sampled: Tensor, trajectory: Labels) -> tuple[Tensor, Tensor]:
    """The sampled tokens of each of E trajectories in order: (E, T) int64 indices into the flattened (B, R), and (E, T) bool
    where there is one.
    """
    of = group_index(trajectory, sampled, "trajectories")
    row, column = sampled.nonzero(as_tuple=True)
    order = of[row].argsort(stable=True)
    episode, tokens = of[row][order], (row * sampled.shape[1] + column)[order]
    lengths = torch.bincount(episode, minlength=int(of.max()) + 1 if len(of) else 0)
    place = torch.arange(len(episode), device=of.device) - (lengths.cumsum(0) - lengths)[episode]
    shape = len(lengths), int(lengths.max()) if len(lengths) else 0
    cells = torch.zeros(shape, dtype=torch.int64, device=of.device).index_put((episode, place), tokens)
    return cells, torch.arange(shape[1], device=of.device) < lengths[:, None]


def _spread(scores: Tensor, mask: Tensor) -> Tensor:
    """Copies the number of each row to its sampled tokens: (B,) to (B, R) float32."""
    return torch.where(mask != 0, scores.reshape(-1, 1), 0.0).float()


def group_index(labels: Labels, mask: Tensor, what: str = "uids", **others: Tensor) -> Tensor:
    """Numbers the distinct labels of the rows in order of appearance: (B,) int64.

    Args:
        what: the labels are called in the error for another number of them than rows.
        others: tensors (B, R), by name.

    Raises:
        RowCountMismatch: the shapes, or the number of rows, differ.
    """
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(name, len(numbers)) for name in _labels(labels, what)]
    _same_shape(mask, **others)
    if len(index) != len(mask):
        raise RowCountMismatch(f"{len(index)} {what} for {len(mask)} rows")
    return torch.tensor(index, dtype=torch.int64, device=mask.device)


def _labels(labels: Labels, what: str = "uids") -> list[Hashable]:
    """Labels that compare by value; tensors, and the elements of one, do not.

    Raises:
        InvalidColumn: a label has several values.
    """
    found: list[Any] = [each.tolist() if isinstance(each, Tensor | np.ndarray) else each for each in labels]
    for row, each in enumerate(found):
        if not isinstance(each, Hashable):
            raise InvalidColumn(f"{what}: row {row} has {each!r}, and must have one value, such as a text")
    return found


def _same_shape(mask: Tensor, **others: Tensor) -> None:
    if any(each.shape != mask.shape for each in others.values()):
        found = ", ".join(f"{name} {tuple(each.shape)}" for name, each in others.items())
        raise RowCountMismatch(f"response_mask {tuple(mask.shape)} and {found} differ in rows or shape")
