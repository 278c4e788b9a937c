"""The README's step runs, and the documents show the source of the recipe itself."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from recipes.grpo import grpo_step
from recipes.watch.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]


def python_blocks(document):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_step_in_the_readme_trains(tmp_path, monkeypatch):
    (shown,) = python_blocks("README.md")
    assert '"--steps", "100"' in shown
    monkeypatch.chdir(tmp_path)
    exec(compile(shown.replace('"100"', '"2", "--eval-rows", "8"'), "README.md", "exec"), {})
    rows = read_metrics(tmp_path / "outputs/mine/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["actor/grad_norm"] > 0


def test_the_documented_step_is_the_source_of_the_recipe():
    (shown,) = [block for block in python_blocks("docs/custom_recipe.md") if "def grpo_step" in block]
    assert shown == inspect.getsource(grpo_step)


def test_the_step_has_at_most_twelve_statements():
    (step,) = ast.parse(inspect.getsource(grpo_step)).body
    assert len([node for node in ast.walk(step) if isinstance(node, ast.stmt)]) - 2 <= 12  # without `def` and docstring
