"""Reward functions in EasyR1's form, as its examples have them."""

import textwrap

import numpy as np
import pytest
import torch

from dataproto import DataProto
from dataproto.errors import RewardError
from recipes.rewards import RewardRow, as_reward_function, load_reward
from workers.roles.reward import reward_rows

ROWS = [RewardRow("9", "9", response_length=1), RewardRow("<think> no", "8", response_length=4)]

BATCH = """
    REWARD_NAME = "short"
    REWARD_TYPE = "batch"

    def compute_score(reward_inputs, format_weight=0.1):
        if not isinstance(reward_inputs, list):
            raise ValueError("Please use `reward_type=batch`.")
        scores = []
        for reward_input in reward_inputs:
            accuracy = float(reward_input["response"] == reward_input["ground_truth"])
            overall = (1 - format_weight) * accuracy - reward_input["response_length"]
            scores.append({"overall": overall, "format": 0.5, "accuracy": accuracy})
        return scores
"""

SEQUENTIAL = """
    REWARD_TYPE = "sequential"

    def compute_score(item, scale=2.0):
        return {"overall": scale * item["response_length"], "accuracy": item["response"] == item["ground_truth"]}
"""


def written(tmp_path, source):
    file = tmp_path / "reward.py"
    file.write_text(textwrap.dedent(source))
    return f"{file}:compute_score"


def test_the_batch_form_gets_all_rows_at_once(tmp_path):
    assert load_reward(written(tmp_path, BATCH))(ROWS) == [
        {"score": pytest.approx(0.9 - 1), "format": 0.5, "acc": 1.0},
        {"score": -4.0, "format": 0.5, "acc": 0.0},
    ]


def test_the_sequential_form_gets_one_row_at_a_time(tmp_path):
    expected = [{"score": 2.0, "acc": 1.0}, {"score": 8.0, "acc": 0.0}]
    assert load_reward(written(tmp_path, SEQUENTIAL))(ROWS) == expected


def test_without_a_type_the_argument_tells_the_form():
    def one(reward_input):
        return {"overall": reward_input["response_length"]}

    def several(reward_inputs):
        return [one(each) for each in reward_inputs]

    for function in (one, several):
        assert as_reward_function(function)(ROWS) == [{"score": 1.0}, {"score": 4.0}]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ([{"accuracy": 1.0}, {}], "row 0: .* not a dict with 'overall'"),
        ([{"overall": 1.0}, 0.5], "row 1: .* not a dict with 'overall'"),
        ([{"overall": 1.0}, {"overall": float("nan")}], "row 1.*: .* must be a finite number"),
        ([{"overall": 1.0}], "1 scores for 2 rows"),
        (None, "not a list of scores"),
    ],
)
def test_results_without_an_overall_score_are_refused(returned, reason):
    with pytest.raises(RewardError, match=reason):
        as_reward_function(lambda reward_inputs: returned)(ROWS)


def test_rows_have_the_number_of_sampled_tokens():
    data = DataProto.from_dict(
        {"responses": torch.zeros(2, 3), "response_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])},
        non_tensors={"data_source": np.array(["a", "b"], dtype=object)},
    )
    assert [row.response_length for row in reward_rows(data, ["x y", ""])] == [2, 0]
