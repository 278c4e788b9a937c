"""Episodes on several ranks are those of one process: an engine of two ranks, and two processes of Ray."""

import os
import time
from pathlib import Path

import pytest
import torch

from dataproto import object_array
from helpers.agents import looker
from helpers.checkpoints import write_checkpoint
from helpers.episodes import picture, prompts_of
from helpers.geo3k_runs import assert_same_run
from helpers.option_files import in_files
from helpers.processes import run_ranks
from recipes.walk import main
from rollout.continuation import BEGUN
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, Observation
from rollout.environments.episode_loop import EpisodePlan
from rollout.hf import HFEngine
from rollout.prompts import PromptBuilder
from rollout.responses import number_occurrences
from workers import ActorConfig, launch
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.roles.carried_groups import FINISHED
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(n=2, max_tokens=4, seed=3, stop_token_ids=tuple(range(0, 250, 2)))
WALK = (
    "--batch-size 2 --algorithm.n 2 --eval-rows 2 --warm-up.steps 2 --warm-up.batch-size 4 --optimizer.warmup-steps 0"
    " --steps 2 --eval-every 2 --save-every 0"
)


class Corridor:
    """Two steps with a picture each, of which each takes another time on each rank."""

    def reset(self, row, seed):
        self.left = 2
        return Observation(["where to?", picture(16, 16, 0)])

    def step(self, action):
        time.sleep(os.getpid() * len(action) % 7 / 100)
        self.left -= 1
        return Observation([picture(24, 16, self.left), "on"], reward=1.0 + self.left, done=not self.left)


class TwinEngine(HFEngine):
    """An engine whose ranks all compute the whole."""

    def __init__(self, model_path: str, tensor_parallel: int = 1) -> None:
        super().__init__(model_path)


def played(ranks, tensor_parallel, rows):
    path = os.environ["TINY_MODEL"]
    config = RolloutConfig(path, f"{__name__}:TwinEngine", {"tensor_parallel": tensor_parallel})
    worker = RolloutWorker(config, lambda dtype: [], ranks)
    worker.sharding.stale = False  # the engine has read its weights from the checkpoint
    prompts = PromptBuilder.from_pretrained(path, 300)([{"prompt": f"Go {row}.", "uid": f"u{row}"} for row in rows])
    data = worker.play(
        prompts, Corridor, SAMPLING, EpisodeLimits(turns=3, last_pictures=1)
    )  # episodes of one row, and of two
    return [
        *told(data),
        *told(worker.run(prompts, looker, SAMPLING, EpisodeLimits(turns=4))),
    ], worker.engine.prefilled_tokens


def told(data):
    texts = [(data["uid"][row], data["end_reason"][row], data["turns"][row].item()) for row in range(len(data))]
    kept = data["response_mask"].sum(1).tolist(), data["responses"].sum(1).tolist(), data["score"].tolist()
    return list(zip(texts, *kept, strict=True))


def on_two_ranks():
    ranks = init_ranks(Layout(dp=2), torch.device("cpu"))
    return played(ranks, 2, [0, 1] if ranks.rank("dp") == 0 else [2])


def test_an_engine_of_two_ranks_plays_what_one_process_plays(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TINY_MODEL", write_checkpoint("qwen2_5_vl", tmp_path / "model"))
    first, second = run_ranks(2, {"play": on_two_ranks}, tmp_path)["play"]
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    rows, tokens = played(Ranks(), 1, [0, 1, 2])
    assert sorted(first[0] + second[0]) == sorted(rows)
    assert len(rows) > 6 + 12  # there are six episodes, and six of an agent with two rows each
    assert first[1] == second[1] > 0  # both computed all
    assert tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("agent", ["", "--agent docs/picture_agents.py:walk"])
def test_two_processes_of_ray_make_the_run_of_one(tmp_path, monkeypatch, agent):
    monkeypatch.chdir(Path(__file__).parents[2])
    one, two, options = tmp_path / "one", tmp_path / "two", [*WALK.split(), *agent.split()]
    assert main([*options, "--output-dir", str(one)]) == 0
    ray = "--on ray --layout.dp 2 --ray.object-store-gib 0.2"
    assert main([*options, *in_files(ray.split(), tmp_path), "--output-dir", str(two)]) == 0
    assert_same_run(two, one)


@pytest.mark.long
def test_environments_that_are_held_in_a_process_of_ray_are_closed_at_the_end(tmp_path):
    path, folder = write_checkpoint("qwen2_5_vl", tmp_path / "model"), tmp_path / "closed"
    folder.mkdir()

    class Closing:  # here, so that it is sent by value
        """The first two prompts are over at once; each environment leaves a file when it is closed."""

        def reset(self, row, seed):
            self.name = str(row["raw_prompt"][-1]["content"])
            return Observation(["go"], done=self.name in ("task 0", "task 1"))

        def step(self, action):
            return Observation(["on"])

        def close(self):
            (folder / self.name).touch()

    samples = number_occurrences(prompts_of(PromptBuilder.from_pretrained(path, max_prompt_length=100), 4))
    samples[BEGUN] = object_array([[] for _ in range(4)])
    plan = EpisodePlan(Closing, EpisodeLimits(turns=1000))
    with launch(ActorConfig(path), reward=None, on="ray", object_store_gib=0.2) as roles:
        data = roles.rollout.advance(samples, SamplingParams(max_tokens=4), 2, 1, (), plan)
        assert data[FINISHED].tolist() == [True, True, False, False]
        assert not (folder / "task 2").exists()
    assert {file.name for file in folder.iterdir()} == {f"task {number}" for number in range(4)}
