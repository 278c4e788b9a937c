"""The host's part of vLLM's decoding, and how fast this host is beside the one where it was measured.

vLLM schedules the rows, prepares their pass, samples and updates them in Python. It does so for a step while the device computes
the step before, so a step takes as long as the slower of both. Seconds of Python differ by more than two
between hosts of the same GPU, so what a host takes is that of the reference host times `host_pace`.

This file needs the standard library and NumPy alone: ``python benchmarks/host_speed.py`` runs it wherever these are.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

STEP, ROW = 8.5e-3, 33.5e-6
"""Seconds of the reference host for a decoding step, at least, and for each row that runs: the larger one counts. Taken from
hosts of H200 with vLLM 0.24 (benchmarks/RESULTS.md). 7B on 2026-11-23: one of pace 0.75 took 6.6 ms a step with 58 rows in the
mean; one of pace 0.82 was busy for 8.8 of the 13.3 ms of a step with 320 rows, in which the device computed for 12.0 ms. 3B on
2026-11-24: one of pace 0.79 took 17 to 18 ms a step with 640 rows, in which the device computes for 10.3 ms. The day before, one
of 0.75 took 11.8 to 14.3 ms with as many, less than these constants give (16.1).
"""
REQUEST = 4e-3
"""Seconds of the reference host to take a request. 320 of them, five for a prompt with an image, took the host of pace 0.82
1.7 s, of which the device computed the prompts for about 0.7 s.
"""
REFERENCE = 20e-3
"""Seconds of `python_work` on the reference host. Six hosts of H200 took 15.0 to 18.3 ms, 0.75 to 0.91 of it.

`STEP`, `ROW`, `REQUEST` and this belong together. Whoever measures another host sets all four, and nothing else.
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


@cache
def host_pace() -> float:
    """How many times as long as the reference host this one takes, measured once a process."""
    return work_seconds() / REFERENCE


def decoding_step(rows: int, pace: float = 1.0) -> float:
    """Seconds of the host for a decoding step of vLLM with so many running rows, on a host of this pace.

    >>> round(decoding_step(320), 6), round(decoding_step(320, pace=0.5), 6)
    (0.01072, 0.00536)
    """
    return pace * max(STEP, rows * ROW)
