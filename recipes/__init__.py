"""Recipes: each is a module with a command, ``dataproto NAME``, on algorithms, data and the run around a step."""

import os
import re
import sys
from importlib.util import find_spec

__all__: list[str] = []

NEEDED = ("transformers", "yaml", "rich", "datasets", "mathruler")

SPINS = "2000"
"""The number of times that an idle OpenMP thread (of GNU's library, which torch contains) looks for work before it sleeps. The
default is 300,000 times, some milliseconds: where other programs run on the same cores, a waiting thread then takes time from the
thread that it waits for. Results do not depend on it.
"""

KERNELS = "128"
"""The number of compiled kernels that oneDNN keeps, and torch in addition to it. A CPU compiles some for each number of tokens in
bfloat16, up to a MiB each; by default 1,024 are kept twice, and a run whose steps differ in length grows by 0.6 GiB and more.
"""
CACHES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"

_console_script = os.path.splitext(os.path.basename(sys.argv[0]))[0] == "dataproto"
_option = re.search(r"(?:^|\s)-[a-zA-Z]*m ?([\w.]+)", " ".join(sys.orig_argv[1:])) if sys.argv[0] == "-m" else None
_module = _option[1] if _option else ""
_file = os.path.dirname(os.path.abspath(sys.argv[0])) == os.path.dirname(__file__)  # python recipes/grpo.py
if re.match(r"recipes\.(?!geo3k_)", _module) or (_file and not os.path.basename(sys.argv[0]).startswith("geo3k_")):
    _started = f"{sys.argv[0]} {_module}".strip()
    sys.exit(f"error: python {_started} has ended: run dataproto NAME, or python -m recipes NAME")
# With ``-m`` Python imports this package first, before any module imports torch, which reads the variables; so does the command
# ``dataproto``. A program that imports a recipe keeps the settings of its process.
if _console_script or _module.partition(".")[0] in ("recipes", "dataproto_server"):
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():  # the user's own
        os.environ["GOMP_SPINCOUNT"] = SPINS
    for _name in CACHES:
        os.environ.setdefault(_name, KERNELS)

if not all(find_spec(package) for package in NEEDED):  # only then: importing dataproto loads torch
    from dataproto.errors import MissingPackage
    from dataproto.extras import require_extra

    try:
        require_extra("train", "recipes", *NEEDED)
    except MissingPackage as error:
        if _console_script:
            sys.exit(f"error: {error}")
        raise
