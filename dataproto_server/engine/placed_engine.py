"""An engine whose models are in a process of Ray, on a machine of the cluster with a free device."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dataproto.errors import WorkerFailed
from dataproto_server.backend import (
    Capabilities,
    Failure,
    Later,
    LoraSpec,
    Pass,
    PassResult,
    SampleRequest,
    at_once,
    nothing,
)
from dataproto_server.engine.engine_options import EngineOptions
from dataproto_server.engine.in_process import InProcessEngine, Polled, read_options, request_of
from workers.cluster.launcher import launch_worker
from workers.model.model_config import AdamParams
from workers.ranks.dispatch_modes import dispatch


class EngineWorker:
    """An `InProcessEngine` as a worker of a group."""

    def __init__(self, models: Mapping[str, str], options: EngineOptions, device: torch.device | None) -> None:
        self.engine = InProcessEngine(models, options, device)
        self._finished: Polled = []

    @dispatch("rank_zero")
    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """A method of the engine."""
        return getattr(self.engine, method)(**arguments)

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

    def _sent(self, method: str, *arguments: Any) -> Any:
        try:
            return self._group.submit(method, *arguments).result()
        except WorkerFailed as error:
            if self._group.closed_reason is not None:
                raise SystemExit(f"the engine's worker has ended: {error}") from error
            raise

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._sent("call", method, arguments)

    def start(self) -> None:
        """See `Backend.start`."""
        self._call("start")

    def describe(self) -> Capabilities:
        """See `Backend.describe`."""
        found: Capabilities = self._call("describe")
        return found

    def create(self, model_id: str, base_model: str, lora: LoraSpec | None, *, replayed: bool = False) -> None:
        """See `Backend.create`."""
        self._call("create", model_id=model_id, base_model=base_model, lora=lora, replayed=replayed)

    def passes(self, passes: Sequence[Pass], *, between: Callable[[], None] = nothing) -> list[PassResult | Failure]:
        """See `Backend.passes`. ``between`` is not called: the worker makes a decoding step between two parts."""
        results: list[PassResult | Failure] = self._sent("passes", passes)
        return results

    def optim_step(self, model_id: str, adam: AdamParams) -> Mapping[str, float]:
        """See `Backend.optim_step`."""
        metrics: Mapping[str, float] = self._call("optim_step", model_id=model_id, adam=adam)
        return metrics

    def save(
        self, model_id: str, directory: Path, *, later: Later = at_once, between: Callable[[], None] = nothing
    ) -> None:
        """See `Backend.save`. The files are written when it returns."""
        self._call("save", model_id=model_id, directory=directory)

    def load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """See `Backend.load`."""
        self._call("load", model_id=model_id, directory=directory, optimizer=optimizer)

    def export(self, model_id: str, directory: Path, *, sampled: bool = False, later: Later = at_once) -> None:
        """See `Backend.export`. The files are written when it returns."""
        self._call("export", model_id=model_id, directory=directory, sampled=sampled)

    def release(self, model_id: str) -> None:
        """See `Backend.release`."""
        self._call("release", model_id=model_id)

    def open_sampler(self, sampler_id: str, base_model: str, adapter: Path | None) -> None:
        """See `Backend.open_sampler`."""
        self._call("open_sampler", sampler_id=sampler_id, base_model=base_model, adapter=adapter)

    def close_sampler(self, sampler_id: str) -> None:
        """See `Backend.close_sampler`."""
        self._call("close_sampler", sampler_id=sampler_id)

    def submit(self, request: SampleRequest) -> None:
        """See `Backend.submit`."""
        self._call("submit", request=request)

    def poll(self) -> Polled:
        """See `Backend.poll`."""
        found: Polled = self._sent("poll")
        return found

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Backend.abort`."""
        self._sent("abort", request_ids)


def placed_engine_from_json(text: str) -> PlacedEngine:
    """An engine in a process of Ray, of the options of `engine_from_json` and ``ray``, those of `RayConfig`.

    Raises:
        InvalidConfig: the text is no such JSON; names what is wrong. See also `launch_worker`.
    """
    models, options, rest = read_options(text, "ray")
    return PlacedEngine(models, options, "ray", **rest["ray"])
