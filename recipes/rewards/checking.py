"""Is an answer equal to the truth? By ``mathruler``, in processes that may hang or explode without harm.

`mathruler.grader.grade_answer` simplifies with sympy, which ``9**9**9**9`` keeps busy for ever. A comparison that takes
longer than a set time is given up and counts as wrong.
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
"""Characters; a longer answer counts as wrong unless it is the truth to the letter."""

_PLAIN_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?", re.ASCII)
_START_SECONDS = 120.0
_REMEMBERED = 100_000


def quick_verdict(answer: str, truth: str) -> bool | None:
    """What `grade_answer` would say, where that is certain without it: equal strings and plain numbers.

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
    """One checking process and what it is doing."""

    def __init__(self, seconds: float, memory: int) -> None:
        script = Path(__file__).with_name("math_checker.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(seconds), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run, which then ends this process
            bufsize=0,
        )
        self.ready = False
        self.job: int | None = None
        self.deadline = time.monotonic() + _START_SECONDS

    def send(self, job: int, answer: str, truth: str, deadline: float) -> None:
        assert self.process.stdin is not None
        self.job, self.deadline = job, deadline
        with suppress(BrokenPipeError):  # it has died, which reading from it will tell
            self.process.stdin.write(json.dumps([answer, truth]).encode() + b"\n")

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


class AnswerChecker:
    """Compares answers in a few processes, started when first needed and ended with the program.

    Verdicts are remembered: the samples of a prompt often say the same.
    """

    def __init__(self, seconds: float = 3.0, processes: int | None = None, memory: int = 1 << 30) -> None:
        """Starts nothing yet.

        Args:
            seconds: how long a comparison may take.
            processes: how many run at a time; half the cores, up to 4, by default.
            memory: bytes that one process may take.
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
        """For each (answer, truth), whether they are equal. Raises `RewardError` only if no process can be started."""
        with self._lock:
            if len(self._verdicts) > _REMEMBERED:
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
        """End the processes; the next call starts new ones."""
        _stop_all(self._children, self._owner)

    def _ask(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        if self._owner != os.getpid():  # after a fork the processes are still the parent's
            self._children.clear()
            self._owner = os.getpid()
            weakref.finalize(self, _stop_all, self._children, self._owner)
        verdicts = [False] * len(pairs)
        todo = deque(range(len(pairs)))
        try:
            while todo or any(child.job is not None for child in self._children):
                self._give_out(todo, pairs)
                self._collect(verdicts)
        except BaseException:  # Ctrl-C too: half-done comparisons must not answer the next question
            self.close()
            raise
        return verdicts

    def _give_out(self, todo: deque[int], pairs: Sequence[tuple[str, str]]) -> None:
        for child in [
            child for child in self._children if child.ready and child.job is None and child.process.poll() is not None
        ]:
            self._children.remove(child)  # killed by somebody while it had nothing to do
            child.stop()
        while len(self._children) < min(self.processes, len(todo)):
            self._children.append(_Child(self.seconds, self.memory))
        for child in self._children:
            if todo and child.ready and child.job is None:
                job = todo.popleft()
                child.send(job, *pairs[job], deadline=time.monotonic() + self.seconds)

    def _collect(self, verdicts: list[bool]) -> None:
        """Wait for the first news, and take it: a verdict, a process that is ready, has died, or is late."""
        waiting = [child for child in self._children if child.job is not None or not child.ready]
        with selectors.DefaultSelector() as selector:
            for child in waiting:
                assert child.process.stdout is not None
                selector.register(child.process.stdout, selectors.EVENT_READ, child)
            first = min(child.deadline for child in waiting)
            events = selector.select(max(0.0, first - time.monotonic()))
        now = time.monotonic()
        heard = {id(key.data): os.read(key.fd, 1) for key, _ in events}
        for child in waiting:
            news = heard.get(id(child))
            if news:
                if child.job is not None:
                    verdicts[child.job] = news == b"1"
                child.ready, child.job = True, None
            elif news == b"" or now >= child.deadline:
                child.stop()
                self._children.remove(child)
                if not child.ready:
                    raise RewardError(
                        "the answer checker does not start; see what `python -c 'import mathruler.grader'` says"
                    )


def _stop_all(children: list[_Child], owner: int) -> None:
    if owner == os.getpid():
        while children:
            children.pop().stop()


@cache
def default_checker() -> AnswerChecker:
    """The program's own."""
    return AnswerChecker()
