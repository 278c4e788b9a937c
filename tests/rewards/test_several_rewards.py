"""Several rewards of one run: their weighted sum, their names, and what is checked of each."""

import pytest

from dataproto.errors import InvalidConfig, RewardError, ScoreCountMismatch
from recipes.grpo import parse
from recipes.rewards import WeightedRewards, geo3k_reward, load_reward, reward_servers
from recipes.rewards.reward_check import check_first_row, reason_not_to_ask, truth_check
from workers.roles.reward import RewardRow, uses_device

NEAR = "def near(solution_str, ground_truth):\n    return {'score': float(solution_str == ground_truth), 'acc': 1, 'tries': 3}\n"
SHORT = "def near(completions, solution):\n    return [1 / len(each) for each in completions]\n"
ROW = RewardRow("ab", "ab", columns={"solution": "x"})


@pytest.fixture
def names(tmp_path):
    for name, text in (("mine.py", NEAR), ("form.py", SHORT)):
        (tmp_path / name).write_text(text)
    return [f"{tmp_path}/mine.py:near", f"{tmp_path}/form.py:near"]


def test_the_score_is_the_weighted_sum_and_every_number_stays_by_its_name(names):
    (found,) = load_reward(names, weights=(0.8, 0.2))([ROW])
    assert found == {
        "score": pytest.approx(0.8 * 1 + 0.2 * 0.5),
        "mine/near": 1.0,
        "form/near": 0.5,
        "acc": 1,
        "tries": 3,
    }
    (unweighted,) = load_reward(names)([ROW])
    assert unweighted["score"] == 1.5
    assert load_reward(names[:1])([ROW]) == load_reward(names[0])([ROW])  # one reward has no further name


def test_each_reward_is_checked_as_it_would_be_alone(names, monkeypatch):
    monkeypatch.setattr(reward_servers, "PAUSE_S", 0.0)
    reward = load_reward(names)
    with pytest.raises(RewardError, match="needs solution, which the data does not have"):
        check_first_row(reward, {"extra_info": {}})
    assert truth_check(WeightedRewards({"geo3k": geo3k_reward, "other": reward}, (1, 1))) is not None
    assert truth_check(reward) is None
    assert reason_not_to_ask(reward) is None
    server = load_reward(["http://127.0.0.1:9/score", names[0]])
    assert reason_not_to_ask(server) == "it asks something outside of this process"
    with pytest.raises(RewardError, match=r"127\.0\.0\.1:9"):
        load_reward(["http://127.0.0.1:9/score", names[0]], here=True)
    by_model = lambda rows: []  # noqa: E731
    by_model.uses_device = True
    assert uses_device(WeightedRewards({"model": by_model, "other": reward}, (1, 1)))
    assert not uses_device(reward)


def test_a_reward_that_is_named_twice_is_refused(names):
    with pytest.raises(RewardError, match=r"--reward names .* twice: leave one out"):
        load_reward([names[0], names[0]])


def test_rewards_that_do_not_go_together_are_named():
    def one(rows):
        return [{"score": 1.0, "acc": 1.0}] * len(rows)

    with pytest.raises(
        RewardError, match="the reward two returns acc, as another one does: give its numbers other names"
    ):
        WeightedRewards({"one": one, "two": one}, (1, 1))([ROW])
    with pytest.raises(ScoreCountMismatch):
        WeightedRewards({"one": one, "none": lambda rows: []}, (1, 1))([ROW])


def test_the_command_line_takes_several_rewards_with_a_weight_for_each():
    config = parse(["--reward", "a.py:f", "b.py:g", "--reward-weights", "0.8", "0.2"])
    assert (config.reward, config.reward_weights) == (("a.py:f", "b.py:g"), (0.8, 0.2))
    assert parse(["--reward", "a.py:f"]).reward == "a.py:f"
    with pytest.raises(InvalidConfig, match="1 --reward-weights for 2 rewards"):
        parse(["--reward", "a.py:f", "b.py:g", "--reward-weights", "0.8"])
    with pytest.raises(InvalidConfig, match="--reward-weights would do nothing: one reward has the whole weight"):
        parse(["--reward", "a.py:f", "--reward-weights", "0.8"])
