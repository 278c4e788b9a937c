"""What the documents promise."""

import re
import runpy
from pathlib import Path

import pytest

from recipes.configs import grpo_config, sft_config, walk_config
from recipes.demo.tiny_model import make_tiny_model
from recipes.options import options_of
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from workers.roles.reward import RewardRow
from workers.training.checkpoint import checkpoint_steps

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_custom_recipe_runs(tmp_path):
    source = (ROOT / "docs" / "custom_recipe.py").read_text().replace("WARM_UP, ENTROPY = 100", "WARM_UP, ENTROPY = 2")
    recipe, run = {"__name__": "custom_recipe"}, tmp_path / "run"
    exec(compile(source, "custom_recipe.py", "exec"), recipe)
    recipe["main"](str(make_tiny_model(tmp_path / "model")), run, 2)
    assert [row["step"] for row in read_metrics(run / METRICS_FILE)] == [0, 1, 2]
    assert (run / "report.html").is_file()


@pytest.mark.timeout(900)
@pytest.mark.long
def test_the_custom_recipe_is_short_and_learns(tmp_path):
    source = ROOT / "docs" / "custom_recipe.py"
    assert len(source.read_text().splitlines()) < 70
    recipe, run = runpy.run_path(str(source)), tmp_path / "run"
    model = str(make_tiny_model(tmp_path / "model"))
    recipe["main"](model, run)
    named = [row["critic/score/mean"] for row in read_metrics(run / METRICS_FILE)[1:]]
    chance, few = 1 / len(recipe["COLOURS"]), 8  # steps of 256 answers
    assert sum(named[:few]) / few < chance + 0.1
    assert sum(named[-few:]) / few > 0.55  # chance is 0.33
    recipe["main"](model, run, 102)  # continues after step 100
    rows = read_metrics(run / METRICS_FILE)
    assert [row["step"] for row in rows] == list(range(103))
    held_out = [row["step"] for row in rows if "val-core/colours/reward/mean@1" in row]
    assert held_out == [0, 50, 100, 102]
    assert checkpoint_steps(run) == [100, 102]
    assert (run / "report.html").is_file()


def test_the_custom_recipe_rewards_the_right_name_alone():
    reward = runpy.run_path(str(ROOT / "docs" / "custom_recipe.py"))["reward"]
    rows = [RewardRow(answer, "red") for answer in ("red", "", "blue", "red green blue", "redred")]
    assert [row["score"] for row in reward(rows)] == [1, 0, 0, 0, 0]


@pytest.mark.slow
def test_the_calls_of_roles_run_as_their_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "roles.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    exec(compile(code.replace('"CHECKPOINT"', repr(str(make_tiny_model(tmp_path / "model")))), "roles.md", "exec"), {})
    assert (tmp_path / "checkpoint" / "huggingface" / "config.json").is_file()


def test_the_options_of_what_now_exist():
    page = (ROOT / "docs" / "what_now.md").read_text()
    configs = [grpo_config.TINY, walk_config.TINY, sft_config.TINY]
    known = {option.name for config in configs for option in options_of(config)} | {"resume"}
    named = re.findall(r"--([a-z][\w.-]*)", page) + re.findall(r"`([a-z][\w.-]+): ", page)
    assert len(named) > 40
    assert set(named) <= known


def test_each_surprise_of_a_neighbour_names_its_version_and_a_canary_or_a_source():
    page = (ROOT / "docs" / "neighbours.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    sources = [row[2] for row in rows if row[0] != "believed"]
    assert len(sources) > 25
    for source in sources:
        assert re.search(r"\d", source), source
        assert re.search(r"canar|`", source), source
        for path in re.findall(r"`((?:tests|findings)/[\w/.]+)`", source):
            assert (ROOT / path).exists(), path
