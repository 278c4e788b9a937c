"""Where the metrics and rollouts of a run go: ``metrics.jsonl`` always, and any number of trackers in addition to it.

A tracker that fails is told once and left out, and the others continue. One of your own is a class with three methods, named on
the command line as ``--loggers my_file.py:MyLogger``::

    class MyLogger:
        def __init__(self, run: LoggedRun) -> None: ...
        def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
        def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None: ...
        def close(self) -> None: ...
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dataproto.errors import DataProtoError, InvalidConfig, describe
from dataproto.extras import require_extra
from recipes.algorithms.function_files import load_named_function
from recipes.watch.metrics_file import MetricsLog
from recipes.watch.rollout_files import RolloutSample, load_rollouts, rollout_steps
from recipes.watch.trackers import LOGGERS, LoggedRun, RunLogger

JSONL = "jsonl"  # always written: the report, a resumed run and the summary read it


class RunLoggers:
    """Gives metrics and rollouts to ``metrics.jsonl`` and to trackers. Without the file no run continues; a tracker may fail."""

    def __init__(self, directory: Path, file: MetricsLog) -> None:
        self.directory, self.file, self.trackers = directory, file, dict[str, RunLogger]()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the metrics of a step.

        Raises:
            InvalidConfig: the step is not above the last one.
            OSError: ``metrics.jsonl`` cannot be written.
        """
        self.file.log(step, metrics)
        self._each(f"at step {step}", lambda tracker: tracker.log(step, metrics))

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        """Gives rollouts to the trackers; ``metrics.jsonl`` has none."""
        self._each(f"at the rollouts of step {step}", lambda tracker: tracker.log_rollouts(step, rows))

    def log_saved_rollouts(self, step: int) -> None:
        """Gives the trackers the rollouts of a step that the run's directory holds, if it holds any."""
        if self.trackers and step in rollout_steps(self.directory):
            self.log_rollouts(step, load_rollouts(self.directory, step))

    def close(self) -> None:
        self._each("as it was closed", lambda tracker: tracker.close())
        self.trackers = {}
        self.file.close()

    def _each(self, when: str, call: Callable[[RunLogger], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del self.trackers[name]
                why = _described(name, tracker, error)
                print(f"warning: logger {name} failed {when} and gets nothing more: {why}", file=sys.stderr)


def check_loggers(names: Sequence[str]) -> None:
    """Refuses what cannot be opened, before anything is started; a user's own class is looked up when it is opened.

    Raises:
        InvalidConfig: a name is unknown or given twice.
        MissingPackage: the package of a tracker is not installed; names the extra.
    """
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InvalidConfig(f"logger {name!r} is given twice")
        if name in LOGGERS:
            require_extra(LOGGERS[name].extra, f"logger {name!r}", LOGGERS[name].package)
        elif name != JSONL and ":" not in name:
            known = ", ".join([JSONL, *LOGGERS])
            raise InvalidConfig(f"logger {name!r} is unknown: choose from {known}, MODULE:CLASS or FILE.py:CLASS")


@contextmanager
def open_loggers(names: Sequence[str] | None, run: LoggedRun) -> Iterator[RunLoggers]:
    """``metrics.jsonl`` and the trackers that ``names`` has, open; by default TensorBoard's, if it is installed.

    Raises:
        InvalidConfig, MissingPackage: see `check_loggers`; or a tracker cannot start, in one line.
    """
    if names is None:
        names = ("tensorboard",) if find_spec("tensorboard") else ()
        if not names:
            print("no TensorBoard events: pip install 'dataproto-vlm[loggers]'", file=sys.stderr)
    check_loggers(names)
    factories = {name: _load(name) for name in names if name != JSONL}
    with closing(RunLoggers(run.directory, MetricsLog(run.directory, run.resume_after))) as loggers:
        for name, factory in factories.items():
            loggers.trackers[name] = _start(name, factory, run)
        yield loggers


def _start(name: str, factory: Callable[[LoggedRun], RunLogger], run: LoggedRun) -> RunLogger:
    try:
        return factory(run)
    except DataProtoError:
        raise
    except Exception as error:
        raise InvalidConfig(f"logger {name!r} cannot start: {_described(name, factory, error)}") from error


def _load(name: str) -> Callable[[LoggedRun], RunLogger]:
    if name in LOGGERS:
        return LOGGERS[name].logger
    module, _, attribute = name.rpartition(":")
    if module.endswith(".py"):
        return load_named_function(name, "logger", InvalidConfig)
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(f"logger {name!r} cannot be imported: {_one_line(error)}") from error
    except Exception as error:
        raise InvalidConfig(f"logger {name!r} cannot be imported: {describe(error)}") from error
    factory: Callable[[LoggedRun], RunLogger] = found
    return factory


def _described(name: str, logger: object, error: Exception) -> str:
    """An exception in one line, of a user's own class with its place."""
    if ":" not in name:
        return _one_line(error)
    try:
        return describe(error, inspect.getsourcefile(logger if isinstance(logger, type) else type(logger)))
    except TypeError:  # no class of Python
        return describe(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
