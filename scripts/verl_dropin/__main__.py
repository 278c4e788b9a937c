"""Runs verl's own code twice, on verl's `DataProto` and on this project's in its place, and compares the results exactly.

    PYTHONPATH=PLACE_OF_VERL python scripts/verl_dropin [CHECK ...]

verl 0.9.1 must be importable there. What differs on purpose (docs/dataproto.md, "Differences from verl") is compared with what is
written here for each side. Ends with 1 where a result is not as expected.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import documented_differences as _differences  # noqa: F401  these three add their checks
import torch
import trainer_functions as _functions  # noqa: F401
import worker_groups as _groups  # noqa: F401
from checks import CHECKS, EXPECTED, ROOT, plain, use_dataproto


def run(side: str, names: list[str], output: str) -> None:
    if side == "dataproto":
        use_dataproto()
    results = {}
    for name in names:
        torch.manual_seed(0)
        try:
            results[name] = "result", plain(CHECKS[name]())
        except Exception as error:
            import traceback

            results[name] = "raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    Path(output).write_bytes(pickle.dumps(results))


def main() -> int:
    """Runs both sides, each in a process of its own, and compares them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--side", choices=["verl", "dataproto"], help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.checks or list(CHECKS)
    if options.side:
        run(options.side, names, options.output)
        return 0

    results = {}
    for side in ("verl", "dataproto"):
        with tempfile.TemporaryDirectory() as place:
            output = f"{place}/results"
            command = [sys.executable, __file__, *names, "--side", side, "--output", output]
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "PYTHONPATH": path, "VERL_USE_EXTERNAL_PLUGINS": "none"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr)
                return 1
            results[side] = pickle.loads(Path(output).read_bytes())
    failed = compare(names, results)
    return int(failed > 0)


def compare(names: list[str], results: dict[str, dict[str, tuple[str, Any]]]) -> int:
    """Prints a line for each check, and both results where they are not as expected; returns how many those are."""
    from dataproto.tensordict_utils import same_value

    failed = 0
    for name in names:
        (theirs, expected), (ours, found) = results["verl"][name], results["dataproto"][name]
        good = theirs == ours == "result"
        if name in EXPECTED:
            good &= same_value({"verl": expected, "dataproto": found}, EXPECTED[name])
        else:
            good &= same_value(expected, found)
        failed += not good
        print(f"{name:32} {'FAILED' if not good else 'differs as documented' if name in EXPECTED else 'the same'}")
        for side, kind, value in (("verl", theirs, expected), ("dataproto", ours, found)):
            if not good:
                print(f"  {side} {kind}: {value}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
