"""Training an agent by ``dataproto grpo --agent``: its rewards, those of a reward function, and what is refused."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from dataproto import DataProto, object_array
from dataproto.errors import InvalidConfig, UserFunctionFailed
from helpers.option_files import in_files
from recipes import walk, zoom
from recipes.configs.walk_config import parse as parse_walk
from recipes.grpo import main, parse
from recipes.run.episode_roles import FailedSteps, Played, PlayingRollout, load_agent
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from rollout.agents import AgentPlan, CommandAgent
from rollout.environments import EpisodeLimits

OWN = """
from openai import AsyncOpenAI

async def agent(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages = list(task.messages)
        for _ in range(2):
            reply = (await client.chat.completions.create(model=task.model, messages=messages)).choices[0].message
            messages += [reply, {"role": "user", "content": "Sure?"}]
    return {"score": float(len(reply.content or "") % 3), "acc": 1.0}

async def silent(task):
    await agent(task)

def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(len(solution_str)), "long": 1.0}
"""
OPTIONS = "--batch-size 2 --algorithm.n 2 --algorithm.minibatch 2 --eval-rows 2 --steps 1 --max-response-length 6 --save-every 0"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agent", "silent"])
def test_an_agent_of_ones_own_trains(name, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    reward = ["--reward", f"{tmp_path}/own.py:score"] if name == "silent" else []
    turns = in_files(["--agents.turns", "3"], tmp_path)
    options = [*OPTIONS.split(), "--agent", f"{tmp_path}/own.py:{name}", *turns, *reward]
    assert main([*options, "--output-dir", str(tmp_path / "run")]) == 0
    row = read_metrics(tmp_path / "run" / METRICS_FILE)[1]
    assert row["episode/turns/mean"] == 2
    assert row["episode/ended/done"] == 1
    assert row["reward/long" if reward else "reward/acc"] == 1
    assert np.isfinite(row["critic/score/mean"])
    assert not [key for key in row if key.startswith("agent/new_rows")]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["agent"].endswith(name)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("main", "name", "options", "accuracy"),
    [
        (walk.main, "walk_by_anthropic", "--steps 100", 0.9),
        (zoom.main, "zoom", "--steps 120 --optimizer.lr 1e-3", 0.85),
    ],
)
def test_agents_learn_what_their_environments_teach(main, name, options, accuracy, tmp_path):
    """`benchmarks/agents.py` shows the same runs next to those of the environments."""
    agent = Path(__file__).parents[2] / "docs" / f"picture_agents.py:{name}"
    assert (
        main([*options.split(), "--save-every", "0", "--agent", str(agent), "--output-dir", str(tmp_path / "run")]) == 0
    )
    last = read_metrics(tmp_path / "run" / METRICS_FILE)[-1]
    assert next(value for key, value in last.items() if key.startswith("val-core/")) >= accuracy


def rows(scored):
    """Two episodes, of which the first has two rows, and what their agents have given for turns."""
    data = DataProto.from_dict(
        {
            "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
            "response_mask": torch.ones(3, 2, dtype=torch.int64),
            "agent_scored": torch.tensor(scored),
        },
        non_tensors={
            "trajectory": object_array(["a", "a", "b"]),
            "uid": object_array(["u", "u", "u"]),
            "score": object_array([1.0, 1.0, 0.0]),
            "response_text": object_array(["x", "y", "z"]),
        },
    )
    return data


class Reward:
    """Scores each row by its number."""

    def score(self, data):
        self.asked = list(data["trajectory"])
        rewards = torch.zeros(len(data), 2)
        rewards[:, -1] = torch.arange(len(data)) + 5.0
        columns = {"score": object_array(rewards.sum(1).tolist()), "long": object_array([1.0] * len(data))}
        return DataProto.from_dict({"token_level_rewards": rewards}, non_tensors=columns)


def test_the_reward_function_scores_the_last_row_of_episodes_without_a_reward():
    reward, data = Reward(), rows([False, False, True])
    PlayingRollout(None, Played(AgentPlan(print, EpisodeLimits(2))), reward=reward)._score(data)
    assert reward.asked == ["a"]
    assert data["token_level_rewards"].tolist() == [[0, 1], [0, 5], [0, 0]]
    assert data["score"].tolist() == [6.0, 6.0, 0.0]
    assert data["long"].tolist() == [1.0, 1.0, None]


def test_an_episode_without_any_reward_is_refused():
    with pytest.raises(InvalidConfig, match=r"row 1 \(uid u\): the agent returned no reward"):
        PlayingRollout(None, Played(AgentPlan(print, EpisodeLimits(2))))._score(rows([False, False, True]))


def test_a_run_stops_if_all_episodes_fail_at_once_or_three_times_in_a_row(tmp_path):
    def step(*reasons):
        return DataProto.from_dict(
            non_tensors={"end_reason": object_array(reasons), "end_message": object_array(["no map"] * len(reasons))}
        )

    failed, kept = step("error", "timeout"), tmp_path / "step.jsonl"
    with pytest.raises(UserFunctionFailed, match=r"every episode of step 1 failed \(2 rows\): no map$"):
        FailedSteps().check(failed, 1, kept)
    kept.touch()
    steps = FailedSteps()
    for number, data in enumerate([step("turns", "error"), failed, failed, step("done", "done"), failed, failed], 1):
        steps.check(data, number, kept)
    with pytest.raises(UserFunctionFailed, match=f"step 7 failed .*no map; {kept} has the failures of its rows"):
        steps.check(failed, 7, kept)


def test_a_name_of_several_words_is_a_command(tmp_path):
    (tmp_path / "own.py").write_text("def agent(task): ...")
    assert isinstance(pickle.loads(load_agent("python own.py").pickled), CommandAgent)
    assert pickle.loads(load_agent(f"{tmp_path}/own.py:agent").pickled).__name__ == "agent"
    (tmp_path / "few.py").write_text(
        "from rollout.agents import CommandAgent\n\nagent = CommandAgent('python own.py', at_once=2)"
    )
    assert load_agent(f"{tmp_path}/few.py:agent").at_once == 2
    with pytest.raises(InvalidConfig, match="cannot be read: No closing quotation"):
        load_agent("python 'own.py")
    with pytest.raises(InvalidConfig, match=r"'pyhton own\.py', cannot run: there is no such program"):
        load_agent("pyhton own.py")
    with pytest.raises(InvalidConfig, match=r"cannot run: .*, or its file may not be executed"):
        load_agent(f"{tmp_path}/few.py now")  # which nobody has made executable
    with pytest.raises(InvalidConfig, match="'own' names no agent: use"):
        load_agent("own")
    with pytest.raises(InvalidConfig, match="no function 'other'"):
        load_agent(f"{tmp_path}/own.py:other")


def test_every_recipe_says_how_many_processes_a_command_has(tmp_path):
    agent = ["--agent", "python own.py"]
    own = parse([*agent, *in_files(["--agents.processes", "3", "--agents.memory-gib", "0.5"], tmp_path)]).agents
    walk = parse_walk([*agent, *["--processes", "3", "--memory-gib", "0.5"]]).episodes
    for options in (own, walk):
        apart = Played.by_agent(agent[1], options).plan.agent
        assert (apart.at_once, pickle.loads(apart.pickled).memory_gib) == (3, 0.5)
    for of_none in ([], ["--agent", "own.py:agent"]):
        with pytest.raises(InvalidConfig, match="--processes would do nothing: only a command"):
            parse_walk(["--processes", "3", *of_none])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--agents.turns 3", "read from files only"),
        ("--agent own.py:agent --algorithm.advantage remax", "choose another advantage"),
        ("--agent own.py:agent --engine vllm", "agents.tokens"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(InvalidConfig, match=message):
        parse(options.split())


UNFIT = """
import threading
from functools import cache

LOCK = threading.Lock()


@cache
def known(x):
    return x + 1


class Agent:
    def __call__(self, task):
        with LOCK:
            return known(task)


agent = Agent()
"""


def test_a_file_of_an_agent_need_not_be_fit_for_pickling(tmp_path):
    """Its variables may hold what cannot be pickled, and it need not be there where the agent runs."""
    (tmp_path / "own.py").write_text(UNFIT)
    sent = load_agent(f"{tmp_path}/own.py:agent").pickled
    (tmp_path / "own.py").unlink()
    assert pickle.loads(sent)(2) == 3
