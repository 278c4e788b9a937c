"""Environments of `verifiers` (0.4) as agents: their harnesses, tools and rewards run as they are."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from dataproto.errors import InvalidConfig
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
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as error:
            raise InvalidConfig(
                f"environments of verifiers need pip install 'verifiers>=0.4,<0.5' ({error})"
            ) from error
        self._load = partial(load_environment, resolve_env_config(environment))
        self._tasks, self._further = list[Any](), iter(self._load().taskset)

    async def __call__(self, task: AgentTask) -> dict[str, float]:
        """Runs an episode. Raises `RuntimeError` with the first error of one that verifiers calls not ok."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        environment = self._load()  # of its own: one that serves belongs to an event loop
        key = {"x-api-key": task.api_key}
        client = EvalClientConfig(base_url=task.base_url, headers=key, api_key_var="NO_KEY_OF_THE_ENVIRONMENT")
        async with environment.serving():
            episode = await environment.run_episode(self._task(task.row), ModelContext(task.model, client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors[:1]) or "not ok")
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

    def _task(self, row: Any) -> Any:
        place = (row.get("extra_info") or {}).get("task")
        if not isinstance(place, int):
            raise InvalidConfig("a row has no extra_info['task']: VerifiersAgent.write_rows writes rows that have")
        while len(self._tasks) <= place:
            if (following := next(self._further, None)) is None:
                raise InvalidConfig(f"a row names task {place}, but there are {len(self._tasks)}")
            self._tasks.append(following)
        return self._tasks[place]
