"""Problems by their running success: the weights, the floor, and that a resumed run continues exactly."""

import json
from itertools import islice

import numpy as np
import pytest

from dataproto import DataProto
from dataproto.errors import CheckpointError, InvalidConfig
from recipes.data.curriculum import FLOOR, Curriculum
from recipes.demo.rows import ProblemRows
from recipes.grpo import main, parse
from recipes.watch.metrics_file import read_metrics


def rollouts(places, scores):
    return DataProto.from_dict(
        non_tensors={"uid": [f"0-{place}.{number}-5f" for number, place in enumerate(places)], "score": scores}
    )


def test_chances_follow_the_weights_and_each_problem_keeps_its_floor():
    rows = Curriculum(["never", "half", "rarely", "always", "new"])
    assert rows.chances() == pytest.approx(np.full(5, 0.2))
    for _ in range(30):
        rows.observe(rollouts([0, 1, 2, 3], [0.0, 0.5, 0.1, 1.0]))
    weights = np.array([0.0, 0.25, 0.09, 0.0, 0.085])  # the new one has the mean of the others
    chances = 0.9 * weights / 0.425 + FLOOR / 5
    assert rows.chances() == pytest.approx(chances)
    first = np.zeros(5)
    for seed in range(4000):
        rows.load_state_dict(rows.state_dict())  # where a step begins
        first[next(rows.draws(seed, True, 0))[1]] += 1
    assert first / 4000 == pytest.approx(chances, abs=0.025)


def test_a_step_has_no_problem_twice_before_it_has_all():
    rows = Curriculum(range(8))
    rows.observe(rollouts(range(8), [0.5, *[0.0] * 7]))
    places = [place for _, place, _ in islice(rows.draws(0, True, 0), 20)]
    assert set(places[:8]) == set(places[8:16]) == set(range(8))
    assert len(set(places[16:])) == 4


def test_a_success_of_another_scale_is_told_once(capsys):
    rows = Curriculum(range(3))
    for scores in ([1.0, 0.0, 0.5], [1.0, -2.5, 3.0], [7.0, 0.5, 0.5]):
        rows.observe(rollouts(range(3), scores))
    (warning,) = capsys.readouterr().out.splitlines()
    assert "a success of -2.5 counts as 0" in warning


def test_few_problems_within_reach_of_many_still_take_most_of_a_run():
    rows = Curriculum(range(1000))
    rows.observe(rollouts(range(1000), [0.5] * 20 + [0.0] * 490 + [1.0] * 490))
    assert rows.chances()[:20].sum() == pytest.approx(0.9 + 0.1 * 20 / 1000)


def test_problems_within_reach_take_most_of_a_run_and_the_others_keep_a_share():
    """Of 150 problems a third are solved by a third of 8 samples, the others by 2 %: groups of 60 steps of 16."""
    chances, random = np.repeat([0.33, 0.02], [50, 100]), np.random.default_rng(0)
    rows, taken = Curriculum(range(150)), []
    for step in range(60):
        places = [place for _, place, _ in islice(rows.draws(0, True, 16 * step), 16)]
        rows.observe(rollouts(places, [random.binomial(8, chances[place]) / 8 for place in places]))
        taken.append(np.mean(np.array(places) < 50))
    assert np.mean(taken[:5]) == pytest.approx(1 / 3, abs=0.15)
    assert 0.7 < np.mean(taken[-20:]) < 0.95


def test_each_draw_has_a_name_of_its_own_and_depends_on_what_was_observed_and_its_number():
    rows, other = Curriculum(range(3)), Curriculum(range(3))
    draws = rows.draws(0, True, 0)
    names = [name for name, _, _ in islice(draws, 20)]
    rows.observe(rollouts([2], [0.5]))
    names += [name for name, _, _ in islice(draws, 30)]
    assert len(set(names)) == 50
    other.load_state_dict(rows.state_dict())
    assert names[20:] == [name for name, _, _ in islice(other.draws(0, True, 20), 30)]


def test_accuracy_counts_before_the_score_and_groups_count_once():
    rows = Curriculum(range(2))
    data = DataProto.from_dict(
        non_tensors={"uid": ["0-1.4-5f"] * 4, "score": [0.9, 0.9, 0.1, 0.1], "acc": [1.0, 1.0, 0.0, 0.0]}
    )
    found = rows.observe(data)
    assert rows.success.tolist() == [0.0, 0.5]
    assert found == {"curriculum/success": 0.5, "curriculum/seen": 0.5}


def test_a_state_of_other_rows_is_refused():
    with pytest.raises(CheckpointError, match="of 2 problems, not of 3"):
        Curriculum(range(3)).load_state_dict(Curriculum(range(2)).state_dict())
    with pytest.raises(CheckpointError, match="of 0 problems, not of 3"):
        Curriculum(range(3)).load_state_dict({})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--epochs", "2"], "no passes over the data"),
        (["--algorithm.dynamic-sampling", "4"], "dynamic sampling hides"),
        (["--rollout.staleness", "1"], "decoding ahead"),
    ],
)
def test_what_a_curriculum_does_not_go_with_is_refused(more, reason):
    with pytest.raises(InvalidConfig, match=reason):
        parse(["--data-path", "problems.jsonl", "--curriculum", *more])


def test_synthetic_problems_have_none():
    with pytest.raises(InvalidConfig, match="do not come twice"):
        parse(["--curriculum"])


@pytest.mark.long
def test_a_resumed_run_is_exact(tmp_path):
    lines = []
    for place, row in enumerate(ProblemRows(level=1)[:12]):
        row["images"][0].save(tmp_path / f"{place}.png")
        text, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        lines.append({"problem": text, "answer": truth, "images": [f"{place}.png"]})
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = (
        f"--data-path {file} --curriculum --batch-size 3 --algorithm.n 4 --eval-rows 2 --max-response-length 12 "
        "--save-every 2 --optimizer.schedule constant --optimizer.warmup-steps 0 --no-eval-first"
    ).split()
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*given, "--steps", "4", "--output-dir", str(whole)]) == 0
    assert main([*given, "--steps", "2", "--output-dir", str(cut)]) == 0
    assert main(["--resume", str(cut), "--steps", "4"]) == 0
    names = ("critic/score/mean", "actor/pg_loss", "curriculum/success", "curriculum/seen")
    found, expected = (
        [[row[name] for name in names] for row in read_metrics(run / "metrics.jsonl") if row["step"] > 2]
        for run in (cut, whole)
    )
    assert found == expected
    assert expected[-1][-1] > expected[0][-1] / 2 > 0
