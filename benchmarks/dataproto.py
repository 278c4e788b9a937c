"""`DataProto` compared with verl's and with a lower bound, on one core, in one run and one table.

    python benchmarks/dataproto.py --verl-python /path/to/verl-venv/bin/python

Each side is a separate process on the same core: this project; verl 0.9.1 (or what a row names instead); and the floor, a lower
bound: a `memcpy`, the raw torch operation, or a dict of arrays through the same channel. The sides take turns, and
one is idle while another works. The first round is a warm-up. `--rows TEXT` runs the rows whose names contain the text.

A copy into newly allocated memory spends most of its time on page faults. `MALLOC_MMAP_THRESHOLD_=4294967296
MALLOC_TRIM_THRESHOLD_=17179869184` in the environment lets all sides reuse freed memory, so that only the copies are measured.

The rows are in `benchmarks/dataproto_rows.py`.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]  # this file is not the library
sys.path.append(str(HERE.parent))

from benchmarks.dataproto_rows import ROWS, Work, proto, started_ray  # noqa: E402

SIDES = {"verl": "verl 0.9.1", "ours": "this project", "floor": "floor"}


def measure(side: str) -> None:
    """One side: measures a row whenever its number comes in. Each row has a process, forked when all is imported: what others
    leave behind in the allocator would change its figures."""
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    if side != "floor":
        proto(side)
    forks, rows = multiprocessing.get_context("fork"), {}
    print("READY", flush=True)
    for line in sys.stdin:
        number = int(line)
        if number not in rows:
            finish(rows)
            here, there = forks.Pipe()
            rows[number] = here, forks.Process(target=serve, args=(side, number, there))
            rows[number][1].start()
            there.close()
        rows[number][0].send("once")
        print("FOUND", json.dumps(rows[number][0].recv()), flush=True)
    finish(rows)


def finish(rows: dict[int, Any]) -> None:
    for connection, process in rows.values():
        connection.send("")
        process.join()
    rows.clear()


def serve(side: str, number: int, connection: Any) -> None:
    """One row of one side, in a separate process: measures on request."""
    work = ROWS[number].work(side)
    while connection.recv():
        connection.send(None if work is None else once(work, ROWS[number].unit))
    if started_ray.cache_info().currsize:
        started_ray().shutdown()


def once(work: Work, unit: str) -> float:
    start = time.perf_counter()
    made = work()
    seconds = time.perf_counter() - start
    return seconds * 1000 if unit == "ms" else made


class Side:
    """A process that measures on request."""

    def __init__(self, python: str, side: str, core: int, errors: IO[str]) -> None:
        self.errors = errors
        self.process = subprocess.Popen(
            [python, __file__, "measure", side],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            preexec_fn=functools.partial(os.sched_setaffinity, 0, {core}),
        )
        self._hear("READY")

    def measure(self, number: int) -> float | None:
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return json.loads(self._hear("FOUND"))

    def _hear(self, word: str) -> str:
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        self.errors.seek(0)
        sys.exit(f"{' '.join(self.process.args)} ended early:\n{self.errors.read()[-4000:]}")

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()


def compare(pythons: dict[str, str], rows: Sequence[int], repeats: int, core: int) -> str:
    """Lets the sides measure in turns and returns the medians as a table."""
    lines = [f"| work | {' | '.join(SIDES[side] for side in pythons)} | ours / verl | target | met |"]
    lines.append("|" + "---|" * (len(pythons) + 4))
    with contextlib.ExitStack() as stack:
        sides = {
            side: stack.enter_context(Side(python, side, core, stack.enter_context(tempfile.TemporaryFile("w+"))))
            for side, python in pythons.items()
        }
        for number in rows:
            rounds = [{side: each.measure(number) for side, each in sides.items()} for _ in range(repeats + 1)][1:]
            found = {side: median(each[side] for each in rounds) for side in sides if rounds[0][side] is not None}
            ratio = (
                f"1/{found['verl'] / found['ours']:.3g}" if found.keys() >= {"verl", "ours"} and found["ours"] else ""
            )
            figures = [f"{found[side]:,.3g} {ROWS[number].unit}" if side in found else "" for side in pythons]
            cells = [ROWS[number].name.strip(), *figures, ratio, ROWS[number].target(), ROWS[number].met(found)]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--verl-python", help="interpreter of an environment with verl 0.9.1; without it, its side is left out"
    )
    parser.add_argument("--rows", default="", help="only rows whose name contains this text")
    parser.add_argument("--repeats", type=int, default=9, help="measured rounds (default: 9)")
    arguments = parser.parse_args()
    pythons = {"verl": arguments.verl_python} if arguments.verl_python else {}
    pythons |= {"ours": sys.executable, "floor": sys.executable}
    rows = [number for number, each in enumerate(ROWS) if arguments.rows in each.name]
    before, core = os.getloadavg()[0], max(os.sched_getaffinity(0))
    table = compare(pythons, rows, arguments.repeats, core)
    import torch

    print(
        f"One core of {cpu_name()}, Python {platform.python_version()}, torch {torch.__version__}; medians of ", end=""
    )
    kept = " Freed memory is kept." if "MALLOC_TRIM_THRESHOLD_" in os.environ else ""
    print(
        f"{arguments.repeats} rounds in turns; load average before {before:.1f}, after {os.getloadavg()[0]:.1f}.{kept}\n"
    )
    print(table)


if __name__ == "__main__":
    main()
