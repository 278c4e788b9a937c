"""What the documents promise."""

import runpy
from pathlib import Path

from recipes.tiny import make_tiny_model

ROOT = Path(__file__).parents[1]


def test_the_custom_recipe_is_short_and_learns(tmp_path, capsys):
    source = ROOT / "docs" / "custom_recipe.py"
    assert len(source.read_text().splitlines()) < 70
    recipe = runpy.run_path(str(source))
    recipe["main"](str(make_tiny_model(tmp_path)), steps=14)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in lines]
    assert len(rewards) == 14
    assert sum(rewards[-4:]) > sum(rewards[:4])
