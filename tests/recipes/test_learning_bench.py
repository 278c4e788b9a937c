"""The arithmetic of benchmarks/learning.py, on curves worked out by hand, and one run of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.learning import ALGORITHMS, Run, arguments_of, curve, is_complete, reached, spread, summarise
from recipes import grpo, ppo

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


@pytest.mark.long
def test_a_complete_run_is_read_and_not_run_again(tmp_path):
    command = [sys.executable, "benchmarks/learning.py", "--work", str(tmp_path), "--algorithms", "level2/grpo"]
    command += ["--seeds", "0", "--steps", "2"]

    def bench() -> str:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert "level2/grpo, seed 0: 2 steps" in bench()
    again = bench()
    assert "level2/grpo, seed 0: is complete, and read" in again
    assert "| grpo | 1 |" in again
