"""Algorithms, data and loops: each recipe is a module with a command line, ``python -m recipes.NAME``."""

import os
import sys

SPINS = "2000"
"""How often an idle thread of OpenMP (GNU's, which torch comes with) looks for work before it sleeps; its own default is 300,000
times, some milliseconds. A thread that looks so long uses up the time that the thread it waits for needs, where other programs
run on the same cores. Numbers do not depend on it.
"""

_from_command_line = sys.argv[0] == "-m" and any(argument.startswith("recipes.") for argument in sys.orig_argv)
_set_by_user = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
# Python imports this package on its way to the module that ``-m`` names, before anything imports torch, which reads the variable.
# A program that imports a recipe keeps the settings of its process.
if _from_command_line and not _set_by_user:
    os.environ["GOMP_SPINCOUNT"] = SPINS
