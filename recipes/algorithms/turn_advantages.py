"""Advantages over turns: how much better a turn of an episode is than its baseline. See `RolloutWorker.play`.

Dimension letters: B rows, R response tokens, N turns, E episodes, T turns of the longest episode. A turn is the sampled tokens
of a ``trajectory`` with the same number in ``turn``; its reward r_k is the sum of their token-level rewards. All tokens of a turn
get the turn's advantage, except with `bi_level_gae`. As in `recipes.algorithms.advantages`, results are without gradient, zero
where ``response_mask`` is zero, and rows without sampled tokens enter no baseline.

| function | baseline | paper |
|---|---|---|
| `gigpo_advantage` | the mean of the episode's group, and the mean of the turns that begin in the same state | GiGPO |
| `turn_returns_advantage` | the mean of the batch | REINFORCE++, over turns |
| `turn_gae` | the critic's value of the state before the turn | GAE over turns |
| `bi_level_gae` | the critic's values, over turns and within a turn | Bi-Level GAE of VAGEN |

`uncut_tokens` leaves out the episodes that a limit cut. A baseline for whole episodes is any function of
`recipes.algorithms.advantages`.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataproto.errors import RowCountMismatch
from recipes.algorithms.advantages import Labels, gae, group_advantage, group_index, whiten

CUT = ("turns", "tokens", "length", "clock")
"""The values of ``end_reason`` of an episode that a limit cut."""


def gigpo_advantage(
    token_level_rewards: Tensor,
    uid: Sequence[Hashable],
    response_mask: Tensor,
    turn: Tensor,
    states: Sequence[Sequence[Hashable]],
    trajectory: Sequence[Hashable],
    turn_gamma: float = 0.95,
    step_weight: float = 1.0,
    normalise_std: bool = True,
) -> Tensor:
    """GiGPO: episodes are compared with those of their group, and turns with those that begin in the same state of the group.

    For turn k of episode i, with the score R_i of the episode and the discounted return G_(i,k) = sum(turn_gamma^(j - k) r_(i,j),
    j >= k) of the turn (arXiv:2505.10978, section 4),

        A_(i,k) = A_E(i) + step_weight * A_S(i, k)
        A_E(i) = (R_i - mean(R of the group)) / std(R of the group)
        A_S(i,k) = (G_(i,k) - mean(G of the anchor group)) / std(G of the anchor group)

    The anchor group of a turn is all turns of its group's episodes that begin in the same state; a turn can be the only one of
    its anchor group, and then has A_S = 0. A_E is `group_advantage`. Without ``normalise_std`` nothing is divided, the other
    normalisation of the paper.

    Deviation: an episode counts once in its group's mean, as in the paper (verl-agent's code by default counts it once for each
    of its turns).

    Args:
        token_level_rewards, response_mask: (B, R).
        uid, trajectory: B hashables, equal for the rows of a group, and for those of an episode.
        turn: (B, R) int64, the number of each sampled token's turn in its episode, from 1.
        states: for each row the state before each turn of its episode, such as a digest of the observation.

    Returns:
        (B, R) float32.

    Raises:
        RowCountMismatch: the numbers of rows differ, or a row has fewer states than turns; names the row.

    >>> rewards, mask, turn = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2), torch.tensor([[1, 2], [1, 2]])
    >>> states = [["start", "door"], ["start", "wall"]]
    >>> gigpo_advantage(rewards, ["a", "a"], mask, turn, states, [0, 1], turn_gamma=0.5, normalise_std=False)
    tensor([[ 0.7500,  0.5000],
            [-0.7500, -0.5000]])
    """
    whole = group_advantage(token_level_rewards, uid, response_mask, normalise_std, trajectory=trajectory)
    turns = _Turns.find(response_mask, turn, trajectory)
    names = turns.states(uid, states)
    returns = turns.returns(token_level_rewards, turn_gamma)[:, None]
    steps = group_advantage(returns, names, torch.ones_like(returns), normalise_std)
    return whole + step_weight * turns.spread(steps[:, 0])


def turn_returns_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, turn: Tensor, trajectory: Labels, turn_gamma: float = 1.0
) -> Tensor:
    """The discounted return of each turn, whitened over the sampled tokens of the batch: `reinforce_plus_plus` over turns.

        G_k = sum(turn_gamma^(j - k) r_j, j >= k),    A = whiten(G)

    Rewards are discounted by the turn and not by the token, so that long answers are not.

    Args, returns, raises: as `gigpo_advantage`.

    >>> rewards, turn = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([[1, 1, 2], [1, 1, 2]])
    >>> turn_returns_advantage(rewards, torch.ones(2, 3), turn, [0, 1], turn_gamma=1.0)
    tensor([[ 0.9129,  0.9129,  0.9129],
            [-0.9129, -0.9129, -0.9129]])
    """
    turns = _Turns.find(response_mask, turn, trajectory)
    return whiten(turns.spread(turns.returns(token_level_rewards, turn_gamma)), response_mask)


def turn_gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turn: Tensor,
    trajectory: Sequence[Hashable],
    turn_gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with a turn as one action.

    With V_k the value of the state before the first token of turn k = 1 .. K of an episode,

        delta_k = r_k + turn_gamma V_(k+1) - V_k,    V_(K+1) = 0
        A_k = delta_k + turn_gamma lam A_(k+1),      A_(K+1) = 0
        returns_k = A_k + V_k

    for all tokens of the turn: the gradient of log p(turn) is the sum over its tokens (``turn_level_gae`` of VAGEN's code; the
    estimator is that of arXiv:1506.02438, eq. 16). Deviation: there the critic learns the return at the turn's first token only;
    here at all of them, whose expected return it is too.

    Args:
        values: (B, R) float, of a critic.
        lam: from 0 (one-step errors of the critic) to 1 (the full return).
        others: as `gigpo_advantage`.

    Returns:
        The advantages and the returns, each (B, R) float32.

    >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.8]])
    >>> turn_gae(rewards, values, torch.ones(1, 3), torch.tensor([[1, 1, 2]]), [0], turn_gamma=1.0, lam=0.5)
    (tensor([[0.4000, 0.4000, 0.2000]]), tensor([[0.9000, 0.9000, 1.0000]]))
    """
    turns = _Turns.find(response_mask, turn, trajectory)
    rewards, before = turns.rewards(token_level_rewards), turns.at(turns.first, values)
    advantages, returns = _gae_at(turns.cells, turns.shape, rewards, before, turn_gamma, lam)
    return turns.spread(advantages), turns.spread(returns)


def bi_level_gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turn: Tensor,
    trajectory: Sequence[Hashable],
    turn_gamma: float = 0.99,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Bi-Level GAE of VAGEN (arXiv:2510.16907, section 4.2, as its code computes it): over turns, then within each turn.

    With V_t the value before token t, and e_k the last token of turn k = 1 .. K of an episode,

        over turns:     delta_k = r_k + turn_gamma V_(e_(k+1)) - V_(e_k),    A_(e_k) = delta_k + turn_gamma lam A_(e_(k+1))
        within turn k:  delta_t = gamma V_(t+1) - V_t,                       A_t = delta_t + gamma lam A_(t+1),    t < e_k
        returns_t = A_t + V_t

    with V and A zero after the last turn. If ``turn_gamma`` is ``gamma`` and ``lam`` is 1, this is `gae` with each turn's reward
    at its last token. Deviation: VAGEN whitens the advantages here; see `whiten`.

    Args, returns: as `turn_gae`; ``gamma`` is the discount of a token.

    >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.8]])
    >>> bi_level_gae(rewards, values, torch.ones(1, 3), torch.tensor([[1, 1, 2]]), [0], turn_gamma=0.5)[0]
    tensor([[ 0.0000, -0.1000,  0.2000]])
    """
    turns = _Turns.find(response_mask, turn, trajectory)
    ends, rewards = turns.at(turns.last, values), turns.rewards(token_level_rewards)
    _, targets = _gae_at(turns.cells, turns.shape, rewards, ends, turn_gamma, lam)
    kept = values.detach().float()[turns.sampled]
    last = targets.new_zeros(len(kept)).index_put((turns.last,), targets)  # of each turn at its end, else 0
    place = torch.arange(len(kept), device=kept.device) - turns.first[turns.of]
    within = len(targets), int(place.max()) + 1 if len(place) else 0
    advantages = torch.zeros_like(values, dtype=torch.float32)
    advantages[turns.sampled] = _gae_at((turns.of, place), within, last, kept, gamma, lam)[0]
    return advantages, torch.where(turns.sampled, advantages + values.detach().float(), 0.0)


def uncut_tokens(response_mask: Tensor, end_reason: Iterable[str]) -> Tensor:
    """``response_mask`` (B, R) with 0 in the rows of episodes that a limit cut, see `CUT`.

    Nothing is learned from such a row, and it enters no baseline.

    >>> uncut_tokens(torch.ones(2, 1), ["done", "turns"]).tolist()
    [[1.0], [0.0]]
    """
    whole = [reason not in CUT for reason in end_reason]
    return response_mask * torch.tensor(whole, device=response_mask.device)[:, None]


def _gae_at(
    cells: tuple[Tensor, Tensor], shape: tuple[int, int], rewards: Tensor, values: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """`gae` of rewards and values that lie in these rows and columns of a table: advantages and returns, all (N,)."""
    rewarded, valued, real = (
        values.new_zeros(shape).index_put(cells, column) for column in (rewards, values, torch.ones_like(values))
    )
    advantages, returns = gae(rewarded, valued, real, gamma, lam)
    return advantages[cells], returns[cells]


@dataclass(frozen=True)
class _Turns:
    """The turns of a batch, those of an episode one after another; M sampled tokens in all."""

    sampled: Tensor  # (B, R) bool
    of: Tensor  # (M,) int64, the turn of each sampled token
    first: Tensor  # (N,) int64, its first sampled token
    last: Tensor  # (N,) int64, its last sampled token
    row: Tensor  # (N,) int64
    number: Tensor  # (N,) int64, in its episode, from 1
    cells: tuple[Tensor, Tensor]  # each (N,) int64, its episode, and its place there
    shape: tuple[int, int]  # (E, T)

    @classmethod
    def find(cls, mask: Tensor, turn: Tensor, trajectory: Labels) -> "_Turns":
        episodes, sampled = group_index(trajectory, mask, "trajectories", turn=turn), mask != 0
        count = int(episodes.max()) + 1 if len(episodes) else 0
        rows, columns = sampled.nonzero(as_tuple=True)
        numbers = turn[rows, columns]
        base = int(numbers.max()) + 1 if len(numbers) else 1
        keys, of = torch.unique(episodes[rows] * base + numbers, return_inverse=True)
        tokens = torch.arange(len(rows), device=mask.device)
        first = torch.full_like(keys, len(rows)).scatter_reduce(0, of, tokens, "amin")
        last = torch.zeros_like(keys).scatter_reduce(0, of, tokens, "amax")
        episode, counts = keys // base, torch.bincount(keys // base, minlength=count)
        place = torch.arange(len(keys), device=mask.device) - (counts.cumsum(0) - counts)[episode]
        longest = int(counts.max()) if len(counts) else 0
        return cls(sampled, of, first, last, rows[first], keys % base, (episode, place), (count, longest))

    def rewards(self, token_level_rewards: Tensor) -> Tensor:
        """The sum of the rewards of each turn (N,) float32."""
        rewards = token_level_rewards.detach().float()[self.sampled]
        return rewards.new_zeros(len(self.first)).index_add(0, self.of, rewards)

    def at(self, tokens: Tensor, values: Tensor) -> Tensor:
        """The values of these sampled tokens: (N,) of (B, R)."""
        return values.detach().float()[self.sampled][tokens]

    def returns(self, token_level_rewards: Tensor, gamma: float) -> Tensor:
        """The discounted return of each turn (N,)."""
        rewards = self.rewards(token_level_rewards)
        return _gae_at(self.cells, self.shape, rewards, torch.zeros_like(rewards), gamma, 1.0)[1]

    def states(self, uid: Sequence[Hashable], states: Sequence[Sequence[Hashable]]) -> list[tuple[Hashable, Hashable]]:
        """For each turn the group of its row, and the state before it."""
        found = []
        for row, number in zip(self.row.tolist(), self.number.tolist(), strict=True):
            if number > len(states[row]):
                raise RowCountMismatch(f"row {row}: turn {number}, but only {len(states[row])} states")
            found.append((uid[row], states[row][number - 1]))
        return found

    def spread(self, values: Tensor) -> Tensor:
        """Copies the number of each turn to its sampled tokens: (N,) to (B, R) float32."""
        found = torch.zeros(self.sampled.shape, dtype=torch.float32, device=values.device)
        found[self.sampled] = values[self.of].float()
        return found
