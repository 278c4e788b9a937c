import pytest

from dataproto import DataProto
from recipes.run.metrics import rollout_metrics
from recipes.watch.report import curves
from recipes.watch.signals import Signals, learning_problems

HEALTHY = {
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "reward/equal_groups_ratio": 0.5,
    "response/truncated_ratio": 0.1,
    "actor/entropy": 0.7,
}


@pytest.mark.parametrize(
    ("sign", "problem", "advice"),
    [
        ({"reward/equal_groups_ratio": 1.0}, "equal_groups", "--algorithm.n"),
        ({"critic/score/max": 0.1, "critic/score/min": 0.1}, "constant_reward", "reward 0.1"),
        ({"response/truncated_ratio": 0.96}, "cut_responses", "--max-response-length"),
        ({"response/commonest_ratio": 0.95}, "one_answer", "--algorithm.kl-coef"),
        ({"actor/entropy": 0.009}, "no_entropy", "--algorithm.entropy-coef"),
        ({"training/rollout_probs_diff_log_mean": 0.3}, "engine_difference", "--algorithm.correction"),
    ],
)
def test_a_sign_counts_when_all_of_the_last_steps_show_it(sign, problem, advice):
    bad = HEALTHY | sign
    assert learning_problems(4 * [bad]) == {}
    assert learning_problems([bad, HEALTHY, bad, bad, bad, bad]) == {}
    found = learning_problems([HEALTHY, *5 * [bad]])
    assert list(found) == [problem]
    assert advice in found[problem]


def test_the_share_of_the_commonest_answer_is_a_curve():
    assert "Commonest answer" in curves([{"step": step, "response/commonest_ratio": 0.5} for step in (1, 2)])


def test_just_below_each_threshold_there_is_no_sign():
    near = {
        "critic/score/max": 0.1,
        "critic/score/min": 0.09,
        "reward/equal_groups_ratio": 0.999,
        "response/truncated_ratio": 0.949,
        "response/commonest_ratio": 0.949,
        "actor/entropy": 0.01,
        "training/rollout_probs_diff_log_mean": 0.199,
    }
    assert learning_problems(5 * [near]) == {}


def test_a_reward_that_changes_between_steps_is_not_constant():
    steps = [{"critic/score/max": value, "critic/score/min": value} for value in (0.1, 0.1, 0.2, 0.2, 0.2)]
    assert learning_problems(steps) == {}
    assert list(learning_problems([*steps, *steps[-2:]])) == ["constant_reward"]


def test_a_constant_reward_is_not_told_as_equal_groups_too():
    steps = 5 * [HEALTHY | {"critic/score/min": 1.0, "reward/equal_groups_ratio": 1.0}]
    assert list(learning_problems(steps)) == ["constant_reward"]


def test_metrics_that_are_missing_or_not_finite_are_no_sign():
    assert learning_problems(5 * [{}]) == {}
    assert learning_problems([{"actor/entropy": float("nan")}, *4 * [{"actor/entropy": 0.0}]]) == {}


def test_each_problem_is_told_once():
    signals = Signals()
    cut, flat = HEALTHY | {"response/truncated_ratio": 1.0}, HEALTHY | {"actor/entropy": 0.0}
    told = [signals.new_signs(metrics) for metrics in [*6 * [cut], HEALTHY, *5 * [cut], *6 * [flat]]]
    assert [len(each) for each in told] == [*4 * [0], 1, *11 * [0], 1, 0]


def test_groups_with_equal_scores_are_counted_among_those_with_several_samples():
    import torch

    tensors = {
        "attention_mask": torch.ones(5, 3),
        "response_mask": torch.ones(5, 2),
        "token_level_rewards": torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]),
    }
    said = {"uid": list("aabbc"), "response_text": ["red", "red", "red", "blue", "red"]}
    assert rollout_metrics(DataProto.from_dict(tensors, said))["response/commonest_ratio"] == 0.8
    assert "response/commonest_ratio" not in rollout_metrics(DataProto.from_dict(tensors, said | {"uid": ["a"] * 5}))
    grouped, apart = (DataProto.from_dict(tensors, non_tensors={"uid": list(uids)}) for uids in ("aabbc", "abcde"))
    assert rollout_metrics(grouped)["reward/equal_groups_ratio"] == 0.5
    grouped["uid"] = torch.tensor([0, 0, 1, 1, 2])
    assert rollout_metrics(grouped)["reward/equal_groups_ratio"] == 0.5
    assert "reward/equal_groups_ratio" not in rollout_metrics(apart)
