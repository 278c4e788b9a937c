"""What a recipe checks of its reward before models are loaded."""

import random

import pytest

from dataproto.errors import ScoreCountMismatch
from helpers.geo3k_files import drawing
from helpers.tiny_prompts import tiny_builder
from recipes.data.problem_rows import read_row
from recipes.rewards import as_reward_function, geo3k_reward, remote_reward
from recipes.rewards.reward_check import check_reward

ROWS = [
    read_row({"problem": "<image>How many?", "answer": str(n), "images": [drawing(n)]}, n, data_source="dots")
    for n in range(5)
]


def test_a_reward_that_knows_the_truth_is_not_mentioned(capsys):
    builder = tiny_builder()
    check_reward(geo3k_reward, ROWS, builder, here=True)
    assert capsys.readouterr() == ("", "")
    assert builder.occurrences == 0  # the uids of the run are those without the check


def test_a_reward_that_does_not_is_one_line(capsys):
    def other_form(solution_str, ground_truth):
        random.random()
        return float(solution_str == f"{ground_truth}!")

    random.seed(7)
    check_reward(as_reward_function(other_form), ROWS, tiny_builder(), here=True)
    told = capsys.readouterr().err
    assert told.startswith(
        "warning: the reward does not give its best to the truth '0': it gives 0 to the truth, 0 to a wr"
    )
    assert told.count("\n") == 1
    after = random.random()
    random.seed(7)
    assert after == random.random()  # what the reward sampled here does not change the run


def test_a_reward_that_is_not_asked_is_named(capsys):
    check_reward(remote_reward("http://127.0.0.1:9/score"), ROWS, tiny_builder(), here=True)
    check_reward(geo3k_reward, ROWS, tiny_builder(), here=False)
    assert capsys.readouterr().out.splitlines() == [
        "the reward is not asked what it gives the truth: it asks something outside of this process",
        "the reward is not asked what it gives the truth: it scores in processes of its own",
    ]


def test_a_reward_without_a_score_for_a_row_ends_the_start():
    def sometimes(completions, **columns):
        return [1.0, None, 1.0]

    with pytest.raises(
        ScoreCountMismatch, match=r"^row 1 \(uid example-1, .*: sometimes returned None.*: return 0 where"
    ):
        check_reward(as_reward_function(sometimes), ROWS, tiny_builder(), here=True)
    with pytest.raises(ScoreCountMismatch, match="returned None, not a list of scores"):
        check_reward(as_reward_function(lambda completions: None), ROWS, tiny_builder(), here=True)


@pytest.mark.parametrize("number", [0, 1])
def test_a_reward_that_returns_too_few_scores_ends_the_start(number):
    def one_for_all(rows):
        return [{"score": 1.0}] * number

    for reward in (one_for_all, as_reward_function(one_for_all)):
        with pytest.raises(ScoreCountMismatch, match=f"returned {number} (results|scores) for 3 rows"):
            check_reward(reward, ROWS, tiny_builder(), here=True)
