"""A run's directory: new, continued or begun anew, and never somebody else's."""

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dataproto.errors import CheckpointError, InvalidConfig
from recipes.report.page import environment
from recipes.run.loop import RunConfig
from recipes.run.metrics import METRICS_FILE
from workers.training.checkpoint import latest_checkpoint, write_json
from workers.training.optimizer import OptimizerConfig

Config = TypeVar("Config")

CONFIG, ENVIRONMENT = "config.json", "environment.json"
# What a resumed run may change: none of it bears on the steps that follow, but for their number.
FREE = (
    "run.resume",
    "run.overwrite",
    "run.output_dir",
    "run.steps",
    "run.save_every",
    "run.save_behind",
    "run.eval_every",
    "run.keep_checkpoints",
    "data.num_workers",
)
FREE_PLACES = ("on", "layout", "ray", "max_restarts")  # where the steps are made


def over_the_run(optimizer: OptimizerConfig, updates: int) -> OptimizerConfig:
    """The schedule over so many updates, of which the warm-up leaves at least one, unless it has a length of its own."""
    if optimizer.total_steps is not None:
        return optimizer
    return replace(optimizer, total_steps=updates, warmup_steps=min(optimizer.warmup_steps, updates - 1))


def with_schedules(run: RunConfig, config: Config, **updates: int) -> Config:
    """``config`` with the length of each learning-rate schedule that names none itself.

    A new run's schedules end with it. A resumed run's are as long as they were, whatever its number of steps is now, so that
    every step is the one that an uninterrupted run makes.

    Args:
        updates: by the name of an optimizer's field: its steps in one step of the run.

    Raises:
        CheckpointError: a resumed run has more steps than before, and a schedule that decays ends before they do.
    """
    before = _flatten(_read(run.output_dir)) if run.resume else {}
    changed = {}
    for name, each in updates.items():
        optimizer: OptimizerConfig = getattr(config, name)
        steps = before.get("run.steps") or run.steps
        total = before.get(f"{name}.total_steps") or steps * each
        if optimizer.total_steps is None and optimizer.schedule != "constant" and run.steps > max(steps, total // each):
            raise CheckpointError(
                f"--resume with --steps {run.steps}, but the {optimizer.schedule} schedule of {name} ends with step "
                f"{total // each}: give --{name.replace('_', '-')}.total-steps {run.steps * each} to go on with a longer one, "
                "which changes the learning rate from here on"
            )
        warmup = before.get(f"{name}.warmup_steps")
        if warmup is not None and warmup == total - 1 < optimizer.warmup_steps:  # shortened as the run began
            optimizer = replace(optimizer, warmup_steps=warmup)
        changed[name] = over_the_run(optimizer, total)
    completed: Config = replace(config, **changed)  # type: ignore[type-var]
    return completed


def open_run_directory(run: RunConfig, config: Any) -> Path:
    """Makes ``run.output_dir`` ready for the run that ``config`` (a dataclass) describes, and writes both down there.

    Raises:
        InvalidConfig: it holds an earlier run, and neither ``resume`` nor ``overwrite`` is set; or ``overwrite`` is, and it
            holds something else than a run.
        CheckpointError: ``resume`` is set, but the run there has other settings, of which it names the first, or nothing says
            which it has.
    """
    directory = run.output_dir
    if directory.exists() and not directory.is_dir():
        raise InvalidConfig(f"output_dir {directory} is a file")
    if run.overwrite:
        _remove_run(directory)
    elif run.resume:
        _check_same(directory, config)
    elif (directory / METRICS_FILE).exists():
        raise InvalidConfig(
            f"{directory} holds an earlier run: --resume it, --overwrite it, or choose another --output-dir"
        )
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / CONFIG, asdict(config))
    write_json(directory / ENVIRONMENT, environment())
    return directory


def _remove_run(directory: Path) -> None:
    if not directory.exists() or not any(directory.iterdir()):
        return
    if not (directory / ENVIRONMENT).is_file() or "run" not in _read(directory):
        raise InvalidConfig(f"{directory} holds something else than a run: it will not be overwritten")
    shutil.rmtree(directory)


def _check_same(directory: Path, config: Any) -> None:
    now: dict[str, Any] = json.loads(json.dumps(_options(config), default=str))
    before = _flatten(_read(directory), now.keys())
    if not before and latest_checkpoint(directory) is not None:
        raise CheckpointError(
            f"{directory} holds checkpoints, but no {CONFIG} that says with which settings they were made: put it back, or "
            "choose another --output-dir"
        )
    for name in before:
        free = name in FREE or name.split(".")[0] in FREE_PLACES
        lengthened = name.endswith("optimizer.total_steps") and now.get(name) is not None  # see `with_schedules`
        if before[name] != now.get(name) and not free and not lengthened:
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


def _options(config: Any, prefix: str = "") -> dict[str, Any]:
    """The values of all options by their names on the command line; one that is a dictionary is one value."""
    found: dict[str, Any] = {}
    for field in fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        found |= _options(value, f"{name}.") if is_dataclass(value) else {name: value}
    return found


def _flatten(value: Any, names: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """The values of what `_read` found by their names as in `_options`, down to those that are in ``names``."""
    if prefix in names or not isinstance(value, Mapping):
        return {prefix: value}
    parts = (_flatten(inner, names, f"{prefix}.{name}" if prefix else name) for name, inner in value.items())
    return {name: inner for part in parts for name, inner in part.items()}
