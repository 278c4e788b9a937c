"""Comparison of answers with ground truths by ``mathruler``, in separate processes with limits of time and memory.

`mathruler.grader.grade_answer` simplifies expressions with sympy, which never returns for ``9**9**9**9``. A comparison that
exceeds the time limit is aborted and counts as wrong.
"""

import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from functools import cache
from pathlib import Path

from dataproto.errors import InvalidConfig, RewardError

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
    """One grading process and its current job."""

    def __init__(self, seconds: float, memory: int) -> None:
        script = Path(__file__).with_name("_grading_process.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(seconds), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the parent only, which then kills this process
            bufsize=0,
        )
        self.ready = False
        self.job: int | None = None
        self.deadline = time.monotonic() + _START_SECONDS

    def send(self, job: int, answer: str, truth: str, deadline: float) -> None:
        assert self.process.stdin is not None
        self.job, self.deadline = job, deadline
        with suppress(BrokenPipeError):  # the process has ended; reading from it will show that
            self.process.stdin.write(json.dumps([answer, truth]).encode() + b"\n")

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


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
        self.seconds = seconds
        self.processes = processes or max(1, min(4, (os.cpu_count() or 1) // 2))
        self.memory = memory
        self._children: list[_Child] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._verdicts: dict[tuple[str, str], bool] = {}
        weakref.finalize(self, _stop_all, self._children, self._owner)

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the answer equals the truth, for each pair (answer, truth).

        Raises:
            RewardError: no process can be started.
        """
        with self._lock:
            if len(self._verdicts) > _CACHE_SIZE:
                self._verdicts.clear()
            unknown = []
            for pair in dict.fromkeys(pairs):
                if pair not in self._verdicts:
                    verdict = quick_verdict(*pair)
                    if verdict is None:
                        unknown.append(pair)
                    else:
                        self._verdicts[pair] = verdict
            if unknown:
                self._verdicts.update(zip(unknown, self._ask(unknown), strict=True))
            return [self._verdicts[pair] for pair in pairs]

    def close(self) -> None:
        """Ends the processes; the next call starts new ones."""
        _stop_all(self._children, self._owner)

    def _ask(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        if self._owner != os.getpid():  # after a fork, the processes belong to the parent
            self._children.clear()
            self._owner = os.getpid()
            weakref.finalize(self, _stop_all, self._children, self._owner)
        verdicts = [False] * len(pairs)
        pending = deque(range(len(pairs)))
        try:
            while pending or any(child.job is not None for child in self._children):
                self._assign_jobs(pending, pairs)
                self._collect(verdicts)
        except BaseException:  # also Ctrl-C: answers to unfinished jobs must not be read by the next call
            self.close()
            raise
        return verdicts

    def _assign_jobs(self, pending: deque[int], pairs: Sequence[tuple[str, str]]) -> None:
        idle = [child for child in self._children if child.ready and child.job is None]
        for child in idle:
            if child.process.poll() is not None:  # something else killed it
                self._children.remove(child)
                child.stop()
        while len(self._children) < min(self.processes, len(pending)):
            self._children.append(_Child(self.seconds, self.memory))
        for child in self._children:
            if pending and child.ready and child.job is None:
                job = pending.popleft()
                child.send(job, *pairs[job], deadline=time.monotonic() + self.seconds)

    def _collect(self, verdicts: list[bool]) -> None:
        """Waits for the next event and handles it: a verdict, or a process that is ready, has ended, or exceeds its deadline."""
        busy = [child for child in self._children if child.job is not None or not child.ready]
        with selectors.DefaultSelector() as selector:
            for child in busy:
                assert child.process.stdout is not None
                selector.register(child.process.stdout, selectors.EVENT_READ, child)
            deadline = min(child.deadline for child in busy)
            events = selector.select(max(0.0, deadline - time.monotonic()))
        now = time.monotonic()
        received = {id(key.data): os.read(key.fd, 1) for key, _ in events}
        for child in busy:
            answer = received.get(id(child))
            if answer:
                if child.job is not None:
                    verdicts[child.job] = answer == b"1"
                child.ready, child.job = True, None
            elif answer == b"" or now >= child.deadline:
                child.stop()
                self._children.remove(child)
                if not child.ready:
                    raise RewardError(
                        "the answer checker does not start; run `python -c 'import mathruler.grader'` to see the reason"
                    )


def _stop_all(children: list[_Child], owner: int) -> None:
    if owner == os.getpid():
        while children:
            children.pop().stop()


@cache
def default_checker() -> AnswerChecker:
    """The checker that the process shares."""
    return AnswerChecker()
