"""Groups of workers: how a call reaches them and how its result comes back.

A method says by `dispatch` how a group with several ranks splits its arguments and joins its results. A recipe calls
``group.method(...)``, or ``group.submit("method", ...)`` for a future, and cannot tell which kind of group it talks to.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from workers.ranks.dispatch_modes import dispatch, dispatch_of

__all__ = ["LocalGroup", "dispatch"]


class LocalGroup:
    """One worker in this process: every dispatch mode is a plain call."""

    ended: str | None = None  # why no call can be made any more: of this process there is no such reason

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def submit(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Runs the call and returns its finished future; an exception waits there as well."""
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
