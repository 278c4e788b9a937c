"""Trackers on other packages: Weights & Biases, and TensorBoard.

A package is imported when its tracker is made.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from recipes.options.config_file import CONFIG_FILE
from recipes.watch.rollout_files import RolloutSample

TRACKER_IDS = "trackers.json"
PROJECT = "dataproto"
COLUMNS = (
    "key",
    "prompt",
    "response",
    "ground_truth",
    "reward",
    "accuracy",
)  # of a table of rollouts, before its images


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
        return _read_json(self.directory / CONFIG_FILE)

    def saved_id(self, tracker: str) -> str | None:
        """The tracker's name for this run, if an earlier process of it has saved one."""
        return _read_json(self.directory / TRACKER_IDS).get(tracker)

    def save_id(self, tracker: str, name: str) -> None:
        """Remembers the tracker's name for this run, so that a resumed run continues it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        found = _read_json(self.directory / TRACKER_IDS) | {tracker: name}
        (self.directory / TRACKER_IDS).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


class RunLogger(Protocol):
    """Something that keeps the metrics and rollouts of a run; made by a call with a `LoggedRun`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the metrics of a step, which may be NaN or infinite. Steps increase."""
        ...

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        """Keeps rollouts of an evaluation, with their images."""
        ...

    def close(self) -> None:
        """Writes what is left; called once."""
        ...


class WandbLogger:
    """Metrics over the axis ``step``; rollouts as a table with images. Files: ``<run>/wandb``.

    The account, the project and the mode are set by W&B's own environment variables. A resumed run continues under its id.
    Steps that it makes again are logged again, so that their curves overlap.
    """

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        identity = run.saved_id("wandb") or secrets.token_hex(4)
        os.environ.setdefault(
            "WANDB_DATA_DIR", str(run.directory.absolute())
        )  # pictures of tables, until they are synced
        self.package, project = wandb, os.environ.get("WANDB_PROJECT", PROJECT)
        named = {"name": run.name, "config": run.config, "dir": str(run.directory)}
        self.run = wandb.init(project=project, id=identity, resume="allow", **named)
        run.save_id("wandb", identity)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # W&B's own step could not go back after a resume

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(finite(metrics) | {"step": step})

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        table = table_rows(rows, self.package.Image)
        data = [list(row.values()) for row in table]
        found = self.package.Table(columns=list(table[0]) if table else [], data=data)
        self.run.log({"rollouts": found, "step": step})

    def close(self) -> None:
        self.run.finish()


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
            text = "\n\n".join(f"**{name}**\n\n{_indented(value)}" for name, value in parts.items())
            self.events.add_text(f"rollouts/{place:02}", f"{text}\n\n**reward** {row.reward:g}", step)
            for number, image in enumerate(row.images):
                pixels = np.asarray(image.convert("RGB"))
                self.events.add_image(f"rollouts/{place:02}/image_{number}", pixels, step, dataformats="HWC")
        self.events.flush()

    def close(self) -> None:
        self.events.close()


@dataclass(frozen=True)
class Tracker:
    """A logger on another package, and the extra that installs it."""

    logger: Callable[[LoggedRun], RunLogger]
    package: str
    extra: str


LOGGERS = {
    "tensorboard": Tracker(TensorBoardLogger, "tensorboard", "loggers"),
    "wandb": Tracker(WandbLogger, "wandb", "wandb"),
}
"""Trackers by the name that an option gives them; each needs a package of its own."""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite.

    >>> finite({"a": 1.0, "b": float("nan")})
    {'a': 1.0}
    """
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def table_rows(rows: Sequence[RolloutSample], wrap_image: Any) -> list[dict[str, Any]]:
    """Rollouts as rows of a table with equal columns, each image wrapped by the tracker's own type.

    >>> from PIL import Image
    >>> sample = RolloutSample("a", "p", "r", "1", 0.5, images=(Image.new("RGB", (1, 2)),))
    >>> (row,) = table_rows([sample], lambda image: image.size)
    >>> row["reward"], row["image_0"]
    (0.5, (1, 2))
    """
    most = max((len(row.images) for row in rows), default=0)
    table = []
    for row in rows:
        images = [*map(wrap_image, row.images), *[None] * (most - len(row.images))]
        table.append(
            {name: getattr(row, name) for name in COLUMNS}
            | {f"image_{number}": image for number, image in enumerate(images)}
        )
    return table


def _indented(text: str) -> str:
    """A block that Markdown shows as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a configuration under the names that they have on the command line.

    >>> flatten({"model": {"path": "x", "sizes": [1, 2]}, "seed": 0})
    {'model.path': 'x', 'model.sizes': [1, 2], 'seed': 0}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        inner = isinstance(value, Mapping)
        found |= flatten(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found
