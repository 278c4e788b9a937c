"""The arithmetic of benchmarks/learning.py, on curves worked out by hand, and one run of it."""

import json
import os
import subprocess
import sys
from functools import partial
from itertools import repeat
from pathlib import Path

import pytest
import torch

from benchmarks import learning, learning_starts
from benchmarks.label_reading import (
    SIGNS,
    Drawing,
    LabelledPictures,
    ReadingBatches,
    as_tensors,
    learn_to_read,
    one_ahead,
)
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
    train_in_processes,
)
from benchmarks.learning_starts import (
    ANSWER_LENGTH,
    MODELS,
    AnsweredBatches,
    StartOptions,
    batch_of,
    make_start,
    make_start_model,
    worked_answer,
)
from recipes import grpo, ppo
from recipes.demo.figure import DrawnText
from recipes.demo.problems import make_problem
from recipes.rewards import compute_score
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
    assert config.algorithm.kl_coef == 0
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


@pytest.fixture(scope="module")
def start_models(tmp_path_factory) -> dict[int, tuple[Path, SupervisedBuilder]]:
    """Untrained, with what makes their batches."""
    work = tmp_path_factory.mktemp("starts")
    return {level: make_start_model(StartOptions(level, work / "start"), work / f"{level}") for level in MODELS}


@pytest.mark.parametrize("level", sorted(MODELS))
def test_a_start_learns_true_answers_in_the_form_that_the_reward_asks_for(level, start_models):
    row = AnsweredBatches(start_models[level][1], level, 8).row(5)
    asked, answer = (turn["content"] for turn in row["prompt"])
    problem = make_problem(5, level, 1000)
    assert asked == problem.text  # as the runs ask
    assert compute_score("synthetic", answer, problem.answer)["score"] == 1


def test_an_answer_follows_the_texts_that_count():
    kinds = {problem.kind: problem for problem in (make_problem(place, 4) for place in range(200))}
    answers = {kind: worked_answer(problem).split("</think>")[0] for kind, problem in kinds.items()}
    shown = {kind: [each.text for each in problem.shown] for kind, problem in kinds.items()}
    assert answers["special_triangle"].removeprefix("<think>").split()[:2] == shown["special_triangle"][:2]
    assert all(sum(text.count("x") for text in shown[kind]) == answers[kind].count("x") for kind in kinds)
    assert not any(sign in text for text in answers.values() for sign in "°()" + SIGNS[-22:])


@pytest.mark.parametrize("level", sorted(MODELS))
def test_a_batch_of_a_start_is_that_of_the_builder(level, start_models):
    """Pixels come as bytes from another process, and are the image processor's to the last bits."""
    builder = start_models[level][1]
    batches = AnsweredBatches(builder, level, 4)
    made = batch_of(batches[2])
    expected = builder.collate([builder.prepare(batches.row(place)) for place in range(8, 12)])
    for name, column in expected.batch.items():
        assert torch.equal(made[name], column), name
    for got, wanted in zip(made["multi_modal_inputs"], expected["multi_modal_inputs"], strict=True):
        assert torch.equal(got["image_grid_thw"], wanted["image_grid_thw"])
        torch.testing.assert_close(got["pixel_values"], wanted["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("level", "cells"), [(2, 8), (3, 12), (4, 14)])
def test_a_visual_token_has_the_signs_of_the_text_in_its_part(level, cells, start_models):
    """Pictures of level 4 are shown smaller than they are drawn."""
    pictures = LabelledPictures(start_models[level][1], level, 0)
    size = make_problem(0, level).image.size[0]
    text = DrawnText("37", (cells - 1.5) * size / cells, 2.5 * size / cells)  # column cells - 2, row 2
    shown, _, signs = pictures.tensors([Drawing(make_problem(0, level).image, [text])])
    assert (len(shown), len(signs)) == (4 * cells**2, cells**2)
    found = signs.view(cells, cells, -1)
    assert found.any(-1).nonzero().tolist() == [[2, cells - 2]]
    assert [SIGNS[sign - 1] for sign in found[2, cells - 2] if sign] == ["3", "7"]


def test_texts_of_a_crowded_picture_do_not_overlap(start_models):
    drawing = LabelledPictures(start_models[4][1], 4, 0).crowd(3)
    assert len(drawing.shown) > 20
    ink = drawing.image.convert("L")
    for text in drawing.shown:
        box = (text.x - 4, text.y - 4, text.x + 4, text.y + 4)
        assert min(ink.crop(tuple(map(round, box))).tobytes()) < 128, text
    apart = [abs(a.x - b.x) > 10 or abs(a.y - b.y) > 15 for a in drawing.shown for b in drawing.shown if a is not b]
    assert all(apart)


@pytest.mark.slow
def test_a_tower_learns_to_read(tmp_path):
    """Four pictures again and again, until it reads all their texts."""
    path, builder = make_start_model(StartOptions(2, tmp_path / "start"), tmp_path / "model")
    batch = ReadingBatches(LabelledPictures(builder, 2, 0), 4)[0]
    before = (path / "model.safetensors").read_bytes()
    read = learn_to_read(path, repeat(batch), as_tensors(batch), lr=3e-3, until=1.0, seconds=120, every=20)
    assert read == 1
    assert (path / "model.safetensors").read_bytes() != before


def test_the_next_batch_is_made_ahead():
    made = one_ahead(iter(range(10)), lambda number: number**2)
    assert [next(made) for _ in range(4)] == [0, 1, 4, 9]


@pytest.mark.parametrize("level", sorted(MODELS))
def test_every_answer_fits_into_a_response(level, start_models):
    tokenizer = start_models[level][1].tokenizer
    answers = {worked_answer(make_problem(place, level)) for place in range(500)}
    assert max(len(tokenizer(answer)["input_ids"]) for answer in answers) < ANSWER_LENGTH
    arguments = arguments_of(Run(f"level{level}", "grpo", 0, 10), Path("work"))
    assert grpo.parse(arguments).data.max_response_length == ANSWER_LENGTH


@pytest.mark.long
def test_the_start_of_a_level_is_made_once(tmp_path, monkeypatch):
    """It ends after the first update, says how much is right, and is a checkpoint that loads."""
    monkeypatch.setattr(learning_starts, "StartOptions", partial(StartOptions, batch_size=4, seconds=0, read_seconds=0))
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


@pytest.mark.slow  # two processes that import all
def test_runs_in_processes_are_told_apart_when_they_fail(tmp_path, capsys, monkeypatch):
    """A start that is no checkpoint ends its runs, and names the file with the error."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
    runs = [Run("level2", name, 0, 2, tmp_path / "none") for name in ("grpo", "rloo")]
    assert set(train_in_processes(runs, tmp_path, [], 2)) == set(runs)
    printed = capsys.readouterr().out
    for name in ("grpo", "rloo"):
        assert f"level2/{name}, seed 0: failed, see {tmp_path}/logs/level2_{name}_2_0.txt" in printed


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
    command += ["--seeds", "0", "--steps", "2", "--workers", "1"]

    def bench() -> str:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert "level1/grpo, seed 0: ended" in bench()
    assert (tmp_path / "logs" / "level1_grpo_2_0.txt").stat().st_size
    again = bench()
    assert "level1/grpo, seed 0: is complete, and read" in again
    assert "| grpo | 1 |" in again
