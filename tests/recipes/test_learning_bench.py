"""The arithmetic of benchmarks/learning.py, on curves worked out by hand, and one run of it."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks import learning, learning_starts
from benchmarks.learning import (
    ALGORITHMS,
    Run,
    arguments_of,
    cpu_seconds,
    curve,
    is_complete,
    reached,
    seconds_beside,
    spread,
    summarise,
)
from benchmarks.learning_starts import (
    ALONE,
    ANSWER,
    ANSWER_LENGTH,
    MODELS,
    AnsweredBatches,
    Numbers,
    StartOptions,
    batch_of,
    make_start,
    make_start_model,
)
from recipes import grpo, ppo
from recipes.data import Answered, ProblemRows
from recipes.synthetic import make_problem
from recipes.tiny import make_tiny_model
from rollout.prompts import SupervisedBuilder

ROOT = Path(__file__).parents[2]


def write_run(this: Run, work: Path, accuracies: dict[int, float]) -> None:
    """A run with two CPU seconds a step and the given accuracies by step."""
    rows = [{"step": 0}] + [{"step": step, "timing_cpu_s/step": 2.0} for step in range(1, this.steps + 1)]
    for step, accuracy in accuracies.items():
        rows[step] |= {"val-core/easy_vqa/acc/mean@1": accuracy, "val-aux/other/acc/mean@1": 0.0}
    directory = this.directory(work)
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_curve_counts_steps_samples_and_seconds(tmp_path):
    this = Run("easy_vqa", "grpo", 0, 4)
    write_run(this, tmp_path, {0: 0.2, 2: 0.4, 4: 0.8})
    assert curve(this.directory(tmp_path)) == [
        {"step": 0, "samples": 0, "seconds": 0, "accuracy": 0.2},
        {"step": 2, "samples": 512, "seconds": 4, "accuracy": 0.4},
        {"step": 4, "samples": 1024, "seconds": 8, "accuracy": 0.8},
    ]


@pytest.mark.parametrize(("target", "step"), [(0.1, 0), (0.2, 0), (0.3, 1), (0.4, 2), (0.6, 3), (0.8, 4), (0.9, None)])
def test_a_target_is_reached_between_evaluations(tmp_path, target, step):
    this = Run("easy_vqa", "grpo", 0, 4)
    write_run(this, tmp_path, {0: 0.2, 2: 0.4, 4: 0.8})
    found = reached(curve(this.directory(tmp_path)), target, "step")
    assert found == (None if step is None else pytest.approx(step))


def test_medians_and_ranges():
    assert spread([1.0, 3.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert spread([1.0, None], 0) == "1 (1 to 1), 1 of 2"
    assert spread([None, None], 0) == "not reached"


@pytest.mark.slow  # matplotlib looks for fonts in a process
def test_the_table_has_complete_runs_only(tmp_path):
    runs = [Run("easy_vqa", name, seed, 4) for name in ("grpo", "dapo") for seed in (0, 1)]
    write_run(runs[0], tmp_path, {0: 0.2, 2: 0.4, 4: 0.8})
    write_run(runs[1], tmp_path, {0: 0.2, 2: 0.5, 4: 0.6})
    write_run(runs[2], tmp_path, {0: 0.2, 2: 0.2, 4: 0.2})
    runs[3].directory(tmp_path).mkdir(parents=True)
    (runs[3].directory(tmp_path) / "metrics.jsonl").write_text('{"step": 0}\n')
    assert [is_complete(this, tmp_path) for this in runs] == [True, True, True, False]
    text = summarise(tmp_path, runs, 4, ["easy_vqa/trl"])
    assert "Left out: easy_vqa/trl" in text
    assert "target accuracy 0.450" in text  # midway from 0.2 to the median of 0.8 and 0.6
    expected = (
        "| grpo | 2 | 0.200 (0.200 to 0.200) | 0.700 (0.600 to 0.800) | 2 (2 to 2) | 512 (427 to 576) | 4 (3 to 4) |"
    )
    assert expected.split(" | ")[:4] == next(line for line in text.splitlines() if "| grpo" in line).split(" | ")[:4]
    assert (
        "| dapo | 1 | 0.200 (0.200 to 0.200) | 0.200 (0.200 to 0.200) | not reached | not reached | not reached |"
        in text
    )
    assert (tmp_path / "easy_vqa.png").stat().st_size > 10_000


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "trl"])
def test_every_run_has_a_command_line_that_its_recipe_takes(tmp_path, algorithm):
    recipe = ppo if algorithm == "ppo" else grpo
    config = recipe.parse(arguments_of(Run("level3", algorithm, 2, 30), tmp_path))
    assert (config.run.steps, config.run.seed, config.algorithm.n, config.data.batch_size) == (30, 2, 16, 16)
    assert config.algorithm.settings.kl_coef == 0
    assert config.data.level == 3


@pytest.mark.slow  # matplotlib looks for fonts in a process
def test_complete_runs_of_several_directories_are_drawn_together(tmp_path):
    """An interrupted run in the first directory, without its checkpoints, does not hide a complete one in the second."""
    here, there = tmp_path / "here", tmp_path / "there"
    runs = [Run("level2", "grpo", seed, 4) for seed in (0, 1)]
    write_run(runs[0], here, {0: 0.2, 2: 0.4, 4: 0.8})
    write_run(runs[1], there, {0: 0.2, 2: 0.5, 4: 0.6})
    runs[1].directory(here).mkdir(parents=True)
    (runs[1].directory(here) / "metrics.jsonl").write_text("")
    assert "| grpo | 1 |" in summarise(here, runs, 4)
    assert "| grpo | 2 |" in summarise(here, runs, 4, read=[there])


def test_trl_has_the_seconds_of_a_run_in_another_directory(tmp_path):
    write_run(Run("level2", "grpo", 0, 4), tmp_path / "there", {0: 0.2, 4: 0.8})
    assert seconds_beside(Run("level2", "trl", 0, 4), tmp_path / "here", [tmp_path / "there"]) == 8


def test_the_seconds_of_started_processes_count():
    """A process that computes for half a second, and waits until it was measured."""
    code = "import time, sys\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\nsys.stdin.read()"
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        taken = cpu_seconds() - before
        process.stdin.close()
    assert taken >= 0.45  # the kernel counts in hundredths


def test_a_start_learns_true_answers_in_the_form_of_the_warm_up():
    row = Answered(ProblemRows(3, 0), ANSWER)[1]
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant"]
    assert row["prompt"][1]["content"] == rf"<think>look</think> \boxed{{{row['reward_model']['ground_truth']}}}"


def test_a_batch_of_a_start_is_that_of_the_builder(tmp_path):
    """Pixels come as bytes from another process, and are the image processor's to the last bits."""
    builder = SupervisedBuilder.from_pretrained(make_tiny_model(tmp_path / "model"), 512)
    batches = AnsweredBatches(builder, 2, 8, numbers=2)
    made = batch_of(batches[2])
    shown = [len(row["pixel_values"]) for row in made["multi_modal_inputs"]]
    assert set(shown) == {16, 64}  # patches of a number and of level 2
    chosen = Random("batch/2").choices(batches.sources, batches.later, k=8)
    rows = [source[16 + place] for place, source in enumerate(chosen)]
    expected = builder.collate([builder.prepare(row) for row in rows])
    for name, column in expected.batch.items():
        assert torch.equal(made[name], column), name
    for got, wanted in zip(made["multi_modal_inputs"], expected["multi_modal_inputs"], strict=True):
        assert torch.equal(got["image_grid_thw"], wanted["image_grid_thw"])
        torch.testing.assert_close(got["pixel_values"], wanted["pixel_values"], rtol=0, atol=1e-6)
    assert {len(row["pixel_values"]) for row in batch_of(batches[1])["multi_modal_inputs"]} == {16}


def test_half_of_the_questions_of_a_start_ask_for_the_answer_alone(tmp_path):
    batches = AnsweredBatches(SupervisedBuilder.from_pretrained(make_tiny_model(tmp_path / "model"), 512), 3, 8, 2)
    turns = [[turn["content"] for turn in source[5]["prompt"]] for source in batches.sources]
    answers = [source[5]["reward_model"]["ground_truth"] for source in batches.sources]
    alone, formed = turns[::2], turns[1::2]
    assert [answer for _, answer in alone] == answers[::2]
    assert [answer for _, answer in formed] == [ANSWER.format(answer=answer) for answer in answers[1::2]]
    assert [question for question, _ in alone] == [f"{question} {ALONE}" for question, _ in formed]
    assert formed[2][0] == ProblemRows(3, 1000)[5]["prompt"][0]["content"]  # as the runs ask


def test_a_number_is_anywhere_in_its_picture():
    rows = [Numbers(5)[place] for place in range(64)]
    assert {row["images"][0].size for row in rows} == {(56, 56)}
    assert len({row["reward_model"]["ground_truth"] for row in rows}) > 40
    places = {row["images"][0].convert("L").point(lambda value: value < 128, "1").getbbox() for row in rows}
    assert len(places) > 40
    assert Numbers(5)[3]["images"][0].tobytes() == rows[3]["images"][0].tobytes()


@pytest.mark.parametrize("level", sorted(MODELS))
def test_every_answer_fits_into_a_response(level, tmp_path):
    tokenizer = make_start_model(StartOptions(level, tmp_path / "start"), tmp_path / "model")[1].tokenizer
    answers = {make_problem(place, level).answer for place in range(500)}
    assert max(len(tokenizer(ANSWER.format(answer=answer))["input_ids"]) for answer in answers) < ANSWER_LENGTH


@pytest.mark.long
def test_the_start_of_a_level_is_made_once(tmp_path, monkeypatch):
    """It ends after the first update, says how much is right, and is a checkpoint that loads."""
    monkeypatch.setattr(learning_starts, "StartOptions", partial(StartOptions, batch_size=4, seconds=0))
    made = make_start("level2", 0, tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in made.iterdir()}
    assert {path.name for path in made.parent.iterdir()} == {"checkpoint", "lock"}
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert make_start("level2", 0, tmp_path) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == written


def test_runs_start_from_a_given_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "drawn_start", lambda task, seed, work: work / "made")
    assert Run("level2", "grpo", 0, 4).checkpoint(tmp_path) == tmp_path / "made"
    assert Run("level2", "grpo", 0, 4, Path("given")).checkpoint(tmp_path) == Path("given")


@pytest.mark.parametrize("names", [["level2/*", "level3/grpo"], ["easy_vqa/grpo"]])
def test_a_given_checkpoint_is_for_one_drawn_level(names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learning.py", "--work", "w", "--start", "s", "--algorithms", *names])
    with pytest.raises(SystemExit):
        learning.parse()
    assert "--start is for the runs of one drawn level" in capsys.readouterr().err


@pytest.mark.long
def test_a_complete_run_is_read_and_not_run_again(tmp_path):
    """Of an earlier attempt only the metrics are left: it begins again."""
    earlier = Run("level1", "grpo", 0, 2).directory(tmp_path)
    earlier.mkdir(parents=True)
    (earlier / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    command = [sys.executable, "benchmarks/learning.py", "--work", str(tmp_path), "--algorithms", "level1/grpo"]
    command += ["--seeds", "0", "--steps", "2"]

    def bench() -> str:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert "level1/grpo, seed 0: 2 steps" in bench()
    again = bench()
    assert "level1/grpo, seed 0: is complete, and read" in again
    assert "| grpo | 1 |" in again
