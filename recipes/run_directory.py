"""A run's directory: new, continued or begun anew, and never somebody else's."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dataproto.errors import CheckpointError, InvalidConfig
from recipes.metrics import METRICS_FILE
from recipes.report import environment
from recipes.training import RunConfig
from workers.checkpoint import write_json

CONFIG, ENVIRONMENT = "config.json", "environment.json"
# What a resumed run may change: none of it bears on the steps that follow, but for their number.
FREE = (
    "resume",
    "overwrite",
    "output_dir",
    "steps",
    "save_every",
    "save_behind",
    "eval_every",
    "keep_checkpoints",
    "num_workers",
)
FREE_PLACES = ("on", "layout", "ray", "max_restarts")  # where the steps are made


def open_run_directory(run: RunConfig, config: Any) -> Path:
    """Makes ``run.output_dir`` ready for the run that ``config`` (a dataclass) describes, and writes both down there.

    Raises:
        InvalidConfig: it holds an earlier run, and neither ``resume`` nor ``overwrite`` is set; or ``overwrite`` is, and it
            holds something else than a run.
        CheckpointError: ``resume`` is set, but the run there has other settings; names the first of them.
    """
    directory, settings = run.output_dir, json.loads(json.dumps(asdict(config), default=str))
    if directory.exists() and not directory.is_dir():
        raise InvalidConfig(f"output_dir {directory} is a file")
    if run.overwrite:
        _remove_run(directory)
    elif run.resume:
        _check_same(directory, settings)
    elif (directory / METRICS_FILE).exists():
        raise InvalidConfig(
            f"{directory} holds an earlier run: --resume it, --overwrite it, or choose another --output-dir"
        )
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / CONFIG, settings)
    write_json(directory / ENVIRONMENT, environment())
    return directory


def _remove_run(directory: Path) -> None:
    if not directory.exists() or not any(directory.iterdir()):
        return
    if not (directory / ENVIRONMENT).is_file() or "run" not in _read(directory):
        raise InvalidConfig(f"{directory} holds something else than a run: it will not be overwritten")
    shutil.rmtree(directory)


def _check_same(directory: Path, settings: Mapping[str, Any]) -> None:
    before, now = _flatten(_read(directory)), _flatten(settings)
    for name in before if before else ():
        free = name.split(".")[-1] in FREE or name.split(".")[0] in FREE_PLACES
        if before[name] != now.get(name) and not free:
            raise CheckpointError(
                f"--resume with {name}={now.get(name)!r}, but the run in {directory} has {before[name]!r}: "
                "resume it with its own settings, or choose another --output-dir"
            )


def _read(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    parts = (_flatten(inner, f"{prefix}.{name}" if prefix else name) for name, inner in value.items())
    return {name: inner for part in parts for name, inner in part.items()}
