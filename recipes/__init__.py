"""Recipes: each is a module with a command, ``python -m recipes.NAME``, on algorithms, data and the run around a step."""

import os
import sys
from importlib.util import find_spec

__all__: list[str] = []

NEEDED = ("transformers", "tyro", "rich", "datasets", "mathruler")

SPINS = "2000"
"""The number of times that an idle OpenMP thread (of GNU's library, which torch contains) looks for work before it sleeps. The
default is 300,000 times, some milliseconds: where other programs run on the same cores, a waiting thread then takes time from the
thread that it waits for. Results do not depend on it.
"""

_from_command_line = sys.argv[0] == "-m" and any(argument.startswith("recipes.") for argument in sys.orig_argv)
_set_by_user = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
# With ``-m`` Python imports this package first, before any module imports torch, which reads the variable. A program that imports
# a recipe keeps the settings of its process.
if _from_command_line and not _set_by_user:
    os.environ["GOMP_SPINCOUNT"] = SPINS

if not all(find_spec(package) for package in NEEDED):  # only then: importing dataproto loads torch
    from dataproto.extras import require_extra

    require_extra("train", "recipes", *NEEDED)
