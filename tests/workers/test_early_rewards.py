"""Rewards of whole groups while other samples are decoded: the same as later ones, and there before the last response ends."""

import threading
from dataclasses import replace

import pytest
import torch

from dataproto.errors import InvalidConfig, NonFiniteLogits, RewardError
from helpers.checkpoints import write_checkpoint
from helpers.engines import ROWS
from helpers.option_files import in_files
from recipes.grpo import parse
from rollout.engine import SamplingParams
from rollout.hf import HFEngine
from rollout.prompts import PromptBuilder
from workers import launch
from workers.roles.actor import ActorConfig
from workers.roles.critic import CriticConfig
from workers.roles.reward import EARLY_RESULTS, ModelReward, RewardWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker

SAMPLING = SamplingParams(n=2, max_tokens=6, seed=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def prompts(checkpoint):
    return PromptBuilder.from_pretrained(checkpoint, max_prompt_length=300)(ROWS)


def by_length(rows):
    return [{"score": len(row.solution_str) / 10, "acc": float(row.response_length > 5)} for row in rows]


def worker_with(checkpoint, function=None):
    model = HFEngine(checkpoint, device=torch.device("cpu")).model
    reward = None if function is None else RewardWorker(function, checkpoint)
    return RolloutWorker(RolloutConfig(checkpoint), lambda dtype: model.named_parameters(), reward=reward)


def assert_same_rows(found, expected):
    for name in expected.batch.keys():  # noqa: SIM118
        assert torch.equal(found[name], expected[name]), name
    for name in ("score", "acc", "response_text", "uid"):
        assert list(found[name]) == list(expected[name])


def test_groups_are_scored_before_the_last_response_ends_with_the_same_results(checkpoint, prompts, monkeypatch):
    expected = worker_with(checkpoint).generate(prompts, SAMPLING)
    expected |= RewardWorker(by_length, checkpoint).score(expected)
    scored, calls = threading.Event(), []

    def noted(rows):
        assert threading.current_thread() is threading.main_thread()
        calls.append([row.uid for row in rows])
        scored.set()
        return by_length(rows)

    generate = HFEngine.generate

    def held_back(self, requests, sampling):
        """The last response ends only after rows have been scored."""
        for number, completion in enumerate(generate(self, requests, sampling)):
            if number == len(requests) - 1:
                assert scored.wait(120)
            yield completion

    monkeypatch.setattr(HFEngine, "generate", held_back)
    rollouts = worker_with(checkpoint, noted).generate(prompts, SAMPLING)
    early = [result is not None for result in rollouts[EARLY_RESULTS]]
    assert any(early)
    assert early[0::2] == early[1::2]  # whole groups
    assert sum(map(len, calls)) == sum(early)
    rollouts |= RewardWorker(noted, checkpoint).score(rollouts)
    assert sum(map(len, calls)) == len(rollouts)  # each row once
    assert all(uids.count(uid) == 2 for uids in calls for uid in uids)
    assert_same_rows(rollouts, expected)


def test_rows_whose_early_scoring_fails_are_scored_again(checkpoint, prompts):
    early = threading.Event()

    def fails(rows):
        if not early.is_set():
            raise ValueError("not now")
        return by_length(rows)

    rollouts = worker_with(checkpoint, fails).generate(prompts, SAMPLING)
    assert list(rollouts[EARLY_RESULTS]) == [None] * len(rollouts)
    with pytest.raises(ValueError, match="not now"):
        RewardWorker(fails, checkpoint).score(rollouts)
    early.set()
    assert len(RewardWorker(fails, checkpoint).score(rollouts)) == len(rollouts)
    with pytest.raises(RewardError, match="1 results for 8 rows"):
        RewardWorker(lambda rows: by_length(rows[:1]), checkpoint).score(rollouts)


def test_an_error_of_the_engine_is_raised_and_the_worker_stays_usable(checkpoint, prompts):
    worker = worker_with(checkpoint, by_length)
    broken = prompts[:]
    broken["multi_modal_inputs"] = prompts["multi_modal_inputs"].copy()
    broken["multi_modal_inputs"][3] = {
        name: torch.full_like(value, torch.nan) if value.is_floating_point() else value
        for name, value in prompts["multi_modal_inputs"][3].items()
    }
    with pytest.raises(NonFiniteLogits, match="row 3"):
        worker.generate(broken, SAMPLING)
    assert not any(thread.name == "decoding" for thread in threading.enumerate())
    assert len(worker.generate(prompts, SAMPLING)) == 8


def test_what_cannot_be_scored_early_is_refused(checkpoint, tmp_path):
    actor, rollout = ActorConfig("nowhere"), RolloutConfig("nowhere", early_rewards=True)
    for reward in (None, ModelReward(CriticConfig("nowhere"))):  # refused before a model is looked for
        with pytest.raises(InvalidConfig, match="early_rewards needs a reward function"):
            launch(actor, reward=reward, rollout=rollout)
    with pytest.raises(InvalidConfig, match="tensor_parallel=2: each rank of an engine"):
        launch(actor, reward=by_length, rollout=replace(rollout, options={"tensor_parallel": 2}))
    with pytest.raises(InvalidConfig, match=r"leave out --rollout\.over-ask"):
        parse(in_files(["--rollout.early-rewards", "--rollout.over-ask", "1.5"], tmp_path))
    several = "--engine vllm --on ray --layout.dp 2 --engine-options tensor_parallel 2"
    with pytest.raises(InvalidConfig, match="tensor_parallel=2: each rank of an engine"):
        parse(in_files(["--rollout.early-rewards", *several.split()], tmp_path))
    with pytest.raises(InvalidConfig, match="each rank of an engine"):
        RolloutWorker(
            RolloutConfig(checkpoint, "vllm", {"tensor_parallel": 2}),
            lambda dtype: [],
            reward=RewardWorker(by_length, checkpoint),
        )
