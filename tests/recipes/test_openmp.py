"""A recipe's command line sets how long OpenMP's threads spin and how many kernels oneDNN keeps, before torch is imported."""

import os
import subprocess
import sys

import pytest

from recipes import CACHES, KERNELS, SPINS

TELL = (
    "import atexit, os, sys; atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules))"
)


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        (["-m", "recipes", "missing"], {}, SPINS),  # which is no command
        (["-X", "utf8", "-m", "recipes", "missing"], {}, SPINS),
        (["-m", "recipes", "missing"], {"GOMP_SPINCOUNT": "7"}, "7"),
        (["-m", "recipes", "missing"], {"OMP_WAIT_POLICY": "ACTIVE"}, None),
        (["-m", "recipes.geo3k_missing"], {}, SPINS),  # Python finds no such module, after it has imported the package
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


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        (["-m", "recipes", "missing"], {}, [KERNELS, KERNELS]),
        (["-m", "recipes", "missing"], {"OMP_WAIT_POLICY": "ACTIVE", CACHES[0]: "7"}, ["7", KERNELS]),
        (["-c", "import recipes"], {}, ["None", "None"]),
    ],
)
def test_only_the_command_line_limits_the_kernels(tmp_path, command, environment, expected):
    told = f"import atexit, os; atexit.register(lambda: print(*map(os.environ.get, {CACHES})))"
    (tmp_path / "sitecustomize.py").write_text(told)
    clean = {name: value for name, value in os.environ.items() if name not in CACHES}
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, *command], env=clean | environment | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert ended.stdout.split() == expected, ended.stderr


GROWTH = """
import psutil, torch

def products(lengths):
    for length in lengths:
        torch.ones(length, 128, dtype=torch.bfloat16) @ torch.ones(128, 256, dtype=torch.bfloat16)

products(range(1000, 1300))
before = psutil.Process().memory_info().rss
products(range(1300, 1900))
print((psutil.Process().memory_info().rss - before) / 2**20)
"""


def test_products_of_ever_new_lengths_in_bfloat16_take_no_more_memory():
    """600 more lengths took 390 to 440 MiB with the caches that torch has by default, on a CPU that multiplies in bfloat16.

    With these they take none, or up to 57 where the C library keeps what was freed.
    """
    limits = dict.fromkeys(CACHES, KERNELS) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", GROWTH], env=os.environ | limits, capture_output=True, text=True)
    assert float(ended.stdout) < 150, ended.stderr
