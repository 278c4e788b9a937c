"""An engine whose models are in a process of Ray, on a machine of the cluster with a free device."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from dataproto.errors import WorkerFailed
from dataproto_server.backend import Failure, Pass, PassResult
from dataproto_server.config import EngineOptions
from dataproto_server.engine.in_process import InProcessEngine, Polled, request_of
from workers.cluster.launcher import launch_worker
from workers.ranks.dispatch_modes import dispatch


class EngineWorker:
    """An `InProcessEngine` as a worker of a group."""

    def __init__(self, models: Mapping[str, str], options: EngineOptions, device: torch.device | None) -> None:
        self.engine = InProcessEngine(models, options, device)
        self._finished: Polled = []

    @dispatch("rank_zero")
    def call(self, method: str, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """A method of the engine."""
        return getattr(self.engine, method)(*values, **named)

    @dispatch("rank_zero")
    def passes(self, passes: Sequence[Pass]) -> list[PassResult | Failure]:
        """`InProcessEngine.passes` with a decoding step between two parts."""
        return self.engine.passes(passes, between=self._decode)

    def _decode(self) -> None:
        self._finished += self.engine.poll()

    @dispatch("rank_zero")
    def poll(self) -> Polled:
        """`InProcessEngine.poll`."""
        finished, self._finished = self._finished, []
        return finished + self.engine.poll()

    @dispatch("rank_zero")
    def abort(self, request_ids: Sequence[str]) -> None:
        """`InProcessEngine.abort`, also of what is finished and was not polled."""
        self.engine.abort(request_ids)
        self._finished = [each for each in self._finished if request_of(each) not in set(request_ids)]


class PlacedEngine:
    """A `Backend` in a worker that `launch_worker` starts. Both sides need the same paths of checkpoints and of the state.

    When the worker ends, this program ends too: its supervisor starts both again.
    """

    def __init__(self, models: Mapping[str, str], options: EngineOptions, on: str, **backend: Any) -> None:
        """``backend``: options of `launch`'s backend ``on``. Raises the errors of `launch_worker`."""
        self._stack = ExitStack()
        self._group = launch_worker(lambda device: EngineWorker(models, options, device), self._stack, on, **backend)

    def close(self) -> None:
        """Ends the worker."""
        self._stack.close()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """A method of `Backend`. The worker writes files before it returns, and decodes by itself between two parts of a pass."""

        if method.startswith("_"):
            raise AttributeError(method)

        def call(*values: Any, later: Any = None, between: Any = None, **named: Any) -> Any:
            if method in ("passes", "poll", "abort"):
                return self._sent(method, *values, *named.values())
            return self._sent("call", method, values, named)

        return call

    def _sent(self, method: str, *arguments: Any) -> Any:
        try:
            return self._group.submit(method, *arguments).result()
        except WorkerFailed as error:
            if self._group.closed_reason is not None:
                raise SystemExit(f"the engine's worker has ended: {error}") from error
            raise
