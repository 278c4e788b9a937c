"""The entry point as users run it: whole runs, interrupted runs, and wrong command lines."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.checkpoints import write_checkpoint
from helpers.geo3k_files import geometry3k as geometry3k_rows
from helpers.geo3k_files import write_geometry3k
from helpers.geo3k_runs import REWARD, arguments, rows_of, without_measurements
from helpers.kept_runs import load_kept
from helpers.option_files import in_files
from helpers.tiny_models import VLM_TYPES
from recipes.geo3k_grpo import PRESETS, main, parse
from recipes.run.policy_gradient import open_data_set
from recipes.watch.metrics_file import read_metrics
from recipes.watch.rollout_files import kept_steps
from rollout.prompts import PromptBuilder


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text(REWARD)
    return f"{path}:score"


@pytest.fixture(scope="module")
def geometry3k(tmp_path_factory):
    """A folder in the layout of hiyouga/geometry3k: train and test parquet files of images, problem, answer."""
    folder = tmp_path_factory.mktemp("geometry3k")
    for split, count in (("train", 12), ("test", 5)):
        write_geometry3k(folder / f"{split}-00000-of-00001.parquet", geometry3k_rows(count))
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def finished_run(checkpoint, geometry3k, reward, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    assert main(arguments(checkpoint, geometry3k, reward, directory)) == 0
    return directory


@pytest.mark.slow
def test_a_run_leaves_metrics_report_and_checkpoints(finished_run):
    rows = rows_of(finished_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    held_out = [row for row in rows if any(name.startswith("val-core/") for name in row)]
    assert [row["step"] for row in held_out] == [0, 5]
    for row in rows[1:]:
        assert row["actor/grad_norm"] > 0
        assert math.isfinite(row["actor/pg_loss"])
        assert {"critic/score/mean", "response_length/mean", "timing_s/gen", "perf/throughput"} <= row.keys()
        assert row["training/rollout_probs_diff_images_log_p99"] <= row["training/rollout_probs_diff_log_max"] < 1e-4
    assert sorted(path.name for path in finished_run.glob("global_step_*")) == ["global_step_4", "global_step_5"]
    assert kept_steps(finished_run) == [1, 2, 3, 4, 5]
    assert [len(load_kept(finished_run, step)) for step in (1, 5)] == [12, 12]  # all rows of a step
    assert all(0 <= row["mismatch"] < 1e-4 and row["images"] for row in load_kept(finished_run, 3))
    assert "<html" in (finished_run / "report.html").read_text()
    assert list((finished_run / "tensorboard").glob("events*"))
    config = json.loads((finished_run / "config.json").read_text())
    assert config["algorithm"]["n"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--algorithm.skip-old-log-probs", "--algorithm.minibatch", "2"),
        ("--lora-rank", "2", "--activation-checkpointing", "selective", "--token-budget", "300"),
    ],
)
def test_options_of_algorithm_and_model_are_there(options, checkpoint, geometry3k, reward, tmp_path):
    given = in_files(["--steps", "1", "--optimizer.lr", "1e-2", *options], tmp_path)
    assert main(arguments(checkpoint, geometry3k, reward, tmp_path / "run", *given)) == 0
    row = rows_of(tmp_path / "run")[1]
    assert 0 < row["training/rollout_probs_diff_log_max"] < 1e-4  # of the rows that met the policy that sampled them
    mismatches = [row["mismatch"] for row in load_kept(tmp_path / "run", 1)]
    known = [value for value in mismatches if value is not None]
    assert len(known) == (6 if "--algorithm.minibatch" in options else 12)
    assert max(known) < 1e-4
    assert row["actor/grad_norm"] > 0


@pytest.mark.slow
def test_the_exported_checkpoint_is_one_to_start_from(finished_run, geometry3k, reward, tmp_path):
    exported = finished_run / "global_step_5" / "actor" / "huggingface"
    assert main(arguments(str(exported), geometry3k, reward, tmp_path / "next", "--steps", "1")) == 0
    first, last = rows_of(tmp_path / "next")[0], rows_of(finished_run)[-1]
    name = next(name for name in last if name.endswith("reward/mean@1"))
    assert first[name] == last[name]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_an_interrupted_run_continues_to_the_bit(how, finished_run, checkpoint, geometry3k, reward, tmp_path):
    directory = tmp_path / "interrupted"
    command = [sys.executable, "-m", "recipes.geo3k_grpo", *arguments(checkpoint, geometry3k, reward, directory)]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while len(read_metrics(directory / "metrics.jsonl")) < 4:
        assert process.poll() is None, f"the run ended before it could be interrupted: {process.stderr.read()}"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    _, errors = process.communicate()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "--resume" in errors
        assert "Traceback" not in errors
        assert (directory / "report.html").exists()
    assert (directory / "global_step_2").exists()
    assert len(rows_of(directory)) < 6
    assert main(arguments(checkpoint, geometry3k, reward, directory, "--resume")) == 0

    assert without_measurements(rows_of(directory)) == without_measurements(rows_of(finished_run))
    for file in ("actor/huggingface/model.safetensors", "actor/training/__0_0_0.distcp"):
        assert (directory / "global_step_5" / file).read_bytes() == (finished_run / "global_step_5" / file).read_bytes()
    kept = [
        {path.name: path.read_bytes() for path in (run / "rollouts" / "training").iterdir()}
        for run in (directory, finished_run)
    ]
    assert kept[0] == kept[1]


@pytest.mark.long
@pytest.mark.parametrize("model_type", [name for name in VLM_TYPES if name != "qwen2_5_vl"])
def test_every_family_runs_the_same_loop(model_type, geometry3k, reward, tmp_path):
    path = write_checkpoint(model_type, tmp_path / "model")
    more = (
        "--steps",
        "1",
        "--algorithm.kl-coef",
        "0.1",
        "--algorithm.minibatch",
        "2",
        "--optimizer.schedule",
        "cosine",
    )
    assert main(arguments(path, geometry3k, reward, tmp_path / "run", *more)) == 0
    row = rows_of(tmp_path / "run")[1]
    assert row["actor/grad_norm"] > 0
    assert row["actor/kl_loss"] > 0  # the second mini-batch meets a policy that has left the reference
    assert row["timing_s/ref"] > 0


def test_a_single_file_holds_out_its_last_rows(geometry3k, checkpoint):
    config = parse(
        ["--preset", "any", "--model-path", checkpoint, "--data-path", f"{geometry3k}/train-00000-of-00001.parquet"]
    )
    builder = PromptBuilder.from_pretrained(checkpoint, 500)
    train_rows, held_out = open_data_set(config.data, builder)
    assert [row["index"] for row in train_rows] == list(range(10))
    assert [row["index"] for row in held_out[""]] == [10, 11]


@pytest.mark.slow
def test_a_second_run_does_not_write_over_the_first(finished_run, checkpoint, geometry3k, reward, capsys):
    before = {path.name: path.read_bytes() for path in finished_run.iterdir() if path.is_file()}
    assert main(arguments(checkpoint, geometry3k, reward, finished_run, "--optimizer.lr", "1")) == 2
    assert "earlier run" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in finished_run.iterdir() if path.is_file()}


@pytest.mark.slow
def test_other_settings_are_not_resumed_with(finished_run, checkpoint, geometry3k, reward, capsys):
    assert main(arguments(checkpoint, geometry3k, reward, finished_run, "--resume", "--optimizer.lr", "1")) == 2
    assert "optimizer.lr=1.0, but the run" in capsys.readouterr().err


@pytest.mark.slow
def test_overwriting_spares_what_is_no_run(finished_run, checkpoint, geometry3k, reward, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    assert main(arguments(checkpoint, geometry3k, reward, model, "--overwrite")) == 2
    assert "holds a model" in capsys.readouterr().err
    assert (model / "model.safetensors").exists()
    again = tmp_path / "again"
    shutil.copytree(finished_run, again)
    assert main(arguments(checkpoint, geometry3k, reward, again, "--overwrite", "--steps", "1")) == 0
    assert [row["step"] for row in rows_of(again)] == [0, 1]


@pytest.mark.slow
def test_prompts_that_are_left_out_and_rows_that_are_skipped_are_counted(checkpoint, reward, tmp_path, capsys):
    rows = [{"problem": "Find x.", "answer": str(row)} for row in range(12)]
    rows[3]["problem"] = "long " * 400
    rows[11]["problem"] = rows[5]["problem"] = None
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--on-bad-row", "skip", "--steps", "3", "--eval-rows", "2")
    assert main(arguments(checkpoint, str(path), reward, tmp_path / "run", *more)) == 0
    assert "1 rows of train exceed 500 tokens and are left out" in capsys.readouterr().out
    written = rows_of(tmp_path / "run")
    assert written[0]["data/skipped_eval_rows"] == 1
    assert written[-1]["data/skipped_rows"] == 1
    assert main(arguments(checkpoint, str(path), reward, tmp_path / "stopped")) == 2
    assert "error: row " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--algorithm.n", "1"], "needs at least 2"),
        (["--engine", "sglang"], "'sglang'"),
        (["--resume", "--overwrite"], "contradict"),
        (["--preset", "any", "--model-path", "/nowhere"], "/nowhere"),
        (["--reward", "nowhere.py:f"], "nowhere.py"),
        (["--eval-data-path", "x.parquet"], "--eval-data-path without --data-path"),
        (["--steps", "0"], "--steps 0: "),
        (["--level", "9"], "--level 9"),
        (["--max-response-length", "0"], "--max-response-length 0"),
        (["--algorithm.top-p", "2"], "--algorithm.top-p 2.0"),
        (["--stepz", "3"], "stepz"),
        (["--steps", "many"], "many"),
    ],
)
def test_mistakes_end_with_one_clear_line(wrong, message, capfd, tmp_path):
    check_refused(wrong, message, capfd, tmp_path / "run")


def test_data_that_is_not_there_is_named(checkpoint, capfd, tmp_path):
    wrong = ["--preset", "any", "--model-path", checkpoint, "--data-path", "/nowhere.parquet"]
    check_refused(wrong, "/nowhere.parquet", capfd, tmp_path / "run")


def check_refused(wrong, message, capfd, directory):
    assert main(["--output-dir", str(directory), *wrong]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not directory.exists()


def test_defaults_are_for_the_model_at_hand():
    assert parse([]) == PRESETS["tiny"]
    real = parse(["--preset", "any", "--model-path", "somewhere"])
    assert real.optimizer.lr == 1e-6
    assert real.data.batch_size == 512
    assert parse(["--seed", "3"]).run.seed == 3


@pytest.mark.slow
def test_a_judge_that_is_down_at_an_evaluation_costs_no_step(checkpoint, tmp_path, capsys):
    for split, count in (("train", 12), ("test", 5)):
        rows = [row | ({"answer": "held out"} if split == "test" else {}) for row in geometry3k_rows(count)]
        write_geometry3k(tmp_path / "data" / f"{split}-00000-of-00001.parquet", rows)
    down = tmp_path / "down"
    down.touch()
    fails = f"if ground_truth == 'held out' and __import__('os').path.exists({str(down)!r}): raise OSError('the judge is down')"
    (tmp_path / "mine.py").write_text(REWARD.replace("    return", f"    {fails}\n    return"))
    more = "--steps", "2", "--save-every", "1", "--no-eval-first"
    run = arguments(checkpoint, str(tmp_path / "data"), f"{tmp_path}/mine.py:score", tmp_path / "run", *more)
    assert main(run) == 2
    assert "the judge is down" in capsys.readouterr().err
    assert (tmp_path / "run" / "global_step_2" / "actor" / "huggingface" / "model.safetensors").is_file()
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1]
    down.unlink()
    assert main(["--resume", str(tmp_path / "run")]) == 0
    found = rows_of(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2]
    assert "actor/pg_loss" in found[1]
    assert any(name.startswith("val-core/") for name in found[1])
