"""Runs environments next to the engine: each in a thread of its own, ``async`` methods on the event loop of the process."""

import asyncio
import contextlib
import inspect
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from rollout.environments.environment import (
    EnvironmentFailed,
    MakeEnvironment,
    Observation,
    awaited,
    check_observation,
    decoded,
    raised,
)
from rollout.environments.environment_process import ProcessEnvironment, in_process

log = logging.getLogger(__name__)

CLOSING_S = 2.0
"""Seconds that the environments get to close at the end."""

LOOP_S = 30.0
"""Seconds in which an event loop answers unless a function blocks it for ever; one that computes is busy for a while."""

RECENT = 0.1
"""Weight of the latest call in the typical time of calls."""

Outcome = Observation | EnvironmentFailed


_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
"""The event loop of the process, by its id.

What environments or agents share, such as an `asyncio.Lock` or the sessions of a client, belongs to a loop. So those of all
rollouts have this one.
"""
_LOOKING = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop of the process, in a thread of its own, or a new one if a function blocks it."""
    with _LOOKING:
        loop, answered = _LOOPS.get(os.getpid()), threading.Event()
        if loop is not None:
            loop.call_soon_threadsafe(answered.set)
        if loop is None or not answered.wait(LOOP_S):
            if loop is not None:
                log.warning(
                    "a method of an environment, or an agent, blocks the event loop for over %g s: those of later plays have a "
                    "new loop, and cannot share an asyncio.Lock or a client with those of earlier ones",
                    LOOP_S,
                )
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
        return loop


@dataclass
class _Running:
    """The environment of an episode and its thread."""

    seconds: float  # left of its time
    inbox: "queue.SimpleQueue[tuple[int, str, tuple[Any, ...]] | None]" = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None
    environment: Any = None
    call: int = 0  # number of the last call; answers to other ones do not count
    future: "Future[Any] | None" = None  # of the last async call
    closed: bool = False


def copied(value: Any, pictures: dict[int, Image.Image]) -> Any:
    """A copy that an environment may change: the row of a prompt is that of all its samples.

    Mappings, sequences, sets, arrays, tensors and pictures are copied, other objects are not.

    Args:
        pictures: the copies so far, by `id` of the original, so that a picture is copied once for the whole row.
    """
    if isinstance(value, Image.Image):
        if id(value) not in pictures:
            pictures[id(value)] = value
            with contextlib.suppress(Exception):  # one that cannot be read, which the environment may not need
                pictures[id(value)] = decoded(value).copy()
        return pictures[id(value)]
    if isinstance(value, Mapping):
        return {name: copied(each, pictures) for name, each in value.items()}
    if isinstance(value, tuple):
        parts = [copied(part, pictures) for part in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    if isinstance(value, list):
        return [copied(each, pictures) for each in value]
    if isinstance(value, np.ndarray) and value.dtype == object:
        objects = np.empty(value.shape, dtype=object)
        for place, part in np.ndenumerate(value):
            objects[place] = copied(part, pictures)
        return objects
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray | set) else value


class EnvironmentHost:
    """The environments of many episodes. Calls return at once; `poll` returns what they answered.

    A thread whose environment hangs is left alone and does not keep the process alive.
    """

    def __init__(self, make_environment: MakeEnvironment, seconds: float, memory_gib: float | None = None) -> None:
        """
        Args:
            seconds: the time that the environment of one episode may take, all its calls together. The time in which the engine
                decodes, or in which an answer waits for it, does not count.
            memory_gib: of an environment in a process of its own, see `in_process`; ``None``: in a thread, no limit.

        Raises:
            InvalidConfig: see `in_process`.
        """
        self.typical_s = 0.0  # that recent calls took
        self.seconds = seconds
        self.make_environment = make_environment if memory_gib is None else in_process(make_environment, memory_gib)
        self._answers: queue.SimpleQueue[tuple[str, int, Outcome, float]] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._working: dict[str, float] = {}  # when the call of an episode began that has not been answered
        self._closing: list[threading.Thread] = []
        self._calls = 0
        self._loop = event_loop()
        self._clock: tuple[float | None, float] = (None, 0.0)  # when a pause began, and seconds of those before

    def shut(self) -> None:
        """Closes all environments. Further calls do nothing."""
        for episode in list(self._running):
            self.close(episode)
        until, self._closing, closing = time.monotonic() + CLOSING_S, [], self._closing
        for thread in closing:
            thread.join(max(until - time.monotonic(), 0.0))

    def __contains__(self, episode: str) -> bool:
        """Whether there is an environment of this episode."""
        return episode in self._running

    def pause(self) -> None:
        """Stops the clock. The environments continue."""
        self._clock = self._now(), self._clock[1]

    def resume(self) -> None:
        """Starts the clock again after `pause`."""
        stopped, _ = self._clock
        if stopped is not None:
            self._clock = None, time.monotonic() - stopped

    def _now(self) -> float:
        """Seconds on the clock of the environments, which `pause` stops."""
        stopped, before = self._clock
        return time.monotonic() - before if stopped is None else stopped

    def reset(self, episode: str, row: Mapping[str, Any], seed: int) -> None:
        """Makes the environment of an episode and resets it."""
        running = self._running[episode] = _Running(self.seconds)
        running.thread = threading.Thread(target=self._serve, args=(episode, running), daemon=True)
        running.thread.start()
        self._call(episode, "reset", row, seed)

    def step(self, episode: str, action: str) -> None:
        """Passes an action on."""
        self._call(episode, "step", action)

    def close(self, episode: str) -> None:
        """Ends an episode. Its environment is closed as soon as it returns from its last call; a process in a call is killed."""
        running = self._running.pop(episode, None)
        if running is None:
            return
        running.closed = True
        running.inbox.put(None)
        in_call = self._working.pop(episode, None) is not None
        if in_call and isinstance(running.environment, ProcessEnvironment):
            running.environment.kill()
            in_call = False
        if in_call and running.future is not None:
            in_call = not running.future.cancel()
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        if not in_call and running.thread is not None:  # one in a call may hang
            self._closing.append(running.thread)

    @property
    def working(self) -> int:
        """Number of calls that have not been answered."""
        return len(self._working)

    def poll(self, patience: float | None, most: float = math.inf) -> list[tuple[str, Outcome]]:
        """The answers since the last poll, by episode.

        It waits for each call until the call is ``patience`` seconds old. With ``None`` it waits until something is answered. It
        waits ``most`` seconds in all.
        """
        found: list[tuple[str, Outcome]] = []
        until = self._now() + most
        while self._working:
            try:
                episode, call, outcome, answered_at = self._next_answer(patience, bool(found), until)
            except queue.Empty:
                found += self._late()
                if found or patience is not None or self._now() >= until:
                    break
            else:
                if episode in self._working and self._running[episode].call == call:  # else it was given up
                    found.append((episode, self._in_time(episode, outcome, answered_at)))
        return sorted(found, key=lambda each: each[0])

    def _next_answer(self, patience: float | None, answered: bool, until: float) -> tuple[str, int, Outcome, float]:
        """An answer; raises `queue.Empty` when no call is worth waiting for, when one has taken too long, or at ``until``."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get_nowait()
        now = self._now()
        ages = [(now - since, self._running[episode].seconds) for episode, since in self._working.items()]
        late = min(seconds - age for age, seconds in ages)
        worth = (0.0 if answered else late) if patience is None else max(patience - age for age, _ in ages)
        if (wait := min(worth, late, until - now)) <= 0:
            raise queue.Empty
        return self._answers.get(timeout=min(wait, threading.TIMEOUT_MAX))

    def _late(self) -> list[tuple[str, Outcome]]:
        """Gives up the calls that have taken too long."""
        now = self._now()
        found: list[tuple[str, Outcome]] = []
        for episode, since in list(self._working.items()):
            if now - since >= self._running[episode].seconds:
                message = f"its environment took {self.seconds:g} s in all and did not return from its last call"
                found.append((episode, EnvironmentFailed("timeout", message)))
                self.close(episode)
        return found

    def _in_time(self, episode: str, outcome: Outcome, answered_at: float) -> Outcome:
        """Notes the end of a call, and returns the outcome if the environment had the time for it.

        How long the answer waited for a poll does not count.
        """
        taken, running = answered_at - self._working.pop(episode), self._running[episode]
        running.seconds -= taken
        self.typical_s += RECENT * (taken - self.typical_s)
        if running.seconds >= 0:
            return outcome
        took = self.seconds - running.seconds
        return EnvironmentFailed("timeout", f"its environment took {took:.3g} s in all, more than {self.seconds:g} s")

    def _call(self, episode: str, *message: Any) -> None:
        running = self._running[episode]
        self._calls += 1
        running.call = self._calls
        self._working[episode] = self._now()
        running.inbox.put((running.call, message[0], message[1:]))

    def _serve(self, episode: str, running: _Running) -> None:
        """The thread of an environment: makes it, passes calls on until it is closed, and closes it."""
        while (message := running.inbox.get()) is not None:
            call, method, arguments = message
            try:
                if running.environment is None:
                    running.environment = self.make_environment()
                    if running.closed:  # before there was a process to kill
                        break
                if method == "reset":  # here, next to the other environments and the engine
                    row, seed = arguments
                    arguments = copied(row, {}), seed
                answer: Outcome = check_observation(
                    self._result(getattr(running.environment, method)(*arguments), running), method
                )
            except EnvironmentFailed as failure:
                answer = failure
            except MemoryError as error:
                answer = EnvironmentFailed("memory", f"{method} raised MemoryError: {error}")
            except BaseException as error:  # also SystemExit: an environment ends its episode, not the run
                answer = EnvironmentFailed("error", raised(method, error, running.environment))
                answer.__cause__ = error
            self._answers.put((episode, call, answer, self._now()))
        if (close := getattr(running.environment, "close", None)) is not None:
            with contextlib.suppress(BaseException):  # the episode is over
                self._result(close())

    def _result(self, value: Any, running: _Running | None = None) -> Any:
        """The value, or the result of a coroutine on the event loop, which is cancelled when ``running`` is closed."""
        if not inspect.isawaitable(value):
            return value
        future = asyncio.run_coroutine_threadsafe(awaited(value), self._loop)
        if running is not None:
            running.future = future
            if running.closed:
                future.cancel()
        return future.result()
