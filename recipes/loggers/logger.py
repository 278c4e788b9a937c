"""The interface of a logger, and what it is told of the run."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recipes.report.page import CONFIG_FILE
from recipes.report.samples import RolloutSample

TRACKER_IDS = "trackers.json"


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

    def options(self) -> dict[str, Any]:
        """The options of `config` under the names that they have on the command line."""
        return dict(_flatten(self.config))

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


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite.

    >>> finite({"a": 1.0, "b": float("nan")})
    {'a': 1.0}
    """
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


TEXT_COLUMNS = ("key", "prompt", "response", "ground_truth")
NUMBER_COLUMNS = ("reward", "accuracy")


def image_columns(rows: Sequence[RolloutSample]) -> list[str]:
    """A column for each image of the row that has most of them.

    >>> image_columns([RolloutSample("a", "p", "r", "1", 0.0)])
    []
    """
    return [f"image_{number}" for number in range(max((len(row.images) for row in rows), default=0))]


def table_rows(rows: Sequence[RolloutSample], wrap_image: Any, missing: Any = None) -> list[dict[str, Any]]:
    """Rollouts as rows of a table with equal columns, each image wrapped by the tracker's own type, ``missing`` where none is."""
    columns = image_columns(rows)
    table = []
    for row in rows:
        images = [wrap_image(image) for image in row.images]
        images += [missing] * (len(columns) - len(images))
        cells = {name: getattr(row, name) for name in (*TEXT_COLUMNS, *NUMBER_COLUMNS)}
        table.append(cells | dict(zip(columns, images, strict=True)))
    return table


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
