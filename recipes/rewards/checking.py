"""Comparison of answers with ground truths by ``mathruler``, in separate processes with limits of time and memory.

`mathruler.grader.grade_answer` simplifies expressions with sympy, which never returns for ``9**9**9**9``. A comparison that
exceeds the time limit is aborted and counts as wrong.
"""

import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from queue import LifoQueue
from typing import Any

from dataproto.errors import InvalidConfig, RewardError, undoing

MAX_ANSWER_LENGTH = 1000
"""Characters; a longer answer counts as wrong unless it is the same string as the ground truth."""

_PLAIN_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?", re.ASCII)
_START_SECONDS = 120.0
_CACHE_SIZE = 100_000


def quick_verdict(answer: str, truth: str) -> bool | None:
    """The verdict of `grade_answer` for equal strings and plain numbers, without calling it; `None` for other pairs.

    >>> quick_verdict("65.0", "65"), quick_verdict("66", "65"), quick_verdict("2*x", "x+x")
    (True, False, None)
    """
    if answer == truth:
        return True
    if max(len(answer), len(truth)) > MAX_ANSWER_LENGTH:
        return False
    if _PLAIN_NUMBER.fullmatch(answer) and _PLAIN_NUMBER.fullmatch(truth):
        return Decimal(answer) == Decimal(truth)
    return None


class _Child:
    """A grading process, which starts with the first pair, and again with the next one after it has ended."""

    def __init__(self, seconds: float, memory: int) -> None:
        self.seconds, self.memory = seconds, memory
        self.process: Any = None  # a `subprocess.Popen`, once it has started

    def grade(self, answer: str, truth: str) -> bool:
        """The verdict; no verdict in time, for which the process is ended, counts as wrong."""
        if self.process is None or self.process.poll() is not None:  # also after a fork, whose process it is not
            self._start()
        with suppress(BrokenPipeError):  # the process has ended; reading from it will show that
            self.process.stdin.write(json.dumps([answer, truth]).encode() + b"\n")
        verdict = self._said(self.seconds)
        if not verdict:
            self.stop()
        return verdict == b"1"

    def stop(self) -> None:
        if self.process is not None:
            with self.process as process:  # closes its pipes, and waits
                process.kill()

    def _start(self) -> None:
        self.stop()
        script = Path(__file__).with_name("_grading_process.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(self.seconds), str(self.memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the parent only, which then kills this process
            bufsize=0,
        )
        if not self._said(_START_SECONDS):
            self.stop()
            raise RewardError(
                "the answer checker does not start; run `python -c 'import mathruler.grader'` to see the reason"
            )

    def _said(self, seconds: float) -> bytes:
        """The next byte from the process, or none if it has ended or takes longer."""
        return self.process.stdout.read(1) if wait([self.process.stdout.fileno()], seconds) else b""


class AnswerChecker:
    """Compares answers in a few processes, which start at the first comparison and end with the program.

    Verdicts are cached, since the samples of a prompt often have the same answer.
    """

    def __init__(self, seconds: float = 3.0, processes: int | None = None, memory: int = 1 << 30) -> None:
        """Creates a checker without starting a process.

        Args:
            seconds: time limit of a comparison.
            processes: number of processes; by default half the cores, at most 4.
            memory: memory limit of a process, in bytes.

        Raises:
            InvalidConfig: ``seconds`` or ``processes`` is out of range.
        """
        if seconds <= 0 or (processes is not None and processes < 1):
            raise InvalidConfig(f"seconds={seconds} must be above 0, processes={processes} at least 1")
        processes = processes or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._children = [_Child(seconds, memory) for _ in range(processes)]
        self._idle: LifoQueue[_Child] = LifoQueue()  # so that few pairs start few processes
        for child in self._children:
            self._idle.put(child)
        self._lock = threading.Lock()
        self._verdicts: dict[tuple[str, str], bool] = {}
        weakref.finalize(self, _stop_all, self._children)

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the answer equals the truth, for each pair (answer, truth).

        Raises:
            RewardError: no process can be started.
        """
        with self._lock:
            if len(self._verdicts) > _CACHE_SIZE:
                self._verdicts.clear()
            found = {pair: quick_verdict(*pair) for pair in dict.fromkeys(pairs) if pair not in self._verdicts}
            self._verdicts |= {pair: verdict for pair, verdict in found.items() if verdict is not None}
            unknown = [pair for pair, verdict in found.items() if verdict is None]
            if unknown:
                self._verdicts.update(zip(unknown, self._ask(unknown), strict=True))
            return [self._verdicts[pair] for pair in pairs]

    def close(self) -> None:
        """Ends the processes; the next call starts new ones."""
        _stop_all(self._children)

    def _ask(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        threads = min(len(self._children), len(pairs))
        with ThreadPoolExecutor(threads) as pool, undoing(self.close):  # also Ctrl-C: no thread waits for a verdict
            return list(pool.map(self._grade, pairs))

    def _grade(self, pair: tuple[str, str]) -> bool:
        child = self._idle.get()
        try:
            return child.grade(*pair)
        finally:
            self._idle.put(child)


def _stop_all(children: Sequence[_Child]) -> None:
    for child in children:
        child.stop()


@cache
def default_checker() -> AnswerChecker:
    """The checker that the process shares."""
    return AnswerChecker()
