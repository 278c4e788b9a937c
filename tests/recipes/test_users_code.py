"""Errors in users' own functions, by file and line, and a run that continues by its directory alone."""

import json
import re

import pytest

from helpers.checkpoints import write_checkpoint
from helpers.geo3k_files import drawing
from helpers.geo3k_runs import rows_of
from recipes import sft
from recipes.grpo import main, parse

MINE = """
def loss(log_probs, advantages):
    return -advantages * log_probs, {}

def failing_loss(log_probs, advantages):
    return halved(advantages)

def halved(x):
    return {}["half"]

def failing_advantage(token_level_rewards):
    raise ValueError("no baseline")

def score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 2)

def failing_score(data_source, solution_str, ground_truth, extra_info):
    return {}[ground_truth]
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A command line without output directory."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    (folder / "broken.py").write_text("x = 1\ny = x / 0\n")
    (folder / "unfinished.py").write_text("x = 1\ny = (\n")
    options = "--steps 1 --batch-size 2 --algorithm.n 2 --eval-rows 2 --max-prompt-length 500 --max-response-length 4"
    model = write_checkpoint("qwen2_5_vl", folder / "model")
    return [
        *options.split(),
        "--preset",
        "any",
        "--model-path",
        model,
        "--reward",
        f"{folder / 'mine.py'}:score",
    ], folder


@pytest.mark.parametrize(
    ("option", "function", "message"),
    [
        ("--algorithm.loss", "mine.py:failing_loss", "mine.py:9, in halved)"),
        ("--algorithm.advantage", "mine.py:failing_advantage", "raised ValueError: no baseline ("),
        ("--reward", "mine.py:failing_score", "mine.py:18, in failing_score)"),
        ("--reward", "broken.py:score", "ZeroDivisionError: division by zero ("),
        ("--reward", "unfinished.py:score", "unfinished.py, line 2)"),
    ],
)
@pytest.mark.slow
def test_an_error_of_ones_own_function_is_one_line_with_its_place(option, function, message, given, tmp_path, capfd):
    options, folder = given
    assert main([*options, "--output-dir", str(tmp_path / "run"), option, f"{folder}/{function}"]) == 2
    errors = capfd.readouterr().err
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in errors
    if function == "mine.py:failing_score":
        assert line.startswith("error: row 0 (uid ")
        assert ", response '" in line


def test_a_loss_of_ones_own_tells_that_the_presets_kl_term_is_gone(given, capsys):
    own = ["--algorithm.loss", f"{given[1]}/mine.py:loss"]
    parse(own)
    told = f"no KL term: --algorithm.loss {own[1]} replaces that of tiny; --algorithm.kl-coef 0.1 keeps it\n"
    assert capsys.readouterr().out == told
    for others in (["--algorithm.kl-coef", "0.0"], ["--preset", "any", "--model-path", given[0][-3]]):
        parse([*own, *others])
        assert not capsys.readouterr().out


GROUNDING = """
def iou(completions, solution, photo, **kwargs):
    return [{"score": float(box[2] == picture.width), "iou": 0.25} for box, picture in zip(solution, photo)]

def sized(completions, solution, size, **kwargs):
    return [0.0] * len(completions)
"""


@pytest.mark.slow
def test_trls_reward_gets_columns_and_pictures_by_name_and_its_numbers_are_metrics(given, tmp_path, capsys):
    options, _ = given
    rows = []
    for n in range(10):
        drawing(n, (28 + 4 * n, 28)).save(tmp_path / f"{n}.png")
        rows.append({"problem": "<image>Where?", "solution": [0, 0, 28 + 4 * n, 28], "photo": f"{n}.png"})
    data = tmp_path / "boxes.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(GROUNDING)
    own = ["--data-path", str(data), "--image-key", "photo", "--output-dir", str(tmp_path / "run"), "--reward"]
    assert main([*options, *own, f"{tmp_path}/mine.py:sized"]) == 2
    told = capsys.readouterr()
    assert "sized needs size, which the data does not have" in told.err
    assert "its columns are photo, problem, solution, and every reward gets answer, completions, " in told.err
    assert "loading the actor" not in told.out
    assert main([*options, *own, f"{tmp_path}/mine.py:iou"]) == 0
    first, last = rows_of(tmp_path / "run")
    assert last["critic/score/mean"] == 1.0
    assert last["reward/iou"] == 0.25
    assert first["val-aux/boxes/iou/mean@1"] == 0.25


def test_the_traceback_is_there_for_the_asking(given, tmp_path, capfd):
    options, folder = given
    own = ["--traceback", "--reward", f"{folder}/broken.py:score", "--output-dir", str(tmp_path / "run")]
    assert main([*options, *own]) == 2
    errors = capfd.readouterr().err
    assert 'broken.py", line 2, in <module>' in errors
    assert errors.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
def test_a_run_continues_by_its_directory_alone(given, tmp_path):
    options, _ = given
    directory = tmp_path / "run"
    assert main([*options, "--output-dir", str(directory)]) == 0
    assert main(["--resume", str(directory), "--steps", "2"]) == 0
    assert [row["step"] for row in rows_of(directory)] == [0, 1, 2]
    assert "steps: 2" in (directory / "config.yaml").read_text()


def test_data_without_a_model_are_announced(tmp_path, capsys):
    wrong = ["--data-path", f"{tmp_path}/nowhere.jsonl", "--output-dir", str(tmp_path / "run")]
    assert sft.main(wrong) == 2
    told = capsys.readouterr().out.splitlines()[0]
    assert told.startswith(f"no --model-path: trains the small Qwen2.5-VL made on the spot on {tmp_path}/nowhere.jsonl")


def test_data_without_a_ground_truth_stop_before_anything_is_loaded(given, tmp_path, capsys):
    options, _ = given
    rows = [{"problem": f"{n} + 1?", "label": str(n + 1)} for n in range(10)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [*options[: options.index("--reward")], "--data-path", str(data), "--output-dir", str(tmp_path / "out")]
    assert main(own) == 2
    told = capsys.readouterr()
    assert re.search(r"row 0: line 1 of \S+: there is no ground truth", told.err)
    assert "--answer-key" in told.err
    assert "its columns are label, problem" in told.err
    assert "loading the actor" not in told.out
    assert main([*own, "--answer-key", "label"]) == 0


@pytest.mark.slow
def test_a_row_without_an_answer_stops_a_run_before_anything_is_loaded_or_is_skipped(given, tmp_path, capsys):
    options, _ = given
    rows = [{"problem": f"{n} + 1?", "answer": None if n == 3 else str(n + 1)} for n in range(10)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [*options[: options.index("--reward")], "--data-path", str(data), "--steps", "4", "--output-dir"]
    assert main([*own, str(tmp_path / "stopped")]) == 2
    told = capsys.readouterr()
    assert re.search(r"row 3: line 4 of \S+: there is no ground truth", told.err)
    assert "loading the actor" not in told.out
    assert main([*own, str(tmp_path / "run"), "--on-bad-row", "skip"]) == 0
    assert rows_of(tmp_path / "run")[-1]["data/skipped_rows"] == 1
