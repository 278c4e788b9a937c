"""Dynamic sampling and reward shaping on hand-made rollouts; no model takes part."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.options import AlgorithmConfig
from recipes.data.curriculum import verdicts
from recipes.run.phases import (
    StepState,
    rows_with_tokens,
    sample,
    sample_informative_groups,
    shape_rewards,
)
from rollout.engine import SamplingParams
from workers.cluster.local import LocalGroup
from workers.ranks.dispatch_modes import dispatch


def prompts(*names, width=2):
    data = DataProto.from_dict({"input_ids": torch.ones(len(names), width, dtype=torch.int64)})
    data["uid"] = list(names)
    return data


def sampler(scores, samples=2):
    """Rollouts of prompts whose name says which scores they get."""

    def sample(batch):
        data = batch.repeat(samples, interleave=True)
        rows, width = data["input_ids"].shape
        data["prompts"] = data["input_ids"]
        data["responses"] = torch.full((rows, 3), 7)
        data["response_mask"] = torch.ones(rows, 3, dtype=torch.int64)
        data["input_ids"] = torch.cat([data["prompts"], data["responses"]], dim=1)
        data["attention_mask"] = torch.ones(rows, width + 3, dtype=torch.int64)
        data["position_ids"] = torch.arange(width + 3).expand(rows, 4, -1).contiguous()
        data["score"] = np.array([score for name in batch["uid"] for score in scores[name]], dtype=object)
        return data

    return sample


SCORES = {"a": (0, 1), "b": (1, 1), "c": (0, 0), "d": (0.5, 0), "e": (0, 1), "f": (1, 0), "g": (0, 0), "h": (1, 1)}


def test_the_batch_is_filled_with_groups_that_differ():
    further = iter([prompts("d", "e", "f", width=4)])
    data, metrics = sample_informative_groups(sampler(SCORES), prompts("a", "b", "c"), further.__next__, generations=5)
    assert data["uid"].tolist() == ["a", "a", "d", "d", "e", "e"]  # f is left over
    assert metrics == {
        "train/num_gen_batches": 2,
        "train/filtered_groups": 2,
        "train/sampled_score/mean": pytest.approx((1 + 2 + 0 + 0.5 + 1 + 1) / 12),
    }
    # prompts of two widths, one batch: padding in front, which nothing attends to
    assert data["prompts"].shape == (6, 4)
    assert data["input_ids"].shape == data["attention_mask"].shape == (6, 7)
    assert data["position_ids"].shape == (6, 4, 7)
    assert data["attention_mask"].sum(1).tolist() == [5, 5, 7, 7, 7, 7]
    assert data["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert data["position_ids"][0, 0].tolist() == [0, 0, 0, 1, 2, 3, 4]


def test_a_full_batch_asks_for_nothing():
    data, metrics = sample_informative_groups(sampler(SCORES), prompts("a", "d"), None, generations=5)
    assert data["uid"].tolist() == ["a", "a", "d", "d"]
    assert metrics["train/num_gen_batches"] == 1
    assert metrics["train/filtered_groups"] == 0


def test_after_the_last_generation_dropped_groups_fill_the_batch_up():
    further = iter([prompts("g", "h")] * 3)
    data, metrics = sample_informative_groups(sampler(SCORES), prompts("b", "a"), further.__next__, generations=2)
    assert data["uid"].tolist() == ["a", "a", "b", "b"]
    assert metrics["train/filtered_groups"] == 3
    only_equal, _ = sample_informative_groups(sampler(SCORES), prompts("b", "c"), further.__next__, generations=3)
    assert only_equal["uid"].tolist() == ["b", "b", "c", "c"]


def graded(**columns):
    return DataProto.from_dict(non_tensors={name: np.array(values, dtype=object) for name, values in columns.items()})


def test_groups_are_told_apart_by_accuracy_where_the_reward_gives_one():
    data = graded(score=[0.1, 0.0, 1.0, 0.1], acc=[0.0, 0.0, 1.0, None])
    assert verdicts(data) == [0.0, 0.0, 1.0, 0.1]
    assert verdicts(graded(score=[0.5, 1])) == [0.5, 1.0]


def test_one_format_miss_does_not_keep_a_group_that_is_all_wrong():
    def sample(batch):
        data = sampler({"a": (0.1, 0.0), "b": (1.0, 0.1), "c": (0.1, 1.0)})(batch)
        data["acc"] = np.array([float(score == 1.0) for score in data["score"]], dtype=object)
        return data

    kept, metrics = sample_informative_groups(sample, prompts("a", "b"), lambda: prompts("c"), generations=2)
    assert kept["uid"].tolist() == ["b", "b", "c", "c"]
    assert metrics["train/filtered_groups"] == 1


class Group:
    """Answers with as many rows as are asked for; greedy ones score 0.25 less than the first sample."""

    @dispatch("dp")
    def generate(self, prompts, sampling):
        data = prompts.repeat(sampling.n, interleave=True)
        data["greedy"] = torch.full((len(data),), sampling.temperature == 0)
        return data

    @dispatch("dp")
    def score(self, data):
        worth = torch.tensor([float(len(name)) for name in data["uid"]]) - 0.25 * data["greedy"].float()
        return DataProto.from_dict({"token_level_rewards": worth[:, None] * torch.tensor([[0.0, 1.0]])})


def rollouts(roles, batch, config, more=None):
    """The rows of `sample`, the function that waits for their scores, and the metrics."""
    metrics, state = {}, StepState(more=more)
    return *sample(roles, batch, config, SamplingParams(temperature=0.7), state, metrics), metrics


def test_remax_asks_for_one_greedy_response_a_prompt():
    group = LocalGroup(Group())
    roles = SimpleNamespace(rollout=group, reward=group, scores_apart=False)
    config = AlgorithmConfig(n=2, advantage="remax")
    data, scores, metrics = rollouts(roles, prompts("x", "yy"), config)
    assert data["greedy"].tolist() == [False] * 4
    assert scores()["reward_baselines"].tolist() == [0.75, 0.75, 1.75, 1.75]
    assert metrics["reward/greedy_baseline"] == 1.25
    _, scores, _ = rollouts(roles, prompts("x"), AlgorithmConfig(n=2))
    assert "reward_baselines" not in scores()


class Coming(Future):
    """Rewards that somebody else is computing."""

    def result(self):
        assert self.done(), "nothing was computed meanwhile"
        return super().result()


def test_a_step_waits_for_scores_that_others_compute_when_it_reads_them():
    coming = []

    def submit(method, data):
        coming.append((Coming(), data))
        return coming[-1][0]

    roles = SimpleNamespace(rollout=LocalGroup(Group()), reward=SimpleNamespace(submit=submit), scores_apart=True)
    data, scores, metrics = rollouts(roles, prompts("x", "yy"), AlgorithmConfig(n=2, advantage="remax"))
    assert [len(rows) for _, rows in coming] == [4, 2]  # the greedy responses too
    assert "token_level_rewards" not in data
    for future, rows in coming:
        future.set_result(Group().score(rows))
    found = scores()
    assert found["token_level_rewards"].tolist() == [[0.0, 1.0]] * 2 + [[0.0, 2.0]] * 2
    assert found["reward_baselines"].tolist() == [0.75, 0.75, 1.75, 1.75]
    assert list(metrics) == ["timing_s/gen", "timing_s/reward", "reward/greedy_baseline"]


def test_an_error_of_the_reward_is_raised_before_models_work():
    class Failing(Group):
        @dispatch("dp")
        def score(self, data):
            raise KeyError("mine")

    failed = Future()
    failed.set_exception(KeyError("mine"))
    for reward, apart in ((LocalGroup(Failing()), False), (SimpleNamespace(submit=lambda *call: failed), True)):
        roles = SimpleNamespace(rollout=LocalGroup(Group()), reward=reward, scores_apart=apart)
        with pytest.raises(KeyError, match="mine"):
            rollouts(roles, prompts("x"), AlgorithmConfig(n=2))


def test_dynamic_sampling_chooses_rows_by_their_scores():
    class Graded(Group):
        """Groups of short names are all alike."""

        @dispatch("dp")
        def score(self, data):
            found = super().score(data)
            found["score"] = np.array(
                [float(row % 2 and len(name) > 1) for row, name in enumerate(data["uid"])], object
            )
            return found

    group, config = LocalGroup(Graded()), AlgorithmConfig(n=2, dynamic_sampling=2)
    roles = SimpleNamespace(rollout=group, reward=group, scores_apart=False)
    data, scores, _ = rollouts(roles, prompts("x", "yy"), config, lambda: prompts("zz"))
    assert data["uid"].tolist() == ["yy", "yy", "zz", "zz"]
    assert "score" in data
    assert not scores().names()
    with pytest.raises(InvalidConfig, match="further prompts"):
        rollouts(roles, prompts("x"), config)


def sampled(*tokens):
    """Two rows a prompt, with so many response tokens each."""
    data = prompts(*(str(row // 2) for row in range(len(tokens))))
    data["response_mask"] = (torch.arange(3) < torch.tensor(tokens)[:, None]).long()
    return data


@pytest.mark.parametrize(
    ("tokens", "minibatch", "kept"),
    [
        ((1, 0, 0, 0, 2, 3), 1, [0, 1, 4, 5]),
        ((1, 0, 0, 0, 2, 3), 2, [0, 1, 2, 3, 4, 5]),
        ((0, 0, 0, 0, 0, 1), 2, [4, 5]),
        ((0, 0, 1, 0), None, [0, 1, 2, 3]),
        ((0, 0, 0, 0), None, []),
        ((0, 0, 0, 0), 1, []),
    ],
)
def test_minibatches_without_tokens_are_left_out(tokens, minibatch, kept):
    assert rows_with_tokens(sampled(*tokens), minibatch).tolist() == kept


def scored(**columns):
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    return DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask, **columns})


def test_length_costs_reward_near_the_limit():
    config = AlgorithmConfig(overlong_buffer=2)
    data, metrics = shape_rewards(scored(), config, 4)
    assert data["token_level_rewards"].tolist() == [[0, 1, 0, 0], [0, 0, 0, -0.5]]
    assert data["token_level_scores"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0.5]]
    assert metrics == {"reward/overlong_penalty": -0.5}


def test_each_turn_of_an_episode_has_the_length_of_a_response():
    """Turns of at most 3 tokens, observations between them: the first row's turns have 2 and 3 tokens, the second's 1 and 1."""
    data = DataProto.from_dict(
        {
            "token_level_rewards": torch.zeros(2, 6),
            "response_mask": torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 1, 0, 0, 0]]),
            "turn": torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0]]),
        }
    )
    config = AlgorithmConfig(overlong_buffer=2)
    shaped, metrics = shape_rewards(data, config, 3)
    expected = [[0, -0.5, 0, 0, 0, -1.0], [0, 0, 0, 0, 0, 0]]
    assert shaped["token_level_rewards"].tolist() == expected
    assert metrics == {"reward/overlong_penalty": -0.75}
    nothing = data[:]
    nothing["response_mask"] = torch.zeros(2, 6, dtype=torch.int64)  # of episodes that a limit cut, with --drop-cut
    shaped, metrics = shape_rewards(nothing, config, 3)
    assert shaped["token_level_rewards"].tolist() == [[0.0] * 6] * 2
    assert metrics == {"reward/overlong_penalty": 0.0}


def test_distance_from_the_reference_costs_reward():
    log_probs = torch.full((2, 4), -1.0)
    unshaped = scored(old_log_probs=log_probs, ref_log_prob=log_probs - 0.5)
    config = AlgorithmConfig(kl_coef=0.1, kl_in="reward")
    data, metrics = shape_rewards(unshaped, config, 4)
    expected = torch.tensor([[-0.05, 0.95, 0.0, 0.0], [-0.05, -0.05, -0.05, 0.45]])
    torch.testing.assert_close(data["token_level_rewards"], expected)
    assert metrics == {"actor/reward_kl_penalty_coeff": 0.1, "actor/reward_kl_penalty": pytest.approx(0.5)}


def test_without_shaping_nothing_changes():
    before = scored()
    data, metrics = shape_rewards(before, AlgorithmConfig(), 4)
    assert torch.equal(data["token_level_rewards"], before["token_level_rewards"])
    assert "token_level_scores" not in data
    assert metrics == {}


def test_what_goes_on_from_step_to_step_survives_a_checkpoint():
    again = StepState()
    again.load_state_dict(StepState(steps=7).state_dict())
    assert again == StepState(steps=7)
