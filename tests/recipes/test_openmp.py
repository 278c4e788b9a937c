"""A recipe's command line sets how long OpenMP's threads spin, before torch is imported, and nothing else does."""

import os
import subprocess
import sys

import pytest

from recipes import SPINS

TELL = (
    "import atexit, os, sys; atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules))"
)


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        (["-m", "recipes.missing"], {}, SPINS),  # Python finds no such module, after it has imported the package
        (["-X", "utf8", "-m", "recipes.missing"], {}, SPINS),
        (["-m", "recipes.missing"], {"GOMP_SPINCOUNT": "7"}, "7"),
        (["-m", "recipes.missing"], {"OMP_WAIT_POLICY": "ACTIVE"}, None),
        (["-c", "import recipes"], {}, None),
        (["-c", "import recipes", "recipes.classify"], {}, None),
    ],
)
def test_only_the_command_line_of_a_recipe_sets_it(tmp_path, command, environment, expected):
    (tmp_path / "sitecustomize.py").write_text(TELL)
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, *command], env=clean | environment | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert ended.stdout.split() == [str(expected), "False"], ended.stderr
