"""Scores of a reward function, and errors of `launch`."""

import numpy as np
import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidConfig, RewardError, ScoreCountMismatch
from recipes.demo.tiny_model import make_tiny_model
from recipes.rewards import as_reward_function
from workers import ActorConfig, PolicyConfig, RewardWorker, launch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def responses(worker, *texts):
    ids = [worker.tokenizer(text)["input_ids"] + [worker.tokenizer.eos_token_id] for text in texts]
    width = max(map(len, ids))
    rows = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    truths = np.array([{"ground_truth": str(row)} for row in range(len(ids))], dtype=object)
    return DataProto.from_dict({"responses": rows, "response_mask": mask}, {"reward_model": truths})


def test_scores_stand_on_the_last_response_token(checkpoint):
    seen = []

    def score(rows):
        seen.extend(rows)
        return [{"score": len(row.solution_str), "acc": row.ground_truth == "1"} for row in rows]

    worker = RewardWorker(score, checkpoint)
    data = responses(worker, "ab", "a longer one")
    result = worker.score(data)
    assert [row.solution_str for row in seen] == ["ab", "a longer one"]  # without special tokens
    assert [row.ground_truth for row in seen] == ["0", "1"]
    assert result["token_level_rewards"].sum(1).tolist() == [2.0, 12.0]
    last = data["response_mask"].sum(1) - 1
    assert result["token_level_rewards"][torch.arange(2), last].tolist() == [2.0, 12.0]
    assert result["score"].tolist() == [2, 12]
    assert result["acc"].tolist() == [False, True]


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [{"score": float("nan")}],
        [{"score": 1e39}],
        [{"score": 1.0, "acc": float("nan")}],
        [0.5],
        [{"acc": 1.0}],
        [{"score": None}],
    ],
)
def test_results_that_are_no_scores_are_refused(checkpoint, wrong):
    worker = RewardWorker(lambda rows: wrong, checkpoint)
    with pytest.raises(RewardError):
        worker.score(responses(worker, "x"))


@pytest.mark.parametrize("returned", [None, 0.5])
def test_a_function_that_returns_no_list_is_told_so(checkpoint, returned):
    worker = RewardWorker(lambda rows: returned, checkpoint)
    with pytest.raises(ScoreCountMismatch, match=f"returned {returned}, not a list of 1 results"):
        worker.score(responses(worker, "x"))


def test_a_further_number_that_is_not_finite_is_none(checkpoint):
    worker = RewardWorker(lambda rows: [{"score": 1.0, "iou": float("nan")}, {"score": 1.0, "iou": 0.5}], checkpoint)
    assert worker.score(responses(worker, "x", "y"))["iou"].tolist() == [None, 0.5]


@pytest.mark.parametrize(
    "name", ["uid", "responses", "advantages", "truncated", "reward_model", "trajectory", "actions"]
)
def test_a_number_does_not_take_the_place_of_another_column(checkpoint, name):
    worker = RewardWorker(lambda rows: [{"score": 1.0, "acc": 1.0}, {"score": 1.0, name: 3.0}], checkpoint)
    with pytest.raises(RewardError, match=f"numbers named {name}; the batch has columns of that name, or the lib"):
        worker.score(responses(worker, "x", "y"))


@pytest.mark.parametrize("name", ["turns", "index"])
def test_a_number_may_have_the_name_of_a_column_of_other_batches(checkpoint, name):
    """They were refused as if the batch had such columns."""
    worker = RewardWorker(lambda rows: [{"score": 1.0, name: 3.0} for _ in rows], checkpoint)
    data = responses(worker, "x", "y")
    assert (data | worker.score(data))[name].tolist() == [3.0, 3.0]
    data[name] = np.array(["the library's", "own"], dtype=object)
    with pytest.raises(RewardError, match=f"numbers named {name}; the batch has"):
        worker.score(data)


def test_no_rows_are_no_error(checkpoint):
    worker = RewardWorker(lambda rows: [], checkpoint)
    assert len(worker.score(responses(worker, "x")[:0])) == 0


def test_a_role_that_was_not_launched_is_an_error_that_says_how(checkpoint):
    with launch(actor=ActorConfig(checkpoint)) as roles:
        assert not roles.has("reference")
        with pytest.raises(InvalidConfig, match=r"launch\(reward=\.\.\.\)"):
            _ = roles.reward
    with pytest.raises(InvalidConfig, match="'local'"):
        launch(actor=ActorConfig(checkpoint), on="the moon")


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)


def test_a_reward_of_another_form_is_refused_at_the_start_and_adapted_by_name(checkpoint):
    for wrong in (compute_score, lambda prompts, completions: [0.0], 3):
        with pytest.raises(RewardError, match="as_reward_function"), launch(ActorConfig(checkpoint), reward=wrong):
            pass
    with launch(ActorConfig(checkpoint), reward=as_reward_function(compute_score)) as roles:
        data = responses(roles.reward.worker, "0", "x")
        assert roles.reward.score(data)["score"].tolist() == [1.0, 0.0]


def test_a_frozen_reference_has_no_gradients(checkpoint):
    actor = ActorConfig(checkpoint, temperature=0.7)
    assert actor.frozen() == PolicyConfig(checkpoint, temperature=0.7)
    with launch(actor=actor, reference=actor.frozen()) as roles:
        assert list(roles.start_seconds) == ["loading the actor", "loading the reference", "starting the engine hf"]
        assert min(roles.start_seconds.values()) > 0
        assert not any(p.requires_grad for p in roles.reference.worker.module.parameters())
