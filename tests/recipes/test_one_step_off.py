"""Rollouts one update ahead: what is sampled with which weights, and where the data position stands."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.geo3k_grpo import parse
from recipes.run.one_step_off import LookAhead, RolloutAhead
from rollout.engine import SamplingParams

SAMPLING = SamplingParams()


class Numbers:
    """Batches 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.drawn = 0
        self.skipped: dict[int, str] = {}

    def __next__(self) -> DataProto:
        self.drawn += 1
        return DataProto.from_dict(non_tensors={"number": np.array([self.drawn - 1])})

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class Engine:
    """Answers with the version of its weights, at the time when it was asked."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[int] = []

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        self.asked.append(int(prompts["number"][0]))
        return DataProto.from_dict({"rollout_log_probs": torch.full((1, 2), float(self.version))})

    def submit(self, method: str, *args: Any) -> "Future[DataProto]":
        future: Future[DataProto] = Future()
        future.set_result(getattr(self, method)(*args))
        return future


def test_each_batch_is_sampled_one_update_before_it_is_learned_from():
    engine, loader = Engine(), LookAhead(Numbers())
    ahead = RolloutAhead(engine, loader, goes_on=lambda: engine.version < 3)
    versions, staleness = [], []
    for step in range(4):
        data = ahead.generate(next(loader), SAMPLING)
        versions.append(float(data["rollout_log_probs"][0, 0]))
        staleness.append(ahead.staleness)
        assert torch.equal(data["old_log_probs"], data["rollout_log_probs"])
        engine.version = step + 1  # the update
    assert versions == [0, 0, 1, 2]
    assert staleness == [0, 1, 1, 1]
    assert engine.asked == [0, 1, 2, 3]  # every batch once, and none after the last step


def test_other_prompts_are_generated_for_at_once():
    engine, loader = Engine(), LookAhead(Numbers())
    ahead = RolloutAhead(engine, loader)
    ahead.generate(next(loader), SAMPLING)
    engine.version = 5
    held_out = DataProto.from_dict(non_tensors={"number": np.array([99])})
    assert float(ahead.generate(held_out, SAMPLING)["rollout_log_probs"][0, 0]) == 5
    assert "old_log_probs" not in ahead.generate(held_out, SAMPLING)
    assert ahead.version == 5  # whatever else the group has


def test_a_saved_position_does_not_count_what_was_only_looked_at():
    loader = LookAhead(Numbers())
    for _ in range(3):
        next(loader)
    loader.peek()
    assert loader.loader.drawn == 4
    other = LookAhead(Numbers())
    other.load_state_dict(loader.state_dict())
    assert int(next(other)["number"][0]) == int(next(loader)["number"][0]) == 3


def test_a_correction_that_would_do_nothing_is_refused():
    options = ["--one-step-off", "--on", "ray", "--ray.rollout-processes", "1", "--algorithm.correction", "token"]
    with pytest.raises(InvalidConfig, match=r"algorithm\.correction=token.* one_step_off assumes to be equal"):
        parse(options)
    with pytest.raises(InvalidConfig, match=r"rejection=max .* one_step_off assumes to be equal"):
        parse([*options[:-2], "--algorithm.rejection", "max"])
    with pytest.raises(InvalidConfig, match="remax needs greedy responses"):
        parse([*options[:-2], "--algorithm.advantage", "remax"])
    assert parse(options[:-2]).one_step_off
