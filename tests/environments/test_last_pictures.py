"""Episodes that see only their last pictures go on in new rows of the same trajectory."""

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto.errors import InvalidConfig
from helpers.episodes import DrawnEnvironment, RandomEngine, picture, play_episodes, prompts_of, renderer_of
from recipes.algorithms import group_advantage, turn_gae
from recipes.run.metrics import last_rows, rollout_metrics
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, Observation
from rollout.environments.episode import OMITTED, last_pictures
from rollout.environments.episode_rows import episode_columns, episode_starts
from rollout.sampling import turn_seed

ANSWERS = ("up", "to the left", "{}")
SAMPLING = SamplingParams(n=2, max_tokens=6)


def play(model_type, prompts, limits, environment=DrawnEnvironment, answers=None, unended=0.0):
    renderer = renderer_of(model_type)
    engine, rows = RandomEngine(renderer, answers, unended), prompts_of(renderer.builder, prompts)
    episodes = play_episodes(engine, renderer, episode_starts(rows, SAMPLING), environment, SAMPLING, limits)
    assert not engine.kept
    assert not engine.waiting
    data = episode_columns(rows.repeat(SAMPLING.n, interleave=True), episodes, renderer, 400)
    return renderer, engine, episodes, data


def left_out(observations, count):
    """`last_pictures` as a plain loop: by the numbers of the pictures."""
    numbers = [
        (place, index)
        for place, observation in enumerate(observations)
        for index, part in enumerate(observation.content)
        if isinstance(part, Image.Image)
    ]
    kept = {*numbers[-count:], *(each for each in numbers if each[0] == len(observations) - 1)}
    return [
        [
            OMITTED if (place, index) in numbers and (place, index) not in kept else part
            for index, part in enumerate(observation.content)
        ]
        for place, observation in enumerate(observations)
    ]


@pytest.mark.parametrize(
    ("model_type", "prompts"),
    [
        ("qwen2_5_vl", 10),
        *(pytest.param(model_type, 20, marks=pytest.mark.slow) for model_type in ("qwen3_vl", "smolvlm", "internvl")),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_each_row_is_what_the_template_makes_of_the_pictures_that_are_left(model_type, prompts, count):
    """The template's rendering of all messages, with earlier pictures left out, is an independent reference."""
    lead = " " if model_type == "smolvlm" else ""  # its template writes a space before an answer
    answers, limits = [lead + each for each in ANSWERS], EpisodeLimits(turns=5, last_pictures=count)
    renderer, engine, episodes, _ = play(model_type, prompts, limits, answers=answers)
    requests = {}
    for request in engine.requests:  # those of an episode are in order
        requests.setdefault((request.uid, request.seed), []).append(request)
    divided = 0
    for episode in episodes:
        actions = [
            renderer.builder.tokenizer.decode(turn.token_ids, skip_special_tokens=True) for turn in episode.turns
        ]
        divided += len(episode.rows) > 1
        for row in episode.rows:
            shown = left_out(episode.observations[: row.first + 1], count)
            first = [{"type": "text", "text": f"task {episode.start.uid[1:]}"}, *parts(shown[0])]
            messages = [{"role": "user", "content": first}]
            for action, content in zip(actions, shown[1:]):
                messages += [
                    {"role": "assistant", "content": action.strip()},
                    {"role": "user", "content": parts(content)},
                ]
            whole = renderer.builder.prepare({"prompt": messages})
            assert row.begins.input_ids.tolist() == whole.input_ids.tolist()
            assert row.begins.token_types.tolist() == whole.token_types.tolist()
            assert row.begins.position_ids.equal(
                renderer.positions(whole.token_types, [medium.inputs for medium in whole.media])
            )
    assert divided > prompts / 2


def parts(content):
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in content
    ]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_rows_hold_each_turn_once_and_only_grow(model_type):
    limits = EpisodeLimits(turns=5, tokens=400, last_pictures=2)
    _, engine, episodes, data = play(model_type, 20, limits, unended=0.05)
    by_seed = {request.seed: request for request in engine.requests}
    rows = {}
    for row, name in enumerate(data["trajectory"]):
        rows.setdefault(name, []).append(row)
    for episode in episodes:
        own, mask = rows[episode.start.trajectory], data["response_mask"] != 0
        sampled = [token for row in own for token in data["responses"][row][mask[row]].tolist()]
        assert sampled == [token for turn in episode.turns for token in turn.token_ids]
        turns = [number for row in own for number in data["turn"][row][mask[row]].tolist()]
        assert turns == [number for number, turn in enumerate(episode.turns, 1) for _ in turn.token_ids]
        assert float(data["token_level_rewards"][own].sum()) == data["score"][own[0]]
        assert not data["token_level_rewards"][own][~mask[own]].any()
        for start, stop in zip(episode.rows, [*(row.first for row in episode.rows[1:]), len(episode.turns)]):
            whole = start.ends.input_ids.tolist()
            for number in range(start.first, stop):
                begin = by_seed[turn_seed(episode.start.seed, number)].input_ids.tolist()
                assert whole[: len(begin)] == begin
        for row, part in zip(own, episode.rows):
            length = int(data["attention_mask"][row].sum())
            whole = data["input_ids"][row][data["attention_mask"][row] != 0].tolist()
            assert whole[: len(part.ends.input_ids)] == part.ends.input_ids.tolist()
            assert length <= 400 + len(episode.prompt.input_ids)
    assert max(map(len, rows.values())) >= 3
    assert data["states"].tolist() == [data["states"][rows[name][0]] for name in data["trajectory"]]


def test_rows_of_a_prompt_have_the_same_prompt_where_one_is_divided():
    _, _, _, data = play("qwen2_5_vl", 12, EpisodeLimits(turns=5, last_pictures=1))
    width = data["prompts"].shape[1]
    divided = {uid for uid, names in by(data, "uid", "trajectory").items() if len(names) > len(set(names))}
    assert divided
    for uid in divided:
        rows = np.flatnonzero(data["uid"] == uid)
        assert all(data["input_ids"][row, :width].equal(data["input_ids"][rows[0], :width]) for row in rows)
        assert all(data["position_ids"][row, :, :width].equal(data["position_ids"][rows[0], :, :width]) for row in rows)


def by(data, key, value):
    found = {}
    for one, other in zip(data[key], data[value]):
        found.setdefault(one, []).append(other)
    return found


def test_with_room_for_all_pictures_nothing_changes():
    _, _, _, whole = play("qwen2_5_vl", 6, EpisodeLimits(turns=4))
    _, _, _, limited = play("qwen2_5_vl", 6, EpisodeLimits(turns=4, last_pictures=100))
    assert len(whole) == len(limited) == 12
    for name in ("input_ids", "position_ids", "response_mask", "turn", "token_level_rewards", "mm_token_type_ids"):
        assert whole[name].equal(limited[name])


def test_rows_of_a_trajectory_have_one_advantage():
    _, _, _, data = play("qwen2_5_vl", 12, EpisodeLimits(turns=5, last_pictures=1))
    names = ("token_level_rewards", "uid", "response_mask", "trajectory")
    advantages = group_advantage(**{name: data[name] for name in names}, normalise_std=False)
    scores = dict(zip(data["trajectory"], data["score"]))
    baselines = {
        uid: np.mean([scores[name] for name in set(found)]) for uid, found in by(data, "uid", "trajectory").items()
    }
    for row in range(len(data)):
        expected = scores[data["trajectory"][row]] - baselines[data["uid"][row]]
        mask = data["response_mask"][row] != 0
        torch.testing.assert_close(advantages[row][mask], torch.full((int(mask.sum()),), expected).float())
    values = torch.zeros(data["response_mask"].shape)
    _, returns = turn_gae(data["token_level_rewards"], values, data["response_mask"], data["turn"], data["trajectory"])
    for name, score in scores.items():
        first = np.flatnonzero(data["trajectory"] == name)[0]
        assert float(returns[first][data["response_mask"][first] != 0][0]) == score


def test_metrics_count_an_episode_once():
    _, _, episodes, data = play("qwen2_5_vl", 12, EpisodeLimits(turns=5, last_pictures=1))
    assert len(last_rows(data)) == len(episodes) < len(data)
    assert last_rows(data)["trajectory"].tolist() == list(dict.fromkeys(data["trajectory"]))
    metrics = rollout_metrics(data)
    scores = [sum(turn.reward for turn in episode.turns) for episode in episodes]
    assert metrics["critic/score/mean"] == pytest.approx(np.mean(scores))
    assert metrics["episode/turns/mean"] == pytest.approx(np.mean([len(episode.turns) for episode in episodes]))
    ended = {name: value for name, value in metrics.items() if name.startswith("episode/ended/")}
    reasons = [episode.ended for episode in episodes]
    assert ended == {f"episode/ended/{reason}": reasons.count(reason) / len(reasons) for reason in set(reasons)}


class Failing(DrawnEnvironment):
    def reset(self, row, seed):
        self.left = 3
        return Observation([picture(16, 16)])

    def step(self, action):
        self.left -= 1
        if not self.left:
            raise RuntimeError("gone")
        return Observation([picture(16, 16, self.left)])


def test_no_row_of_a_failed_episode_is_learned_from():
    _, _, episodes, data = play("qwen2_5_vl", 2, EpisodeLimits(turns=9, last_pictures=1), Failing)
    assert [len(episode.rows) for episode in episodes] == [3] * 4
    assert set(data["end_reason"]) == {"error"}
    assert not data["response_mask"].any()


def test_the_last_observation_stays_whole():
    pictures = [picture(8, 8, seed) for seed in range(3)]
    shown, omitted = last_pictures([Observation([pictures[0], "a"]), Observation(["b", *pictures[1:]])], 1)
    assert [each.content for each in shown] == [[OMITTED, "a"], ["b", *pictures[1:]]]
    assert omitted == 1
    with pytest.raises(InvalidConfig, match="last_pictures=0"):
        EpisodeLimits(turns=1, last_pictures=0)
