"""How much one busy process slows down a training step: ``python benchmarks/busy_machine.py``.

A recipe's own command line runs twice, once as it is and once with the spinning of OpenMP's default (GOMP_SPINCOUNT=300000). They
work in turns, a few steps each, while the other one is paused; first alone, then beside a process that keeps one core busy. What
the recipe's setting costs where nothing else runs is the ratio of the two first medians. Nothing else may run meanwhile.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

SETTINGS = {"as it is": {}, "OpenMP's default": {"GOMP_SPINCOUNT": "300000"}}
ENDLESS = ["--steps", "1000000", "--eval-rows", "8", "--save-every", "0"]


class Stoppable:
    """A process in a new session, which can be paused and resumed."""

    def __init__(self, command: list[str], environment: dict[str, str], errors: Path) -> None:
        self.errors = errors
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=errors.open("w"),
            start_new_session=True,
        )

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> "Stoppable":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class Run(Stoppable):
    """A recipe that trains until it is ended."""

    def __init__(self, recipe: str, folder: Path, environment: dict[str, str]) -> None:
        self.rows = folder / "run" / "metrics.jsonl"
        folder.mkdir()
        command = [sys.executable, "-m", "recipes", recipe, "--output-dir", str(folder / "run"), *ENDLESS]
        super().__init__(command, {"HF_HUB_OFFLINE": "1"} | environment, folder / "errors.txt")

    def steps(self, count: int) -> list[float]:
        """Seconds of the next steps, without the first one, which may have begun earlier."""
        before = len(self._seconds())
        self.resume()
        while len(self._seconds()) < before + 1 + count:
            if self.process.poll() is not None:
                sys.exit(f"the recipe ended early:\n{self.errors.read_text()[-4000:]}")
            time.sleep(0.005)
        self.pause()
        return self._seconds()[before + 1 : before + 1 + count]

    def _seconds(self) -> list[float]:
        whole = self.rows.read_text().rpartition("\n")[0].splitlines() if self.rows.exists() else []
        rows = [json.loads(line) for line in whole]
        return [row["timing_s/step"] for row in rows if "timing_s/step" in row]


def measure(recipe: str, rounds: int, steps: int, folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of steps alone and beside the busy process, for each setting."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in SETTINGS}
    with ExitStack() as stack:
        busy = stack.enter_context(Stoppable([sys.executable, "-c", "while True: pass"], {}, folder / "busy.txt"))
        busy.pause()
        runs = {}
        for number, (name, environment) in enumerate(SETTINGS.items()):
            runs[name] = stack.enter_context(Run(recipe, folder / str(number), environment))
            runs[name].steps(3)  # until it is warm
        for _ in range(rounds):
            for name, run in runs.items():
                found[name][0].extend(run.steps(steps))
                busy.resume()
                found[name][1].extend(run.steps(steps))
                busy.pause()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="classify", help="module of `recipes` (default: classify)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each setting (default: 6)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn (default: 5)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no process behind
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    print(f"recipes.{arguments.recipe}, two cores, load average before {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.recipe, arguments.rounds, arguments.steps, Path(folder))
    print("| setting | alone, s | beside a busy process, s | ratio |\n| --- | --- | --- | --- |")
    for name, (alone, beside) in found.items():
        print(f"| {name} | {median(alone):.3f} | {median(beside):.3f} | {median(beside) / median(alone):.2f} |")
    first, second = (median(alone) for alone, _ in found.values())
    print(f"\nalone, {' to '.join(found)}: {first / second:.3f}")


if __name__ == "__main__":
    main()
