"""What the documents promise."""

import re
import runpy
from pathlib import Path

import pytest

from recipes.tiny import make_tiny_model
from workers.roles.reward import RewardRow

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_the_custom_recipe_is_short_and_learns(tmp_path, capsys):
    source = ROOT / "docs" / "custom_recipe.py"
    assert len(source.read_text().splitlines()) < 70
    recipe = runpy.run_path(str(source))
    recipe["main"](str(make_tiny_model(tmp_path)))
    named = [float(share) for share in re.findall(r"^step \d+: named ([\d.]+)", capsys.readouterr().out, re.MULTILINE)]
    chance, few = 1 / len(recipe["COLOURS"]), 8  # steps of 256 answers
    assert sum(named[:few]) / few < chance + 0.1
    assert sum(named[-few:]) / few > 0.55  # chance is 0.33


def test_the_custom_recipe_rewards_the_right_name_alone():
    reward = runpy.run_path(str(ROOT / "docs" / "custom_recipe.py"))["reward"]
    rows = [RewardRow(answer, "red") for answer in ("red", "", "blue", "red green blue", "redred")]
    assert [row["score"] for row in reward(rows)] == [1, 0, 0, 0, 0]
