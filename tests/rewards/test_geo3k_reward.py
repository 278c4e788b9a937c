import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataproto.errors import RewardError
from recipes.rewards import RewardRow, compute_score, format_score, geo3k_reward, load_reward
from recipes.rewards.checking import AnswerChecker

# verl/utils/reward_score/geo3k.py and EasyR1's examples/reward_function/math.py
PATTERN = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
PIECES = st.sampled_from(
    ["<think>", "</think>", "\\boxed{", "}", "{", "x", "\n", "<", "\\boxed", " ", "\u00a0 \t", "/", "think"]
)


def easyr1_format(response):
    return float(PATTERN.fullmatch(re.sub(r"\s*(<|>|/)\s*", r"\1", response)) is not None)


@pytest.mark.slow
@given(st.lists(PIECES, max_size=10).map("".join))
@settings(max_examples=500)
def test_the_format_score_agrees_with_the_pattern(response):
    assert format_score(response) == easyr1_format(response)


@given(st.lists(PIECES, max_size=6).map("".join), st.lists(PIECES, max_size=3).map("".join))
@settings(max_examples=300)
def test_the_format_of_nearly_good_responses(middle, end):
    response = f"<think>{middle}</think>\\boxed{{{end}"
    assert format_score(response) == easyr1_format(response)


def test_white_space_within_tags_does_not_count():
    assert format_score(" < think >so</ think>\n\\boxed{9}") == 1.0
    assert format_score("<thi nk>so</think>\\boxed{9}") == 0.0
    assert compute_score("", "< think >so< / think >\\boxed{a < b}", "a < b")["acc"] == 1.0


def test_a_response_that_is_slow_for_the_pattern_is_fast():
    hostile = "<think>" + "</think>" * 20_000 + "\\boxed{" * 20_000
    assert format_score(hostile) == 0.0  # the pattern would take hours
    assert format_score(hostile + "}") == 1.0
    assert format_score(" " * 200_000 + "x") == 0.0  # the substitution would take minutes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "truth", "score", "acc", "form"),
    [
        (r"<think>90 - 25</think> The answer is \boxed{65}.", "65", 1.0, 1.0, 1.0),
        (r"\boxed{65}", "65", 0.9, 1.0, 0.0),
        (r"<think>guess</think> \boxed{66}", "65", 0.1, 0.0, 1.0),
        ("65", "65", 0.0, 0.0, 0.0),
        ("", "65", 0.0, 0.0, 0.0),
        (r"<think>\boxed{1}</think> \boxed{4 \sqrt{3}}", r"\sqrt{48}", 1.0, 1.0, 1.0),
        (r"<think></think>\boxed{65^\circ}", "65", 1.0, 1.0, 1.0),
        (r"<think></think>\boxed{}", "65", 0.1, 0.0, 1.0),
        (r"\boxed{65", "65", 0.0, 0.0, 0.0),
        ("no box", "None", 0.0, 0.0, 0.0),
        (r"\boxed{-5}", "\N{MINUS SIGN}5", 0.9, 1.0, 0.0),
        ("\\boxed{\N{MINUS SIGN}5 cm}", "\N{MINUS SIGN}5", 0.9, 1.0, 0.0),
        (r"\boxed{65}", 65, 0.9, 1.0, 0.0),
    ],
)
def test_scores(response, truth, score, acc, form):
    assert compute_score("hiyouga/geometry3k", response, truth) == pytest.approx(
        {"score": score, "acc": acc, "format": form}
    )


@pytest.mark.slow
def test_a_batch_with_a_response_that_hangs():
    checker = AnswerChecker(seconds=1.0, processes=1)
    responses = ["<think></think>\\boxed{9**9**9**9}", "\\boxed{25/2}", "\\boxed{12.5}", "nothing"]
    rows = [RewardRow(response, "12.5") for response in responses]
    try:
        assert [result["score"] for result in geo3k_reward(rows, checker)] == pytest.approx([0.1, 0.9, 0.9, 0.0])
    finally:
        checker.close()


def test_plain_answers_need_no_other_process(monkeypatch):
    checker = AnswerChecker()
    monkeypatch.setattr(checker, "_ask", lambda pairs: pytest.fail(f"asked for {pairs}"))
    rows = [RewardRow(f"<think></think>\\boxed{{{number}}}", "35") for number in range(256)]
    results = geo3k_reward(rows, checker)
    assert [number for number, result in enumerate(results) if result["acc"]] == [35]


def test_a_row_without_ground_truth_raises_an_error_that_names_it():
    with pytest.raises(RewardError, match="row 1: there is no ground truth"):
        geo3k_reward([RewardRow("x", "1"), RewardRow("x", None)])


def test_geo3k_is_a_name():
    assert load_reward("geo3k") is geo3k_reward
    assert geo3k_reward([]) == []


@pytest.mark.parametrize("truth", [["9"], ("9", "8"), {"value": "9"}, np.array(["9"], dtype=object)])
def test_a_ground_truth_that_is_no_single_answer_is_refused(truth):
    """As text it would be "['9']", with which no answer agrees."""
    with pytest.raises(RewardError, match=r"row 0 \(uid 0-3-ab\): the ground truth .* is not one answer"):
        geo3k_reward([RewardRow(r"\boxed{9}", truth, uid="0-3-ab")])


@pytest.mark.parametrize("truth", [9, 9.0, np.int64(9), "9"])
def test_numbers_are_ground_truths(truth):
    assert geo3k_reward([RewardRow(r"\boxed{9}", truth)])[0]["acc"] == 1.0
