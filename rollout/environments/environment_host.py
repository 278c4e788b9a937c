"""Runs environments beside the engine: each in a thread of its own, ``async`` methods on one event loop."""

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rollout.environments.environment import (
    EnvironmentFailed,
    MakeEnvironment,
    Observation,
    check_observation,
    raised,
)
from rollout.environments.environment_process import ProcessEnvironment, in_process

CLOSING_S = 2.0
"""Seconds that the environments get to close at the end."""

RECENT = 0.1
"""Weight of the latest call in the typical time of calls."""

Outcome = Observation | EnvironmentFailed


@dataclass
class _Running:
    """The environment of an episode and its thread."""

    seconds: float  # left of its time
    inbox: "queue.SimpleQueue[tuple[int, str, tuple[Any, ...]] | None]" = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None
    environment: Any = None
    call: int = 0  # number of the last call; answers to other ones do not count
    pending: list[Any] = field(default_factory=list)  # the future of an async method that is running
    closed: bool = False


class EnvironmentHost:
    """The environments of many episodes. Calls return at once; `poll` returns what they answered.

    A thread whose environment hangs is left alone and does not keep the process alive.
    """

    def __init__(self, make_environment: MakeEnvironment, seconds: float, memory_gib: float | None = None) -> None:
        """
        Args:
            seconds: the time that the environment of one episode may take, all its calls together.
            memory_gib: of an environment in a process of its own, see `in_process`; ``None``: in a thread, no limit.

        Raises:
            InvalidConfig: see `in_process`.
        """
        self.typical_s = 0.0  # that recent calls took
        self.seconds, self.memory_gib = seconds, memory_gib
        self.make_by(make_environment)
        self._answers: queue.SimpleQueue[tuple[str, int, Outcome]] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._working: dict[str, float] = {}  # when the call of an episode began that has not been answered
        self._closing: list[threading.Thread] = []
        self._calls = 0
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._loop_thread.start()
        self._paused: float | None = None

    def make_by(self, make_environment: MakeEnvironment) -> None:
        """Makes further environments by this function. Raises `InvalidConfig`, see `in_process`."""
        if self.memory_gib is not None:
            make_environment = in_process(make_environment, self.memory_gib)
        self.make_environment = make_environment

    def __enter__(self) -> "EnvironmentHost":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shut()

    def shut(self) -> None:
        """Closes all environments and ends the event loop. Further calls do nothing."""
        if self._loop.is_closed():
            return
        for episode in list(self._running):
            self.close(episode)
        until = time.monotonic() + CLOSING_S
        for thread in self._closing:
            thread.join(max(until - time.monotonic(), 0.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(CLOSING_S)
        if not self._loop_thread.is_alive():
            self._loop.close()

    def __contains__(self, episode: str) -> bool:
        """Whether there is an environment of this episode."""
        return episode in self._running

    @property
    def episodes(self) -> list[str]:
        """The episodes that have an environment."""
        return list(self._running)

    def pause(self) -> None:
        """Stops the clock of calls that have not been answered. The environments go on."""
        self._paused = time.monotonic()

    def resume(self) -> None:
        """Starts the clock again after `pause`."""
        if self._paused is not None:
            paused_s, self._paused = time.monotonic() - self._paused, None
            self._working = {episode: since + paused_s for episode, since in self._working.items()}

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
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        if not in_call and running.thread is not None:  # one in a call may hang
            self._closing.append(running.thread)

    @property
    def working(self) -> int:
        """Number of calls that have not been answered."""
        return len(self._working)

    def poll(self, patience: float | None) -> list[tuple[str, Outcome]]:
        """The answers since the last poll, by episode.

        It waits for each call until the call is ``patience`` seconds old. With ``None`` it waits until something is answered.
        """
        found: list[tuple[str, Outcome]] = []
        while self._working:
            try:
                episode, call, outcome = self._next_answer(patience, bool(found))
            except queue.Empty:
                found += self._late()
                if found or patience is not None:
                    break
            else:
                if self._answered(episode, call):
                    found.append((episode, outcome))
        return sorted(found, key=lambda each: each[0])

    def _next_answer(self, patience: float | None, answered: bool) -> tuple[str, int, Outcome]:
        """An answer; raises `queue.Empty` when no call is worth waiting for, or when one has taken too long."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get_nowait()
        now = time.monotonic()
        ages = [(now - since, self._running[episode].seconds) for episode, since in self._working.items()]
        late = min(seconds - age for age, seconds in ages)
        worth = (0.0 if answered else late) if patience is None else max(patience - age for age, _ in ages)
        if (wait := min(worth, late)) <= 0:
            raise queue.Empty
        return self._answers.get(timeout=min(wait, threading.TIMEOUT_MAX))

    def _late(self) -> list[tuple[str, Outcome]]:
        """Gives up the calls that have taken too long."""
        now = time.monotonic()
        found: list[tuple[str, Outcome]] = []
        for episode, since in list(self._working.items()):
            running = self._running[episode]
            if now - since >= running.seconds:
                for future in running.pending:
                    future.cancel()
                message = f"its environment took {self.seconds:g} s in all and did not return from its last call"
                found.append((episode, EnvironmentFailed("timeout", message)))
                self.close(episode)
        return found

    def _answered(self, episode: str, call: int) -> bool:
        """Notes the end of a call; false for one that was given up."""
        if episode not in self._working or self._running[episode].call != call:
            return False
        taken = time.monotonic() - self._working.pop(episode)
        self._running[episode].seconds -= taken
        self.typical_s += RECENT * (taken - self.typical_s)
        return True

    def _call(self, episode: str, *message: Any) -> None:
        running = self._running[episode]
        self._calls += 1
        running.call = self._calls
        self._working[episode] = time.monotonic()
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
                answer: Outcome = check_observation(
                    self._result(getattr(running.environment, method)(*arguments), running.pending), method
                )
            except EnvironmentFailed as failure:
                answer = failure
            except MemoryError as error:
                answer = EnvironmentFailed("memory", f"{method} raised MemoryError: {error}")
            except BaseException as error:  # also SystemExit: an environment ends its episode, not the run
                answer = EnvironmentFailed("error", raised(method, error, running.environment))
                answer.__cause__ = error
            self._answers.put((episode, call, answer))
        if (close := getattr(running.environment, "close", None)) is not None:
            with contextlib.suppress(BaseException):  # the episode is over
                self._result(close(), running.pending)

    def _result(self, value: Any, pending: list[Any]) -> Any:
        """The value, or the result of a coroutine on the event loop."""
        if not inspect.isawaitable(value):
            return value

        async def wait() -> Any:
            return await value

        future = asyncio.run_coroutine_threadsafe(wait(), self._loop)
        pending[:] = [future]
        return future.result()
