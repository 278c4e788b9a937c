"""A group of one worker in this process.

A recipe calls ``group.method(...)``, or ``group.submit("method", ...)`` for a future, in the same way on every kind of group.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

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
        method: Callable[..., Any] = getattr(self.worker, name)
        return method
