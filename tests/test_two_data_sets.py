"""docs/two_data_sets.md: its files and commands, with fewer and smaller steps."""

import json
import re
import shlex
from pathlib import Path

import pytest

from recipes.demo.tiny_model import make_tiny_model
from recipes.grpo import main
from recipes.watch.metrics_file import METRICS_FILE, read_metrics

PAGE = (Path(__file__).parents[1] / "docs" / "two_data_sets.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
TRAIN, CHANGE = (shlex.split(line)[2:] for line in PAGE.splitlines() if line.startswith("dataproto grpo "))


@pytest.mark.slow
def test_the_sets_and_the_parts_are_measured_and_the_weights_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    exec(compile(FILES["make_counts.py"].replace("160", "8").replace("1040", "1004"), "make_counts.py", "exec"), {})
    model = make_tiny_model(tmp_path / "model")  # without the warm-up, which takes longer
    small = f"--preset tiny --model-path {model} --steps 2 --save-every 2 --batch-size 2 --algorithm.n 2 --eval-every 2"
    assert main([*TRAIN, *small.split()]) == 0
    assert main([*CHANGE, "steps=3"]) == 0
    rows = read_metrics(Path("outputs/counts") / METRICS_FILE)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert {"reward/right", "reward/short"} <= rows[1].keys()
    sets = {f"val-core/{kind}/acc/mean@1" for kind in ("dots", "squares")}
    assert sets <= rows[0].keys() & rows[3].keys()
    assert "held-out acc (mean of 2)" in capsys.readouterr().out
    config = json.loads(Path("outputs/counts/config.json").read_text())
    assert list(config["reward_weights"]) == [0.95, 0.05]
    assert "changes" in config
