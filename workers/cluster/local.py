"""All roles in this process, each in a group of one worker.

A recipe calls ``group.method(...)``, or ``group.submit("method", ...)`` for a future, in the same way on every kind of group.
"""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from dataproto.errors import InvalidConfig
from workers.cluster.role_groups import LaunchPlan, Phase, Roles, start_phase, worker_makers
from workers.ranks.dispatch_modes import dispatch_of


class LocalGroup:
    """One worker in this process. In every dispatch mode ``group.method`` is the worker's own bound method."""

    closed_reason: str | None = None  # a local group is never closed; see `RayGroup.closed_reason`

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def submit(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Runs the call and returns a finished future, which holds the result or the exception."""
        future: Future[Any] = Future()
        try:
            future.set_result(self._method(method)(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name == "worker":
            raise AttributeError(name)
        return self._method(name)

    def _method(self, name: str) -> Callable[..., Any]:
        dispatch_of(type(self.worker), name)
        return getattr(self.worker, name)


def start_roles(plan: LaunchPlan, phase: Phase) -> Roles:
    """Builds the workers of all roles in this process.

    Raises:
        InvalidConfig: the layout has more than one rank, or engines on devices of their own.
    """
    if plan.layout.world_size + plan.layout.rollout > 1:
        raise InvalidConfig(f"{plan.layout} needs several processes: use on='ray'")
    workers: dict[str, Any] = {}
    host = SimpleNamespace(device=None, ranks=None, roles=workers)
    for role, make in worker_makers(plan).items():
        with phase(start_phase(role, plan)):
            workers[role] = make(host)
    groups = {role: LocalGroup(worker) for role, worker in workers.items()}
    return Roles(groups.pop("actor"), groups.pop("rollout", None), groups)
