"""What a reward gives the truth itself, and when a reward is not asked."""

import pytest

from dataproto.errors import RewardError
from docs.judge import Judge
from recipes.rewards import (
    RewardRow,
    SequenceClassifier,
    as_reward_function,
    geo3k_reward,
    remote_reward,
    short_answer_reward,
)
from recipes.rewards.reward_check import reason_not_to_ask, truth_scores, truth_warning


def rows(*truths):
    return [RewardRow("", truth) for truth in truths]


def tagged(completions, solution, **kwargs):
    """As VLM-R1: an answer in marks, compared with a truth in marks."""
    found = [text.partition("<answer>")[2].partition("</answer>")[0].strip() for text in completions]
    return [
        float(bool(each) and f"<answer> {each} </answer>" == truth) for each, truth in zip(found, solution, strict=True)
    ]


def test_geometry3k_gives_its_best_to_a_boxed_truth_after_a_thought():
    first, _ = truth_scores(geo3k_reward, rows("3", "4"))
    assert (first.answer, first.right["score"], first.wrong["score"]) == (
        "<think>So it is.</think>\n\\boxed{3}",
        1.0,
        0.1,
    )
    assert first.empty == {"score": 0.0, "acc": 0.0, "format": 0.0}
    assert truth_warning(geo3k_reward, rows("3", "4", None, "4 cm")) is None
    assert truth_scores(geo3k_reward, rows(None, None)) == [None, None]


def test_a_truth_of_equal_value_is_no_wrong_answer():
    assert truth_warning(geo3k_reward, rows("3", " 3 ", "3.0", "4")) is None
    first, *_ = truth_scores(geo3k_reward, rows("3", " 3 ", "3.0"))
    assert first.wrong is None


def test_a_truth_in_marks_is_answered_as_a_model_answers():
    own = [RewardRow("", f"<answer> {n} </answer>", columns={"solution": f"<answer> {n} </answer>"}) for n in (3, 4)]
    assert truth_warning(as_reward_function(tagged), own) is None
    found = truth_scores(as_reward_function(tagged), own)
    assert [(each.answer, each.right["score"]) for each in found] == [
        ("<answer>3</answer>", 1.0),
        ("<answer>4</answer>", 1.0),
    ]


def test_a_reward_that_does_not_read_the_truths_is_told_in_one_line():
    def strict(solution_str, ground_truth):
        return {"score": 0.1 + float(solution_str == f"answer: {ground_truth}")}

    warning = truth_warning(as_reward_function(strict), rows([1, 2], [3, 4]))
    assert warning.startswith(
        "the reward does not give its best to the truth [1, 2]: it gives 0.1 to the truth, 0.1 to a wrong"
    )
    assert "0.1 to an empty answer" in warning
    assert "\n" not in warning


def test_an_accuracy_of_zero_is_told_although_the_form_is_rewarded():
    def form_only(rows):
        return [{"score": 0.1 * ("boxed" in row.solution_str), "acc": 0.0} for row in rows]

    assert "it gives 0.1 (acc 0) to the truth and 0 to an empty answer" in truth_warning(form_only, rows("7"))


def test_a_reward_that_fails_for_an_answer_is_told():
    def brittle(solution_str, ground_truth):
        return float(solution_str.split("<answer>")[1] == ground_truth)

    assert "brittle raised IndexError" in truth_warning(as_reward_function(brittle), rows("7"))
    with pytest.raises(RewardError):
        truth_scores(as_reward_function(brittle), rows("7"))


async def asks_a_server(solution_str, ground_truth):
    raise AssertionError("it is not called")


class Checked:
    def check(self):
        pass

    def __call__(self, rows):
        raise AssertionError("it is not called")


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (as_reward_function(Judge("http://127.0.0.1:9/v1", "m")), "outside"),
        (Judge("http://127.0.0.1:9/v1", "m"), "outside"),
        (remote_reward("http://127.0.0.1:9/score"), "outside"),
        (SequenceClassifier("MODEL", device="cpu"), "a model"),
        (as_reward_function(asks_a_server), "async"),
        (as_reward_function(Checked()), "outside"),
    ],
)
def test_rewards_that_cost_are_not_asked(reward, reason):
    assert reason in reason_not_to_ask(reward)


def test_plain_functions_are_asked():
    for reward in (geo3k_reward, short_answer_reward, as_reward_function(tagged)):
        assert reason_not_to_ask(reward) is None
