"""The phases of vLLM's start: the seconds of each, and a line of the log when one begins.

The last line of the log names the phase that a start is in, if it takes long.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from pkgutil import resolve_name
from typing import Any

log = logging.getLogger(__name__)

REST = "engine and scheduler"
"""The phase of all that is in no other one."""

CALLS = {
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "configuration",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor._init_executor": "device and process groups",
    "vllm.v1.worker.gpu_worker:Worker.load_model": "model",
    "vllm.v1.worker.gpu_worker:kernel_warmup": "kernels",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_mm_dummy_batch": "an image of the largest size",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_sampler_run": "sampling",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_cudagraph_memory": "memory of graphs",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model": "CUDA graphs",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_sampler_run": "sampling",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model": "CUDA graphs",
    "vllm.compilation.backends:VllmBackend.__call__": "compilation",
    "vllm.compilation.backends:CompilerManager.compile": "compilation",
}
"""Functions of vLLM that a start calls, as ``module:name``, and their phases. Those that a version lacks are left out."""

BLOCKS = {"vllm.compilation.decorators:monitor_torch_compile": "tracing"}
"""The same for functions that return context managers."""

WORKER_CALLS = {
    "determine_available_memory": "memory profile",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "warm-up",
}
"""Methods that vLLM's executor calls by name after the model is loaded."""


class StartTimeline:
    """The phases of a start. While one runs within another, its time counts only for it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock, self._began = clock, clock()
        self._last = self._began  # when a phase began or ended
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block belongs to the phase ``name``.

        >>> ticks = iter([0.0, 1.0, 3.0, 7.0, 9.0])
        >>> timeline = StartTimeline(lambda: next(ticks))
        >>> with timeline.phase("memory profile"), timeline.phase("compilation"):
        ...     pass
        >>> timeline.seconds
        {'memory profile': 4.0, 'compilation': 4.0}
        """
        self._count()
        if name not in self.seconds:
            log.info("vLLM's start, %.1f s: %s", self._last - self._began, name)
        self.seconds.setdefault(name, 0.0)
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        """Gives the time since the last change to the innermost phase."""
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._last = now

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function ``call``, as the phase ``name``."""

        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return call(*args, **kwargs)

        return run

    def timed_block(
        self, call: Callable[..., AbstractContextManager[Any]], name: str
    ) -> Callable[..., AbstractContextManager[Any]]:
        """The function ``call`` that returns a context manager, whose block is the phase ``name``."""

        @contextmanager
        def run(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self.phase(name), call(*args, **kwargs) as value:
                yield value

        return run

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """Times the phases of an engine that starts in the block."""
        with ExitStack() as stack:
            stack.enter_context(self.phase(REST))
            for path, name in CALLS.items():
                stack.enter_context(replaced(path, partial(self.timed, name=name)))
            for path, name in BLOCKS.items():
                stack.enter_context(replaced(path, partial(self.timed_block, name=name)))
            stack.enter_context(
                replaced("vllm.v1.executor.uniproc_executor:UniProcExecutor.collective_rpc", self._timed_worker)
            )
            yield
        log.info("vLLM's start took %.1f s: %s", self._last - self._began, described(self.seconds))

    def _timed_worker(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The executor's call of its worker, where `WORKER_CALLS` are phases."""

        @wraps(call)
        def run(executor: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
            name = WORKER_CALLS.get(method) if isinstance(method, str) else None
            if name is None:
                return call(executor, method, *args, **kwargs)
            with self.phase(name):
                return call(executor, method, *args, **kwargs)

        return run


def described(seconds: dict[str, float]) -> str:
    """Phases in one line, the longest first.

    >>> described({"model": 2.0, "compilation": 31.26})
    'compilation 31.3, model 2.0'
    """
    return ", ".join(f"{name} {each:.1f}" for name, each in sorted(seconds.items(), key=lambda pair: -pair[1]))


@contextmanager
def replaced(path: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a function ``module:name`` by what ``by`` makes of it, in the block; does nothing if there is none."""
    module, _, name = path.partition(":")
    outer, _, last = name.rpartition(".")
    try:
        owner = resolve_name(f"{module}:{outer}" if outer else module)
        own = vars(owner)[last]
    except (ImportError, AttributeError, KeyError):
        yield
        return
    setattr(owner, last, by(own))
    try:
        yield
    finally:
        setattr(owner, last, own)
