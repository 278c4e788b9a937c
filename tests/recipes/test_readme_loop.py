"""The README shows the recipe itself."""

import inspect
import re
from pathlib import Path

from recipes.grpo import grpo_step

README = Path(__file__).parents[2] / "README.md"


def test_the_loop_in_the_readme_is_the_source_of_the_recipe():
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = [block for block in blocks if "def grpo_step" in block]
    assert shown == inspect.getsource(grpo_step)


def test_the_step_fits_on_a_screen():
    """Its statements, without signature and docstring."""
    body = inspect.getsource(grpo_step).split('"""')[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 26
