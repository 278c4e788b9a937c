"""How fast this host runs Python like vLLM's, compared with the reference host of plans: ``python benchmarks/host_speed.py``.

vLLM schedules the rows, prepares their pass, samples and updates them in Python. It does so for a step while the device computes
the step before, so a step takes as long as the slower of both. Needs the standard library and NumPy; no GPU.

``benchmarks/rollout.py --side ours --requests 32`` and ``--requests 640`` print the milliseconds of a decoding step with so many
rows; where the device is faster than the host, the first is about `STEP`, and the second, divided by its rows, `ROW`.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

ROUNDS = 5
REFERENCE = 20e-3
"""Seconds of `python_work` on the reference host. Six hosts of H200 took 15.0 to 18.3 ms, 0.75 to 0.91 of it.

It belongs to `STEP`, `ROW` and `REQUEST` of `recipes/plan/seconds.py`.
Whoever measures another host sets all four, and nothing else.
"""
ROWS, STEPS, TIMES = 256, 96, 7  # of `python_work`, and how often it is timed
BLOCK = 16  # tokens of a block of the cache


@dataclass
class _Row:
    """What `python_work` keeps of a running row."""

    name: str
    limit: int
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


def python_work(rows: int = ROWS, steps: int = STEPS) -> int:
    """Does what vLLM's Python does in decoding steps, in small, and returns the number of tokens that it has made.

    >>> python_work(rows=4, steps=3)
    12
    """
    running = [_Row(f"{number}-{number % 5}", limit=steps) for number in range(rows)]
    known = {row.name: row for row in running}
    places = {row.name: place for place, row in enumerate(running)}
    table = np.zeros((rows, steps // BLOCK + 2), dtype=np.int32)
    made = 0
    for step in range(steps):
        scheduled: dict[str, int] = {}
        fresh: dict[str, tuple[int, ...]] = {}
        for row in running:  # the scheduler
            count = min(len(row.tokens) + 1 - row.computed, row.limit)
            if row.computed % BLOCK == 0:
                row.blocks.append(step * rows + len(scheduled))
                fresh[row.name] = tuple(row.blocks[-1:])
            if count > 0:
                scheduled[row.name] = count
        for name, blocks in fresh.items():  # the pass
            table[places[name], step // BLOCK] = blocks[0]
        counts = np.fromiter(scheduled.values(), dtype=np.int32, count=len(scheduled))
        ends = np.cumsum(counts)
        positions = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts) + step
        slots = table[np.repeat(np.arange(rows), counts), positions // BLOCK] * BLOCK + positions % BLOCK
        sampled = (slots % 1000).tolist()
        outputs: list[tuple[str, list[int], str | None]] = []
        for place, name in enumerate(scheduled):  # the update
            row = known[name]
            row.computed += scheduled[name]
            row.tokens.append(sampled[place])
            finished = "length" if len(row.tokens) >= row.limit else "stop" if sampled[place] < 0 else None
            outputs.append((name, row.tokens[-1:], finished))
        made += sum(len(tokens) for _, tokens, _ in outputs)
    return made


def work_seconds(clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of `python_work` on this host, in about a tenth of a second: the fastest of some times.

    Args:
        clock: returns seconds; by default those of the processor in this thread, so other programs hardly count.
    """
    taken = []
    for _ in range(TIMES):
        start = clock()
        python_work()
        taken.append(clock() - start)
    return min(taken)


def lines(rounds: int = ROUNDS) -> list[str]:
    """The seconds of `python_work` several times, and the pace."""
    seconds = [work_seconds() for _ in range(rounds)]
    pace = median(seconds) / REFERENCE
    return [
        f"calibration: {1e3 * median(seconds):.2f} ms ({1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f} in {rounds} rounds), "
        f"Python {platform.python_version()}, {processor()}",
        f"pace: {pace:.2f} of the time of the reference host ({1e3 * REFERENCE:.2f} ms)",
    ]


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """The name of this host's processor."""
    lines = file.read_text().splitlines() if file.is_file() else []  # Linux has it
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    print("\n".join(lines()))
