"""docs/first_hour.md: its files and commands, as they stand on the page, with fewer and smaller steps."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from helpers.geo3k_runs import rows_of
from recipes import commands
from recipes.configs.grpo_config import parse
from recipes.demo.tiny_model import make_tiny_model
from recipes.grpo import main

PAGE = (Path(__file__).parents[1] / "docs" / "first_hour.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [shlex.split(line)[2:] for line in PAGE.splitlines() if line.startswith("dataproto grpo ")]


@pytest.fixture(autouse=True)
def _written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)


def test_the_page_has_all_its_commands():
    named = [option for command in COMMANDS for option in command if option.startswith("--")]
    assert {"--reward", "--algorithm.loss", "--prompt-key", "--resume", "--save-every"} <= set(named)
    for command in COMMANDS:
        assert "--resume" in command or parse(command)


def test_the_rows_are_shown_before_they_are_trained_on(capsys):
    exec(compile(FILES["make_dots.py"].replace("400", "20"), "make_dots.py", "exec"), {})
    (shown,) = (shlex.split(line)[1:] for line in PAGE.splitlines() if line.startswith("dataproto show "))
    assert commands.main(shown) == 0
    told = capsys.readouterr().out
    assert told.count("How many dots?") == 3
    assert "columns that are read: question, figure, count" in told


@pytest.mark.slow
def test_own_data_reward_and_loss_train_and_move_to_another_folder(tmp_path):
    exec(compile(FILES["make_dots.py"].replace("400", "20"), "make_dots.py", "exec"), {})
    (own,) = (each for each in COMMANDS if "--algorithm.loss" in each)
    model = (
        f"--preset tiny --model-path {make_tiny_model(tmp_path / 'model')}"  # without the warm-up, which takes longer
    )
    small = f"{model} --steps 2 --batch-size 2 --algorithm.n 2 --eval-rows 4 --output-dir outputs/first --save-every 1"
    assert main([*own, *small.split()]) == 0
    there = tmp_path / "there"
    there.mkdir()
    for name in ("outputs/first", "dots", "mine.py"):
        Path(name).rename(there / Path(name).name)
    moved = (
        "--data-path there/dots/train.jsonl --reward there/mine.py:closeness --algorithm.loss there/mine.py:reinforce"
    )
    before = (there / "first" / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(there / "first" / "global_step_2")  # as if it had been interrupted after step 1
    assert main(["--resume", "there/first", *moved.split()]) == 0
    rows = rows_of(there / "first")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["actor/pg_loss"] == json.loads(before[2])["actor/pg_loss"]
    assert main(["--resume", "there/first", *moved.split(), "--data-path", "there/mine.py"]) == 2  # other data
