"""Environments of `verifiers` (0.4) as agents: their harnesses, tools and rewards run as they are."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dataproto.errors import InvalidConfig, raised_as
from rollout.agents.agent import AgentTask


class VerifiersAgent:
    """An environment of `verifiers` as an agent.

    Each row names its task by ``extra_info["task"]``, the place in the task set: `write_rows` writes such rows. The reward is the
    mean over the traces that verifiers would train on, and its metrics and named rewards become columns. The model of each role
    that names none is the policy, whose replies are learned: give a judge a client of its own.
    """

    def __init__(self, environment: Any) -> None:
        """``environment``: its configuration as verifiers reads it, an ``EnvConfig`` or a dict, such as
        ``{"taskset": {"id": "my_tasks"}, "agent": {"runtime": {"type": "subprocess"}}}``.

        Raises:
            InvalidConfig: verifiers is not installed.
        """
        with raised_as(InvalidConfig, "environments of verifiers need pip install 'verifiers>=0.4,<0.5'", ImportError):
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        self._load = partial(load_environment, resolve_env_config(environment))
        self._load()  # errors come now
        self._tasks: list[Any] = []
        self._further: Iterator[Any] | None = None  # begun in the process that plays
        self._serving: dict[asyncio.AbstractEventLoop, _Serving] = {}

    async def __call__(self, task: AgentTask) -> dict[str, float]:
        """Runs an episode. Raises `RuntimeError` with the first error of one that verifiers calls not ok."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        key = {"x-api-key": task.api_key}
        client = EvalClientConfig(base_url=task.base_url, headers=key, api_key_var="NO_KEY_OF_THE_ENVIRONMENT")
        async with self._served() as environment:
            episode = await environment.run_episode(self._task(task.row), ModelContext(task.model, client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            told = (f"{error.type}: {error.message or error.traceback}" for error in errors)
            raise RuntimeError(next(told, "not ok"))
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        numbers: dict[str, float | None] = {}
        for trace in trained:
            numbers |= trace.metrics | {name: reward and reward.value for name, reward in trace.rewards.items()}
        found = {name: value for name, value in numbers.items() if value is not None}
        return found | {"score": sum(trace.reward for trace in trained) / max(len(trained), 1)}

    def write_rows(self, path: str | Path, count: int | None = None) -> Path:
        """Writes a row for each of the first ``count`` tasks, as JSON lines for ``--data-path``; without it for all tasks.

        Raises:
            InvalidConfig: there is no end of the tasks, and no ``count``.
        """
        taskset = self._load().taskset
        if count is not None:
            taskset = taskset.take(count)
        elif not taskset.bounded:
            raise InvalidConfig(f"{type(taskset).__name__} has no end of tasks: give the count")
        rows = ({"prompt": each.data.prompt_text, "extra_info": {"task": n}} for n, each in enumerate(taskset))
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return Path(path)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[Any]:
        """An environment whose servers are those of all episodes that run at a time."""
        loop = asyncio.get_running_loop()
        if loop not in self._serving:
            self._serving[loop] = _Serving(self._load())
        serving = self._serving[loop]
        serving.episodes += 1
        try:
            yield await serving.begun()
        finally:
            serving.episodes -= 1
            if not serving.episodes:
                del self._serving[loop]
                serving.over.set()

    def _task(self, row: Any) -> Any:
        place = (row.get("extra_info") or {}).get("task")
        if not isinstance(place, int):
            raise InvalidConfig("a row has no extra_info['task']: VerifiersAgent.write_rows writes rows that have")
        if self._further is None:
            self._further = iter(self._load().taskset)
        while len(self._tasks) <= place:
            if (following := next(self._further, None)) is None:
                raise InvalidConfig(f"a row names task {place}, but there are {len(self._tasks)}")
            self._tasks.append(following)
        return self._tasks[place]


class _Serving:
    """An environment that serves in a task of its own, since what one task has begun another cannot end."""

    def __init__(self, environment: Any) -> None:
        self.environment, self.episodes = environment, 0
        self.over, self._ready = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begun(self) -> Any:
        """The environment once it serves. Raises what its start raised."""
        if self._task is None:
            self._task = asyncio.create_task(self._serve())
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait((ready, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.is_set():
            ready.cancel()
            self._task.result()
        return self.environment

    async def _serve(self) -> None:
        async with self.environment.serving():
            self._ready.set()
            await self.over.wait()
