"""Where the metrics and rollouts of a run go: ``metrics.jsonl`` always, and any number of trackers in addition to it.

Trackers are Weights & Biases and packages with its interface, and TensorBoard; a package is imported when its tracker is made.

A tracker that fails is told once and left out, and the others continue. One of your own is a class with three methods, named on
the command line as ``--loggers my_file.py:MyLogger``::

    class MyLogger:
        def __init__(self, run: LoggedRun) -> None: ...
        def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
        def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None: ...
        def close(self) -> None: ...
"""

import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from dataproto.errors import DataProtoError, InvalidConfig, describe, replace_file
from dataproto.extras import require_extra
from recipes.algorithms.function_files import load_named_function
from recipes.options.config_file import CONFIG_FILE
from recipes.watch.metrics_file import MetricsLog
from recipes.watch.rollout_files import RolloutSample, load_rollouts, rollout_steps

JSONL = "jsonl"  # always written: the report, a resumed run and the summary read it


TRACKER_IDS = "trackers.json"
COLUMNS = ("key", "prompt", "response", "ground_truth", "reward", "accuracy")
"""Of a table of rollouts, before its images."""


@dataclass(frozen=True)
class LoggedRun:
    """A run as its loggers know it."""

    directory: Path
    resume_after: int | None = None  # the last step to keep from an earlier process, -1 to keep none; None: a new run

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.directory.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """All options of the run, as its ``config.json`` has them; empty without that file."""
        return read_json(self.directory / CONFIG_FILE)

    def options(self) -> dict[str, Any]:
        """The options of `config` under the names that they have on the command line."""
        return flatten(self.config)

    def saved_id(self, tracker: str) -> str | None:
        """The tracker's name for this run, if an earlier process of it has saved one."""
        return read_json(self.directory / TRACKER_IDS).get(tracker)

    def save_id(self, tracker: str, name: str) -> None:
        """Remembers the tracker's name for this run, so that a resumed run continues it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        found = read_json(self.directory / TRACKER_IDS) | {tracker: name}
        replace_file(self.directory / TRACKER_IDS, f"{json.dumps(found, indent=2)}\n".encode())


class RunLogger(Protocol):
    """Something that keeps the metrics and rollouts of a run; made by a call with a `LoggedRun`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the metrics of a step, which may be NaN or infinite. Steps increase."""

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        """Keeps rollouts of an evaluation, with their images."""

    def close(self) -> None:
        """Writes what is left; called once."""


class _RunOfPackage:
    """A run of a package with W&B's interface: ``init``, and of what it returns ``log`` and ``finish``.

    The account, the project and the mode are set by the package's own environment variables.
    """

    def __init__(self, run: LoggedRun, package: ModuleType, identity: str, **options: Any) -> None:
        self.package, name = package, package.__name__
        self.run = package.init(project=os.environ.get(f"{name.upper()}_PROJECT", "dataproto"), **options)
        run.save_id(name, identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._send(step, finite(metrics))

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        most = max((len(row.images) for row in rows), default=0)  # all rows of a table have the same columns
        data = [
            [getattr(row, name) for name in COLUMNS]
            + [*map(self.package.Image, row.images), *[None] * (most - len(row.images))]
            for row in rows
        ]
        columns = [*COLUMNS, *(f"image_{number}" for number in range(most))]
        self._send(step, {"rollouts": self.package.Table(columns=columns, data=data)})

    def close(self) -> None:
        self.run.finish()

    def _send(self, step: int, values: dict[str, Any]) -> None:
        self.run.log(values, step=step)


class WandbLogger(_RunOfPackage):
    """Metrics over the axis ``step``; rollouts as a table with images. Files: ``<run>/wandb``.

    A resumed run continues under its id. Steps that it makes again are logged again, so that their curves overlap.
    """

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        identity = run.saved_id("wandb") or secrets.token_hex(4)
        # It holds the pictures of tables until they are synced.
        os.environ.setdefault("WANDB_DATA_DIR", str(run.directory.absolute()))
        options = {"name": run.name, "config": run.config, "dir": str(run.directory)}
        super().__init__(run, wandb, identity, id=identity, resume="allow", **options)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # W&B's own step could not go back after a resume

    def _send(self, step: int, values: dict[str, Any]) -> None:
        self.run.log(values | {"step": step})


class TrackioLogger(_RunOfPackage):
    """Metrics by step; rollouts as a table with images, in Trackio's directory or the Space that ``TRACKIO_SPACE_ID`` names.

    A resumed run continues under its name; steps that it makes again appear twice.
    """

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        saved = run.saved_id("trackio")
        name = saved or f"{run.name}-{secrets.token_hex(4)}"
        options = {"config": run.options(), "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        super().__init__(run, trackio, name, name=name, resume="must" if saved else "never", **options)


class SwanlabLogger(_RunOfPackage):
    """Metrics by step; rollouts, since SwanLab has no tables, as texts and images with captions. Files: ``<run>/swanlog``.

    Online, a resumed run continues under its id; with ``SWANLAB_MODE=offline`` each process leaves files of its own.
    """

    def __init__(self, run: LoggedRun) -> None:
        import swanlab

        identity = run.saved_id("swanlab") or secrets.token_hex(8)
        mode = os.environ.get("SWANLAB_MODE", "online")
        options = {"name": run.name, "config": run.config, "log_dir": str(run.directory.absolute() / "swanlog")}
        continued = {"id": identity, "resume": "allow"} if mode == "online" else {}
        super().__init__(run, swanlab, identity, mode=mode, **options, **continued)

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        said = [f"{row.key}: reward {row.reward:g}, ground truth {row.ground_truth}" for row in rows]
        pairs = list(zip(rows, said, strict=True))
        texts = [self.package.Text(f"{row.prompt}\n\n{row.response}", caption=caption) for row, caption in pairs]
        images = [self.package.Image(image, caption=caption) for row, caption in pairs for image in row.images]
        found = {"rollouts/texts": texts, "rollouts/images": images}
        self._send(step, {name: media for name, media in found.items() if media})


class TensorBoardLogger:
    """Scalars by step; rollouts as texts and images, in ``<run>/tensorboard``. Steps made again by a resumed run are hidden."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_after is None else run.resume_after + 1
        self.events = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, number in finite(metrics).items():
            self.events.add_scalar(name, number, step)
        self.events.flush()

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        for place, row in enumerate(rows):
            parts = {"prompt": row.prompt, "response": row.response, "ground truth": row.ground_truth}
            text = "\n\n".join(f"**{name}**\n\n{indent(value, '    ')}" for name, value in parts.items())
            self.events.add_text(f"rollouts/{place:02}", f"{text}\n\n**reward** {row.reward:g}", step)
            for number, image in enumerate(row.images):
                pixels = np.asarray(image.convert("RGB"))
                self.events.add_image(f"rollouts/{place:02}/image_{number}", pixels, step, dataformats="HWC")
        self.events.flush()

    def close(self) -> None:
        self.events.close()


LOGGERS: dict[str, Callable[[LoggedRun], RunLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
    "swanlab": SwanlabLogger,
}
"""Trackers by the names of their packages, which options give them and, but for TensorBoard, the extras have."""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite.

    >>> finite({"a": 1.0, "b": float("nan")})
    {'a': 1.0}
    """
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def flatten(config: Mapping[str, Any], prefix: str = "", whole: Collection[str] = ()) -> dict[str, Any]:
    """The values of a configuration under the names that they have on the command line; those of ``whole`` are not divided.

    >>> flatten({"model": {"path": "x", "sizes": [1, 2]}, "seed": 0})
    {'model.path': 'x', 'model.sizes': [1, 2], 'seed': 0}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        divided = isinstance(value, Mapping) and path not in whole
        found |= flatten(value, f"{path}.", whole) if divided else {path: value}
    return found


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
                told = f"logger {name} failed {when} and gets nothing more: {describe(error)}"
                print(f"warning: {told}", file=sys.stderr)


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
            require_extra("loggers" if name == "tensorboard" else name, f"logger {name!r}", name)
        elif name != JSONL and ":" not in name:
            known = ", ".join([JSONL, *LOGGERS])
            raise InvalidConfig(f"logger {name!r} is unknown: choose from {known} or FILE.py:CLASS")


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
    factories: dict[str, Callable[[LoggedRun], RunLogger]] = {
        name: LOGGERS.get(name) or load_named_function(name, "logger", InvalidConfig) for name in names if name != JSONL
    }
    with closing(RunLoggers(run.directory, MetricsLog(run.directory, run.resume_after))) as loggers:
        for name, factory in factories.items():
            try:
                loggers.trackers[name] = factory(run)
            except DataProtoError:
                raise
            except Exception as error:
                raise InvalidConfig(f"logger {name!r} cannot start: {describe(error)}") from error
        yield loggers
