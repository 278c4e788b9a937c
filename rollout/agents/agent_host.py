"""Runs agents in threads, with the endpoint that they talk to."""

import asyncio
import gc
import inspect
import threading
from collections.abc import Awaitable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

from dataproto.errors import describe, end_after
from rollout.agents.agent import Agent, AgentTask, Outcome
from rollout.agents.endpoint import Asked, Endpoint
from rollout.environments.environment_host import event_loop

MODEL = "policy"
"""The name of the model on the endpoint; requests may name it otherwise."""


@dataclass(frozen=True)
class Rewarded:
    """An agent gave a reward for a turn."""

    episode: int
    value: Any


@dataclass(frozen=True)
class Ended:
    """An agent returned or failed. What another process may not know of an error is told as texts."""

    episode: int
    outcome: Any = None
    failure: str = ""  # with the line of the agent's file
    causes: tuple[str, ...] = ()  # the error, and those that it came from
    of_memory: bool = False

    @classmethod
    def by(cls, error: BaseException, episode: int = 0, file: str | None = None) -> "Ended":
        """The end of an agent that raised."""
        waiting: list[BaseException | None] = [error]
        seen, causes = set[int](), list[str]()
        while waiting:
            each = waiting.pop()
            if each is not None and id(each) not in seen:
                seen.add(id(each))
                causes.append(describe(each))
                waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
        failure, of_memory = f"the agent raised {describe(error, file)}", isinstance(error, MemoryError)
        return cls(episode, None, failure, tuple(causes), of_memory)


Event = Asked | Rewarded | Ended
Given = tuple[list[dict[str, Any]], list[dict[str, Any]], Mapping[str, Any], int]
"""Messages, tools, row and seed of an `AgentTask`."""


@cache
def settle_objects() -> None:
    """Exempts what is there now from the garbage collector, once for a process: modules and models, which stay.

    Agents' clients make so many objects that it would look at everything in each rollout, which takes 0.2 to 0.5 s.
    """
    gc.collect()
    gc.freeze()


class AgentHost:
    """Agents in threads of this process, and their endpoint, which are up within its context."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.inbox = agent, SimpleQueue[Any]()
        self.endpoint = Endpoint(self.inbox, MODEL)
        self.at_once: int | None = getattr(agent, "at_once", None)
        self._keys: dict[int, str] = {}
        call = getattr(agent, "__call__", agent)  # noqa: B004
        self._is_async = inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(call)
        self._running: dict[int, Future[Any]] = {}
        self._tasks = set[Any]()
        self.stuck = False  # an agent did not give way as its rollout ended

    def __enter__(self) -> "AgentHost":
        settle_objects()
        self._loop = event_loop()
        self.endpoint.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Cancels the agents that still run. One that does not give way, such as one in a loop, is left alone."""
        end_after(None, self._stop, self.endpoint.__exit__)

    def _stop(self) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(2.0)
        except TimeoutError:
            self.stuck = True

    async def _cancel_all(self) -> None:
        for episode in list(self._running):
            self._cancel(episode)
        await asyncio.sleep(0)
        waiting = (await asyncio.wait(self._tasks, timeout=1.0))[1] if self._tasks else ()  # a command ends its process
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def begin(self, episode: int, given: Given) -> None:
        """Calls the agent with a task, and opens the endpoint for it."""
        key, url = self.endpoint.open(episode), self.endpoint.url
        self._keys[episode] = key

        def give(value: Any) -> None:
            self.inbox.put(Rewarded(episode, value))

        task = AgentTask(f"{url}/v1", url, key, MODEL, *given, app=self.endpoint.app, give=give)
        if self._is_async:
            running = asyncio.run_coroutine_threadsafe(self._awaited(task), self._loop)
            self._running[episode] = running
            running.add_done_callback(partial(self._ended, episode))
        else:
            threading.Thread(target=self._call, args=(episode, task), name="agent", daemon=True).start()

    def end(self, episode: int) -> None:
        """Lets an agent ask no more, and tells it to stop; a plain function runs on until it returns."""
        if episode in self._keys:
            self.endpoint.shut(self._keys.pop(episode))
        self._cancel(episode)

    def next(self, seconds: float) -> Event | None:
        """What an agent has done, if one does something in this time."""
        with suppress(Empty):
            return self.inbox.get(seconds > 0, seconds)
        return None

    def _cancel(self, episode: int) -> None:
        if episode in self._running:
            self._running.pop(episode).cancel()

    def _ended(self, episode: int, done: "Future[Any]") -> None:
        if not done.cancelled():
            error = done.exception()
            self._tell(episode, None if error else done.result(), error)
        elif episode in self._running:  # not by us
            self._tell(episode, error=RuntimeError("its task was cancelled"))

    def _tell(self, episode: int, outcome: Any = None, error: BaseException | None = None) -> None:
        file = getattr(getattr(self.agent, "__code__", None), "co_filename", None)
        self.inbox.put(Ended(episode, outcome) if error is None else Ended.by(error, episode, file))

    async def _awaited(self, task: AgentTask) -> Outcome:
        try:
            found: Any = self.agent(task)
            return await self._tracked(found)
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop of all agents
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def _tracked(self, found: Awaitable[Any]) -> Outcome:
        self._tasks.add(mine := asyncio.current_task())
        try:
            return await found
        finally:
            self._tasks.discard(mine)

    def _call(self, episode: int, task: AgentTask) -> None:
        try:
            found: Any = self.agent(task)
            if inspect.isawaitable(found):  # of an async function in a wrapper
                running = asyncio.run_coroutine_threadsafe(self._tracked(found), self._loop)
                self._running[episode] = running
                found = running.result()
            self._tell(episode, found)
        except BaseException as error:  # SystemExit too: it ends the episode, not the run
            self._tell(episode, error=error)
