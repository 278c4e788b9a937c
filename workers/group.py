"""Groups of workers: how a call reaches them and how its result comes back.

A method says by `dispatch` how a group with several ranks splits its arguments and joins its results. A recipe calls
``group.method(...)``, or ``group.submit("method", ...)`` for a future, and cannot tell which kind of group it talks to.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from dataproto.errors import InvalidConfig

DispatchMode = Literal["dp", "all", "rank_zero"]
Method = TypeVar("Method", bound=Callable[..., Any])


def dispatch(mode: DispatchMode) -> Callable[[Method], Method]:
    """Marks a worker's method as callable through a group.

    ``"dp"``: rows are split over the data-parallel ranks and joined again; ``"all"``: every rank gets the same arguments;
    ``"rank_zero"``: only the first rank is called.
    """

    def mark(method: Method) -> Method:
        method.dispatch_mode = mode  # type: ignore[attr-defined]
        return method

    return mark


class LocalGroup:
    """One worker in this process: every dispatch mode is a plain call."""

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
        method: Callable[..., Any] = getattr(self.worker, name, _no_method)
        if not hasattr(method, "dispatch_mode"):
            callable_names = sorted(
                n for n in dir(self.worker) if hasattr(getattr(self.worker, n, None), "dispatch_mode")
            )
            raise InvalidConfig(
                f"{type(self.worker).__name__} has no method {name!r} to call through a group; it has {callable_names}"
            )
        return method


def _no_method() -> None:
    """Stands for a method that a worker does not have."""
