"""The loop around a step function: its records, evaluations, checkpoints and reports, and the batches that it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidConfig, MissingColumn, RewardError
from helpers.checkpoints import write_checkpoint
from helpers.kept_runs import load_kept, scored_batch
from recipes.grpo import parse, policy_loss
from recipes.run import RunConfig, recorded_run, run, train
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.rollout_files import kept_steps
from workers import Roles
from workers.training.checkpoint import checkpoint_steps, write_state


class Actor:
    """Counts what it learns, and saves the count."""

    closed_reason: str | None = None
    learned = 0

    def save(self, directory: Path, in_background: bool = False) -> None:
        write_state({"learned": torch.tensor(self.learned)}, directory / "training")
        (directory / "huggingface").mkdir()
        (directory / "learned").write_text(str(self.learned))

    def load(self, directory: Path) -> None:
        self.learned = int((directory / "learned").read_text())

    def finish_save(self) -> None:
        """Everything is on disk already."""


class Rollout:
    def mark_stale(self) -> None:
        """There are no weights."""


class Batches:
    """Two rows each, numbered from 0."""

    def __init__(self, column: str = "uid") -> None:
        self.column, self.drawn = column, 0
        self.skipped: dict[int, str] = {}

    def __next__(self) -> DataProto:
        self.drawn += 2
        return DataProto.from_dict(non_tensors={self.column: [str(self.drawn - 2), str(self.drawn - 1)]})

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def learn(roles, prompts):
    roles.actor.learned += 1
    return prompts, {"first": float(prompts["uid"][0])}


def rows(data, metrics, devices):
    return {"rows": len(data) * devices}


def start():
    return Roles(
        Actor(), Rollout(), {}, devices=3, start_seconds={"loading the actor": 2.0, "starting (all)/model": 0.5}
    )


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_times(row):
    return {name: value for name, value in row.items() if not name.startswith(("timing_s/", "perf/"))}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda roles, prompts: prompts, "the step returned DataProto: it must end with `return data, metrics`"),
        (lambda roles, prompts: (prompts, 0.5), r"returned \(DataProto, float\)"),
        (lambda roles, prompts: (prompts, {"kl": torch.ones(2)}), r"metric 'kl' is a Tensor of shape \(2,\)"),
        (lambda roles, prompts: (prompts, {"kl": None}), "metric 'kl' is a NoneType: a metric is one number"),
    ],
)
def test_a_step_that_returns_something_else_is_told_so(step, message, tmp_path):
    with pytest.raises(InvalidConfig, match=message), start() as roles:  # of two rows, which unpack like a result
        train(RunConfig(steps=1, output_dir=tmp_path), roles, Batches(), step, measure=rows)


def test_a_step_with_other_arguments_is_told_so_before_anything_begins(tmp_path):
    def step(roles, prompts, cfg, sampling, state):
        raise AssertionError("called")

    with pytest.raises(InvalidConfig, match=r"is no step\(roles, prompts, config, sampling, state\): missing .*'cfg'"):
        run(parse(["--steps", "1", "--output-dir", str(tmp_path / "run")]), step)
    assert not (tmp_path / "run").exists()


def test_a_run_records_each_step_evaluates_and_saves(tmp_path):
    run = RunConfig(steps=3, eval_every=2, save_every=2, output_dir=tmp_path)
    with recorded_run(run), start() as roles:
        train(run, roles, Batches(), learn, lambda roles, step: {"evaluated": roles.actor.learned}, measure=rows)
    written = rows_of(tmp_path)
    assert without_times(written[0]) == {"step": 0, "evaluated": 0}
    assert without_times(written[1]) == {"step": 1, "first": 0, "data/skipped_rows": 0, "rows": 6}
    assert [row.get("evaluated") for row in written] == [0, None, 2, 3]
    assert {"timing_s/step", "timing_s/data"} <= written[1].keys()
    assert written[0]["perf/start_s/loading_the_actor"] == 2.0
    assert written[0]["perf/start_s/starting/model"] == 0.5
    assert not any(name.startswith("perf/start_s") for row in written[1:] for name in row)
    assert checkpoint_steps(tmp_path) == [2, 3]
    assert (tmp_path / "report.html").is_file()
    assert json.loads((tmp_path / "config.json").read_text())["run"]["steps"] == 3


def test_the_evaluation_before_the_first_step_can_be_left_out(tmp_path):
    run = RunConfig(steps=2, eval_first=False, output_dir=tmp_path)
    with recorded_run(run), start() as roles:
        train(run, roles, Batches(), learn, lambda roles, step: {"evaluated": roles.actor.learned}, measure=rows)
    assert [(row["step"], row.get("evaluated")) for row in rows_of(tmp_path)] == [(1, None), (2, 2)]
    assert (tmp_path / "report.html").is_file()


def test_a_resumed_run_continues_after_its_checkpoint(tmp_path):
    for steps, resume in ((2, False), (4, True)):
        run = RunConfig(steps=steps, resume=resume, save_every=1, output_dir=tmp_path)
        with recorded_run(run), start() as roles:
            train(run, roles, Batches(), learn, measure=rows)
            assert roles.actor.learned == steps
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
    assert [row["first"] for row in rows_of(tmp_path)] == [0, 2, 4, 6]


def scoring(scores, measure="val-core/a/acc/mean@1"):
    return lambda roles, step: {measure: scores[step]}


def best_of(directory):
    found = json.loads((directory / "best.json").read_text())
    return found["step"], found["value"]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, in_background):
    accuracy = [
        0.9,
        0.2,
        0.7,
        0.7,
        0.4,
        0.3,
    ]  # before the first step there is no checkpoint; of equal ones the first is best
    run = RunConfig(
        steps=5,
        eval_every=1,
        save_every=3,
        keep_checkpoints=1,
        keep_best="accuracy",
        save_in_background=in_background,
        output_dir=tmp_path,
    )
    with recorded_run(run), start() as roles:
        train(run, roles, Batches(), learn, scoring(accuracy), measure=rows)
    assert checkpoint_steps(tmp_path) == [2, 5]
    assert best_of(tmp_path) == (2, 0.7)
    assert (tmp_path / "global_step_2" / "actor" / "learned").read_text() == "2"


def test_a_resumed_run_knows_the_best_step(tmp_path):
    options = {"eval_every": 1, "save_every": 2, "keep_checkpoints": 1, "keep_best": "loss", "output_dir": tmp_path}
    loss = [9.0, 3.0, 1.0, 2.0, 2.0, 1.5, 0.5]
    for steps, kept in ((4, [2, 4]), (5, [2, 5]), (6, [6])):
        run = RunConfig(steps=steps, resume=steps > 4, **options)
        if steps == 5:  # what a killed run may not have written
            (tmp_path / "best.json").unlink()
        with recorded_run(run), start() as roles:
            train(run, roles, Batches(), learn, scoring(loss, "val/loss"), measure=rows)
        assert checkpoint_steps(tmp_path) == kept
        assert best_of(tmp_path) == (kept[0], loss[kept[0]])


class Judge:
    """An evaluation that draws random numbers, and fails once at a step."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.asked = fails_at, []

    def __call__(self, roles: Roles, step: int) -> dict[str, float]:
        self.asked.append(step)
        torch.rand(3)
        if step == self.fails_at:
            self.fails_at = None
            raise RewardError("the judge is down")
        return {"val/loss": [9.0, 3.0, 1.0, 2.0, 2.0][step]}


def random_step(roles, prompts):
    roles.actor.learned += 1
    return prompts, {"drawn": float(torch.rand(()))}


def judged(directory: Path, judge: Judge, **options) -> None:
    given = {"steps": 4, "eval_every": 1, "save_every": 2, "keep_checkpoints": 1, "keep_best": "loss"} | options
    run = RunConfig(output_dir=directory, **given)
    torch.manual_seed(run.resume)  # a resumed process begins with other random states
    with recorded_run(run), start() as roles:
        train(run, roles, Batches(), random_step, judge, measure=rows)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("failing", [2, 4])
def test_an_evaluation_that_fails_costs_no_step(tmp_path, failing, in_background):
    """Its step has its checkpoint, and the resumed run makes up for the evaluation: no number differs."""
    judge, whole = Judge(failing), tmp_path / "whole"
    judged(whole, Judge())
    with pytest.raises(RewardError, match="the judge is down"):
        judged(tmp_path / "run", judge, save_in_background=in_background)
    assert checkpoint_steps(tmp_path / "run")[-1] == failing
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(failing))
    judged(tmp_path / "run", judge, resume=True)
    assert judge.asked == [*range(failing + 1), *range(failing, 5)]
    assert [*map(without_times, rows_of(tmp_path / "run"))] == [*map(without_times, rows_of(whole))]
    assert checkpoint_steps(tmp_path / "run") == checkpoint_steps(whole) == [2, 4]
    assert best_of(tmp_path / "run") == best_of(whole) == (2, 1.0)


def test_a_run_that_ends_between_an_evaluation_and_the_next_checkpoint_knows_what_it_found(tmp_path):
    """The checkpoint of step 2 was written before step 2 was known to be the best."""
    judged(tmp_path, Judge(), steps=2)
    (tmp_path / "best.json").unlink()
    judge = Judge()
    judged(tmp_path, judge, resume=True)
    assert judge.asked == [3, 4]
    assert checkpoint_steps(tmp_path) == [2, 4]
    assert best_of(tmp_path) == (2, 1.0)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_best_step_that_has_its_checkpoint_already_replaces_the_one_before(tmp_path, in_background):
    judged(tmp_path, Judge(), steps=2, save_every=1, save_in_background=in_background)
    assert checkpoint_steps(tmp_path) == [2]  # step 1 was the best before
    assert best_of(tmp_path) == (2, 1.0)


def test_a_measure_that_nothing_gives_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="give --eval-every"):
        RunConfig(keep_best="loss")
    run = RunConfig(steps=2, eval_every=1, keep_best="loss", output_dir=tmp_path)
    with pytest.raises(InvalidConfig, match="no held-out loss"), start() as roles:
        train(run, roles, Batches(), learn, scoring([0.5] * 3), measure=rows)


def test_each_step_keeps_its_rollouts_once_also_after_a_resume(tmp_path):
    def scored(roles, prompts):
        roles.actor.learned += 1
        return scored_batch(["x", "y"], [0.0, float(prompts["uid"][0])], ["a", "a"]), {}

    for steps, resume, save_every in ((3, False, 2), (2, True, 2)):
        run = RunConfig(steps=steps, resume=resume, save_every=save_every, output_dir=tmp_path)
        if resume:  # as if the run had been killed in step 3
            shutil.rmtree(tmp_path / "global_step_3")
        with recorded_run(run), start() as roles:
            train(run, roles, Batches(), scored, measure=rows, kept=KeptRollouts(tmp_path, 8))
    assert kept_steps(tmp_path) == [1, 2]
    assert [[row["reward"] for row in load_kept(tmp_path, step)] for step in (1, 2)] == [[0, 0], [0, 2]]
    assert "timing_s/keep_rollouts" in rows_of(tmp_path)[-1]


def test_the_report_is_written_after_an_error_too(tmp_path):
    run = RunConfig(output_dir=tmp_path)
    with pytest.raises(ZeroDivisionError), recorded_run(run), start() as roles:
        train(run, roles, Batches(), lambda roles, prompts: 1 / 0, measure=rows)
    assert (tmp_path / "report.html").is_file()


def test_prompts_without_uids_are_refused(tmp_path):
    with pytest.raises(MissingColumn, match="'uid'"):
        train(RunConfig(steps=1, output_dir=tmp_path), start(), Batches("index"), learn, measure=rows)


def best_of_prompt(roles, prompts, config, sampling, state):
    """REINFORCE on the samples that score best in the batch."""
    data = roles.rollout.generate(prompts, sampling)
    data |= roles.reward.score(data)
    scores = data["token_level_rewards"].sum(1, keepdim=True)
    data["advantages"] = (scores == scores.max()) * data["response_mask"].float()
    metrics = roles.actor.update(data, policy_loss(config), config.minibatch, entropy=True)
    roles.sync_weights()
    return data, metrics | {"mine/samples": len(data)}


@pytest.mark.slow
def test_an_algorithm_of_a_user_runs_with_the_options_of_grpo(tmp_path):
    given = (
        "--steps 2 --batch-size 2 --algorithm.n 3 --eval-rows 2 --eval-samples 3 --max-prompt-length 500 --max-response-length 4"
        f" --preset any --model-path {write_checkpoint('qwen2_5_vl', tmp_path / 'model')} --output-dir {tmp_path / 'run'}"
    )
    assert run(parse(given.split()), best_of_prompt) == tmp_path / "run" / "report.html"
    written = rows_of(tmp_path / "run")
    assert [row.get("mine/samples") for row in written] == [None, 6, 6]
    assert all("critic/score/mean" in row and row["actor/grad_norm"] > 0 for row in written[1:])
    assert {"mean@3", "best@3/mean", "pass@3"} == {
        name.split("/acc/")[1] for name in written[-1] if name.startswith("val-core/") and "/acc/" in name
    }
    assert checkpoint_steps(tmp_path / "run") == [2]
