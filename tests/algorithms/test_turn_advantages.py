"""Advantages over turns and over the rows of a trajectory, by hand and compared with plain loops."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto import DataProto, object_array
from dataproto.errors import InvalidConfig, RowCountMismatch
from recipes.algorithms import (
    AlgorithmConfig,
    advantage_columns,
    bi_level_gae,
    gae,
    gigpo_advantage,
    group_advantage,
    leave_one_out_advantage,
    length_weighted_advantage,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    turn_gae,
    turn_returns_advantage,
    uncut_tokens,
)
from recipes.ppo import PPOConfig


@st.composite
def episodes(draw):
    """Episodes of up to four turns, in one row or in several, with observations between turns and padding after."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, width = [], 0
    for episode in range(draw(st.integers(1, 6))):
        row, states = [], [f"s{rng.integers(3)}" for _ in range(4)]
        found = [row]
        for number in range(1, int(rng.integers(1, 5)) + 1):
            if number > 1 and rng.random() < 0.4:
                found.append(row := [(0, 0)] * int(rng.integers(3)))
            row += [(1, number)] * int(rng.integers(1, 4)) + [(0, number)] * int(rng.integers(3))
        failed = rng.random() < 0.15
        rows += [(episode, states, [(mask * (not failed), turn) for mask, turn in row]) for row in found]
        width = max(width, *map(len, found))
    mask, turn = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for place, (_, _, row) in enumerate(rows):
        for column, (is_sampled, number) in enumerate(row):
            mask[place, column], turn[place, column] = is_sampled, number
    rewards = torch.from_numpy(rng.normal(size=mask.shape) * (rng.random(mask.shape) < 0.5)).float() * mask
    return {
        "token_level_rewards": rewards,
        "values": torch.from_numpy(rng.normal(size=mask.shape)).float(),
        "response_mask": mask,
        "turn": turn,
        "trajectory": [f"t{episode}" for episode, _, _ in rows],
        "uid": [f"g{episode % 2}" for episode, _, _ in rows],
        "states": [states for _, states, _ in rows],
    }


def turns_of(batch):
    """The turns of each trajectory in order: the cells of its tokens."""
    found = defaultdict(lambda: defaultdict(list))
    for row, name in enumerate(batch["trajectory"]):
        for column in range(batch["turn"].shape[1]):
            if batch["response_mask"][row, column]:
                found[name][int(batch["turn"][row, column])].append((row, column))
    return {name: dict(sorted(turns.items())) for name, turns in found.items()}


def read(tensor, cells):
    return [float(tensor[cell]) for cell in cells]


def take(batch, *names):
    return {name: batch[name] for name in names}


TURNS = ("token_level_rewards", "response_mask", "turn", "trajectory")


def returns_of(batch, gamma):
    """Name of the trajectory and number of the turn -> discounted return."""
    found = {}
    for name, turns in turns_of(batch).items():
        total = 0.0
        for number, cells in reversed(turns.items()):
            total = sum(read(batch["token_level_rewards"], cells)) + gamma * total
            found[name, number] = total
    return found


def standardised(values):
    """By label: values minus the mean of their label, over the standard deviation; 0 for a label of one value."""
    groups = defaultdict(dict)
    for (label, key), value in values.items():
        groups[label][key] = value
    found = {}
    for group in groups.values():
        numbers = np.array([*group.values()])
        std = numbers.std(ddof=1) if len(numbers) > 1 else 0.0
        found |= {key: (value - numbers.mean()) / (std + 1e-6) if std else 0.0 for key, value in group.items()}
    return found


@given(episodes())
def test_gigpo_is_a_plain_loop(batch):
    got = gigpo_advantage(**take(batch, *TURNS, "uid", "states"), turn_gamma=0.9, step_weight=0.7)
    returns, scores, steps = returns_of(batch, 0.9), {}, {}
    uid = dict(zip(batch["trajectory"], batch["uid"]))
    states = dict(zip(batch["trajectory"], batch["states"]))
    for name, turns in turns_of(batch).items():
        scores[uid[name], name] = sum(sum(read(batch["token_level_rewards"], cells)) for cells in turns.values())
        for number in turns:
            steps[(uid[name], states[name][number - 1]), (name, number)] = returns[name, number]
    whole, step = standardised(scores), standardised(steps)
    expected = torch.zeros_like(got)
    for name, turns in turns_of(batch).items():
        for number, cells in turns.items():
            for cell in cells:
                expected[cell] = whole[name] + 0.7 * step[name, number]
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)  # small deviations are divided by smaller ones


def test_gigpo_by_hand():
    """Two episodes of a group begin alike and part; a third, of another group, is compared with nobody."""
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 5.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 1, 0], [1, 1, 0, 0]])
    turn = torch.tensor([[1, 1, 2, 2], [1, 1, 2, 0], [1, 1, 0, 0]])
    states = [["start", "door"], ["start", "wall"], ["start"]]
    got = gigpo_advantage(rewards, ["a", "a", "b"], mask, turn, states, [0, 1, 2], 0.5, 1.0, normalise_std=False)
    # scores 1 and 0: 0.5 and -0.5. Both first turns begin at "start", with returns 0.5 and 0: 0.25 and -0.25.
    expected = [[0.75, 0.0, 0.5, 0.5], [-0.75, 0.0, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(got, torch.tensor(expected))


@given(episodes())
def test_gigpo_without_a_repeated_state_is_the_advantage_of_episodes(batch):
    own = [[(row, number) for number in range(4)] for row in range(len(batch["uid"]))]
    got = gigpo_advantage(**take(batch, *TURNS, "uid"), states=own)
    assert got.equal(group_advantage(**take(batch, "token_level_rewards", "uid", "response_mask", "trajectory")))


def test_gigpo_names_the_row_whose_states_are_missing():
    with pytest.raises(RowCountMismatch, match="row 0: turn 2, but only 1 states"):
        gigpo_advantage(torch.zeros(1, 2), ["a"], torch.ones(1, 2), torch.tensor([[1, 2]]), [["s"]], ["t"])


@given(episodes())
def test_returns_of_turns_are_a_plain_loop(batch):
    mask = batch["response_mask"]
    got = turn_returns_advantage(**take(batch, *TURNS), turn_gamma=0.6)
    returns, numbers = returns_of(batch, 0.6), torch.zeros(mask.shape)
    for name, turns in turns_of(batch).items():
        for number, cells in turns.items():
            for cell in cells:
                numbers[cell] = returns[name, number]
    chosen = numbers[mask != 0].double()
    if len(chosen) < 2 or chosen.std() < 1e-3:
        return
    expected = torch.zeros(mask.shape)
    expected[mask != 0] = ((chosen - chosen.mean()) / chosen.std()).float()
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@given(episodes())
def test_gae_over_turns_is_a_plain_loop(batch):
    got, returns = turn_gae(**take(batch, *TURNS, "values"), turn_gamma=0.9, lam=0.8)
    expected, targets = torch.zeros_like(got), torch.zeros_like(got)
    for turns in turns_of(batch).values():
        advantage = following = 0.0
        for cells in reversed(turns.values()):
            value = float(batch["values"][cells[0]])
            delta = sum(read(batch["token_level_rewards"], cells)) + 0.9 * following - value
            advantage, following = delta + 0.9 * 0.8 * advantage, value
            for cell in cells:
                expected[cell], targets[cell] = advantage, advantage + value
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns, targets, atol=1e-5, rtol=1e-5)


def vagen(rewards, values, ends, gamma, turn_gamma, lam):
    """Bi-Level GAE of one episode as VAGEN's released function computes it: two passes over the sampled tokens."""
    advantages, rewards = [0.0] * len(rewards), list(rewards)
    last = following = 0.0
    for t in reversed(ends):
        delta = rewards[t] + turn_gamma * following - values[t]
        last = delta + turn_gamma * lam * last
        following, advantages[t] = values[t], last
    for t in ends:
        rewards[t] = advantages[t] + values[t]
    last = 0.0
    for t in reversed(range(len(rewards))):
        if t in ends:
            last = following = 0.0
        else:
            following = values[t + 1]
        last = rewards[t] + gamma * following - values[t] + gamma * lam * last
        advantages[t] = last
    return advantages


@given(episodes())
def test_bi_level_gae_is_that_of_vagen(batch):
    """VAGEN's rewards stand on the last token of a turn."""
    placed = torch.zeros_like(batch["token_level_rewards"])
    for turns in turns_of(batch).values():
        for cells in turns.values():
            placed[cells[-1]] = sum(read(batch["token_level_rewards"], cells))
    batch |= {"token_level_rewards": placed}
    got, returns = bi_level_gae(**take(batch, *TURNS, "values"), turn_gamma=0.8, gamma=0.95, lam=0.7)
    expected = torch.zeros_like(got)
    for turns in turns_of(batch).values():
        cells = [cell for each in turns.values() for cell in each]
        ends = [cells.index(each[-1]) for each in turns.values()]
        numbers = vagen(read(placed, cells), read(batch["values"], cells), ends, 0.95, 0.8, 0.7)
        for cell, number in zip(cells, numbers):
            expected[cell] = number
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns, (got + batch["values"]) * (batch["response_mask"] != 0), atol=1e-6, rtol=0)


@given(episodes())
def test_bi_level_gae_with_one_discount_is_gae(batch):
    batch |= {"token_level_rewards": batch["token_level_rewards"] * 0 + batch["response_mask"]}
    placed = torch.zeros_like(batch["token_level_rewards"])
    for turns in turns_of(batch).values():
        for cells in turns.values():
            placed[cells[-1]] = len(cells)
    got, _ = bi_level_gae(**take(batch, *TURNS, "values"), turn_gamma=1.0)
    plain, _ = gae(placed, **take(batch, "values", "response_mask", "trajectory"))
    torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-5)


# Rows of a trajectory


def joined(batch):
    """The same episodes with one row each, and the row of each trajectory."""
    names = list(dict.fromkeys(batch["trajectory"]))
    columns = {name: [[] for _ in names] for name in ("token_level_rewards", "values", "response_mask", "turn")}
    for row, name in enumerate(batch["trajectory"]):
        for column, parts in columns.items():
            parts[names.index(name)] += batch[column][row].tolist()
    width = max(len(row) for row in columns["turn"])
    whole = {name: torch.tensor([row + [0] * (width - len(row)) for row in rows]) for name, rows in columns.items()}
    firsts = [batch["trajectory"].index(name) for name in names]
    others = {name: [batch[name][row] for row in firsts] for name in ("trajectory", "uid", "states")}
    return whole | others


GROUPED = (group_advantage, leave_one_out_advantage, length_weighted_advantage, reinforce_plus_plus_baseline)


@given(episodes())
def test_an_episode_in_several_rows_has_the_advantages_of_one_row(batch):
    one = joined(batch)
    for function, names in (
        *((each, ("token_level_rewards", "uid", "response_mask")) for each in GROUPED),
        (reinforce_plus_plus, ("token_level_rewards", "response_mask")),
        (gae, ("token_level_rewards", "values", "response_mask")),
        (turn_gae, (*TURNS, "values")),
        (gigpo_advantage, (*TURNS, "uid", "states")),
    ):
        several = function(**take(batch, *{*names, "trajectory"}))
        alone = function(**take(one, *{*names, "trajectory"}))
        if isinstance(several, tuple):
            several, alone = several[0], alone[0]
        found = several[batch["response_mask"] != 0]
        order = torch.argsort(
            torch.tensor([one["trajectory"].index(name) for name in batch["trajectory"]])[
                (batch["response_mask"] != 0).nonzero()[:, 0]
            ],
            stable=True,
        )
        torch.testing.assert_close(found[order], alone[one["response_mask"] != 0], atol=1e-4, rtol=1e-4)


@given(episodes())
def test_rows_that_are_trajectories_of_their_own_are_rows_without_trajectories(batch):
    own = list(range(len(batch["uid"])))
    for function in GROUPED:
        given_ = take(batch, "token_level_rewards", "uid", "response_mask")
        assert function(**given_, trajectory=own).equal(function(**given_))
    given_ = take(batch, "token_level_rewards", "values", "response_mask")
    for one, other in zip(gae(**given_, gamma=0.9, lam=0.8, trajectory=own), gae(**given_, gamma=0.9, lam=0.8)):
        assert one.equal(other)


# Options


def batch_of(**columns):
    data = DataProto.from_dict({name: value for name, value in columns.items() if isinstance(value, torch.Tensor)})
    for name, value in columns.items():
        if not isinstance(value, torch.Tensor):
            data[name] = object_array(value)
    return data


def test_options_reach_the_functions():
    rewards, mask, turn = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2).long(), torch.tensor([[1, 2]] * 2)
    others = {"uid": ["a", "a"], "trajectory": ["x", "y"], "states": [["s", "t"], ["s", "u"]]}
    data = batch_of(token_level_rewards=rewards, response_mask=mask, turn=turn, values=0.5 * mask, **others)
    expected = gigpo_advantage(rewards, response_mask=mask, turn=turn, turn_gamma=0.95, step_weight=1.0, **others)
    assert advantage_columns(AlgorithmConfig(advantage="gigpo"), data)["advantages"].equal(expected)
    found = advantage_columns(PPOConfig(advantage="turn_gae", lam=0.0, whiten=False), data)
    assert found["advantages"].tolist() == [[0.0, 0.5], [0.0, -0.5]]
    columns = {"token_level_rewards": rewards, "values": 0.5 * mask, "response_mask": mask, "turn": turn}
    expected = bi_level_gae(**columns, trajectory=["x", "y"], turn_gamma=0.99, gamma=0.9, lam=0.5)
    found = advantage_columns(PPOConfig(advantage="bi_level_gae", gamma=0.9, lam=0.5, whiten=False), data)
    assert found["advantages"].equal(expected[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "gigpo", "gamma": 0.5}, "gigpo has no discount for each token"),
        ({"advantage": "gigpo", "n": 1}, "needs at least 2"),
    ],
)
def test_options_that_an_advantage_does_not_have_are_refused(options, message):
    with pytest.raises(InvalidConfig, match=message):
        AlgorithmConfig(**options)


def test_a_batch_without_turns_is_refused():
    data = batch_of(token_level_rewards=torch.zeros(2, 1), response_mask=torch.ones(2, 1), uid=["a", "a"])
    with pytest.raises(InvalidConfig, match="argument 'turn', which is neither an option nor a column"):
        advantage_columns(AlgorithmConfig(advantage="gigpo"), data)


def test_episodes_that_a_limit_cut_are_left_out():
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]])
    kept = uncut_tokens(mask, ["done", "tokens", "length", "error"])
    assert kept.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert kept.dtype == torch.int64
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 9.0], [0.0, 9.0, 0.0], [0.0, 0.0, 0.0]])
    assert not group_advantage(rewards, ["a"] * 4, kept).any()  # one response is left in the group
