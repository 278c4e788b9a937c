"""A run's directory: created, resumed or overwritten, and protected from anything else."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

from dataproto.errors import CheckpointError, InvalidConfig, ending, raised_as, writing
from recipes.algorithms.function_files import in_users_function, load_named_function
from recipes.configs.shared.run_config import RecipeConfig, RunConfig
from recipes.data.loader import PromptLoader
from recipes.directory_lock import LOCK_FILE, locked
from recipes.options import options_of, settings_line, write_options
from recipes.options.command_line import way_out_of_resuming
from recipes.options.config_file import CHANGES, CONFIG_FILE
from recipes.options.names import CHANGEABLE, FILES, FREE, PLACES
from recipes.run.checkpoints import check_position
from recipes.watch.console import show_summary
from recipes.watch.loggers import flatten, read_json
from recipes.watch.metrics_file import METRICS_FILE
from recipes.watch.report import ENVIRONMENT_FILE, environment, write_report
from workers.model.model_config import OptimizerConfig, Schedule
from workers.training.checkpoint import checkpoint_steps, latest_checkpoint, write_json


@dataclass(frozen=True)
class RecordedRun:
    """The configuration of a run that has no other."""

    run: RunConfig


HasRun = RecipeConfig | RecordedRun
"""The dataclass that describes a run."""
Config = TypeVar("Config", bound=HasRun)


def over_the_run(optimizer: OptimizerConfig, updates: int) -> OptimizerConfig:
    """Sets the length of a schedule that has none to ``updates``; its warm-up then leaves at least one of them."""
    if optimizer.total_steps is not None:
        return optimizer
    return replace(optimizer, total_steps=updates, warmup_steps=min(optimizer.warmup_steps, updates - 1))


def with_function(optimizer: OptimizerConfig) -> OptimizerConfig:
    """The optimizer with the function that its schedule names as ``FILE.py:FUNCTION``. Raises `InvalidConfig`."""
    if isinstance(optimizer.schedule, str) and ":" in optimizer.schedule:
        return replace(optimizer, schedule=partial(_own_factor, optimizer.schedule, _own_schedule(optimizer.schedule)))
    return optimizer


@cache
def _own_schedule(name: str) -> Schedule:
    found = load_named_function(name, "schedule", InvalidConfig)
    what = f"optimizer.schedule={name}: must take (step, total_steps) and return a share of the rate, a number; (0, 1)"
    with raised_as(InvalidConfig, what, TypeError, ValueError):
        float(found(0, 1))
    return found


def _own_factor(name: str, schedule: Schedule, step: int, total_steps: int) -> float:
    with in_users_function(f"optimizer.schedule={name}", schedule):
        return float(schedule(step, total_steps))


def over_epochs(run: RunConfig, loader: PromptLoader) -> RunConfig:
    """Sets ``run.steps`` to the length of ``run.epochs``, if they are given.

    Raises:
        InvalidConfig: the loader's rows have no length.
    """
    return run if run.epochs is None else replace(run, steps=loader.steps(run.epochs))


def with_schedules(config: Config, updates: Mapping[str, int]) -> Config:
    """Sets the length of each learning-rate schedule in ``config`` that has none.

    The schedules of a new run end with it. A resumed run keeps the lengths with which it began, whatever its number of steps is
    now, so that every step equals that of an uninterrupted run, unless ``run.change`` names the steps or the schedule.

    Args:
        updates: optimizer steps in each step of the run, by the name of the optimizer's field.

    Raises:
        CheckpointError: a resumed run has more steps than before, and a decaying schedule ends before they do.
    """
    run: RunConfig = config.run
    before = flatten(read_json(run.output_dir / CONFIG_FILE)) if run.resume else {}
    changed: dict[str, Any] = {}
    for name, each in updates.items():
        optimizer: OptimizerConfig = getattr(config, name)
        with_function(optimizer)  # which refuses a wrong name or file
        option, now = name.replace("_", "-"), {*run.change}
        steps = before.get("run.steps") or run.steps
        began = before.get(f"{name}.total_steps") or steps * each
        anew = now & {"steps", "epochs", f"{option}.schedule"}
        total = optimizer.total_steps or (run.steps * each if anew else began)
        is_short = optimizer.schedule != "constant" and run.steps > max(steps, total // each)
        if is_short and (optimizer.total_steps is None or (anew and f"{option}.total-steps" not in now)):
            longer = "" if optimizer.total_steps is None else f" {option}.total-steps={run.steps * each}"
            raise CheckpointError(
                f"--resume with --steps {run.steps}, but the {optimizer.schedule} schedule of {name} ends with step "
                f"{total // each}: give --change steps={run.steps}{longer} to continue with a longer one, which changes the "
                "learning rate from here on"
            )
        warmup = before.get(f"{name}.warmup_steps")
        kept = f"{option}.warmup-steps" not in now
        if kept and warmup is not None and warmup < optimizer.warmup_steps:
            # it was shortened to one less than the schedule, as the run began or before a change of its steps
            earlier = (change["steps"]["before"] * each for change in before.get(CHANGES, ()) if "steps" in change)
            if warmup + 1 in (began, *earlier):
                optimizer = replace(optimizer, warmup_steps=warmup)
        if before and total != began and optimizer.schedule != "constant":
            print(
                f"{option}: the {optimizer.schedule} schedule ends with step {total // each} (before {began // each})"
            )
        changed[name] = over_the_run(optimizer, total)
    return replace(config, **changed)


@contextmanager
def recorded_run(run: RunConfig) -> Iterator[Path]:
    """Opens the run's directory for the time of a block, records ``run`` there, and writes ``report.html`` at its end, also after
    an error.

    Raises:
        InvalidConfig, CheckpointError: see `held_directory` and `open_run_directory`.
    """
    config = RecordedRun(run)
    with held_directory(config):
        open_run_directory(config)
        with reported(run.output_dir) as directory:
            yield directory


@contextmanager
def held_directory(config: HasRun) -> Iterator[None]:
    """Keeps other processes out of a run's directory for the time of a block.

    Raises:
        InvalidConfig: another process holds the directory; or see `check_run_directory`.
    """
    directory = config.run.output_dir
    if directory.exists() and not directory.is_dir():
        raise InvalidConfig(f"output_dir {directory} is a file: choose another --output-dir")
    with locked(directory):
        check_run_directory(config)
        yield


def _entries(directory: Path) -> list[Path]:
    """What is in a run's directory, which may be missing, without its lock."""
    return [entry for entry in directory.iterdir() if entry.name != LOCK_FILE] if directory.exists() else []


def _delete_earlier(directory: Path) -> None:
    """Deletes an earlier run, but not what shows that the directory holds a run: so the call can be repeated after a kill."""
    for entry in _entries(directory):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in (CONFIG_FILE, ENVIRONMENT_FILE):
            entry.unlink()


def _has_begun(directory: Path) -> bool:
    """Whether a run in a directory, or a phase of it in a folder, has measured or saved anything.

    Folders of a directory that is no run's are other runs.
    """
    phases = [entry for entry in _entries(directory) if entry.is_dir()] if (directory / CONFIG_FILE).is_file() else []
    places = [directory, *phases]
    measured = any(file.is_file() and file.stat().st_size for file in (place / METRICS_FILE for place in places))
    return measured or any(map(checkpoint_steps, places))


@contextmanager
def reported(directory: Path, started: float | None = None) -> Iterator[Path]:
    """Writes the report of a run at the end of a block, also after an error, and prints what the run has changed.

    Args:
        started: the `time.monotonic` at which the time of the run began; by default now.
    """
    started = time.monotonic() if started is None else started
    with ending(partial(write_report, directory), lambda: show_summary(directory, time.monotonic() - started)):
        yield directory


def open_run_directory(
    config: Config, updates: Mapping[str, int] | None = None, loader: PromptLoader | None = None
) -> Config:
    """Prepares the directory of a run, and writes ``config.json``, ``config.yaml`` and ``environment.json`` there.

    Args:
        config: the dataclass that describes the run, with a field ``run``.
        updates: see `with_schedules`.
        loader: of the rows to train on, which give the steps of ``run.epochs``.

    Returns:
        The configuration with its steps and the lengths of its schedules.

    Raises:
        InvalidConfig: see `check_run_directory`.
        CheckpointError: ``resume`` is set, but the settings of the run in the directory differ (the first one is named), or are
            unknown, or its checkpoint is of other rows.
    """
    asked = config
    if loader is not None and config.run.epochs is not None:
        check_position(config.run, loader)  # of other rows an epoch has other steps
        config = replace(config, run=over_epochs(config.run, loader))
    config = with_schedules(config, updates or {})
    run: RunConfig = config.run
    directory = run.output_dir
    check_run_directory(config)
    changes = _changes(directory, config) if run.resume else []
    if loader is not None:
        check_position(run, loader)  # after options, which may be why rows differ
    with writing(directory):
        if run.overwrite:
            _delete_earlier(directory)
        directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / CONFIG_FILE, asdict(config) | ({CHANGES: changes} if changes else {}))
    write_options(directory, asked)
    if hasattr(config, "preset"):
        print(settings_line(asked))
    write_json(directory / ENVIRONMENT_FILE, environment())
    return config


def check_run_directory(config: HasRun) -> None:
    """Checks what can be told of a run's directory before anything is read or loaded, and changes nothing.

    Raises:
        InvalidConfig: it holds a model; or an earlier run, and neither ``resume`` nor ``overwrite`` is set; or ``overwrite``
            would delete what is no run, or what the new run starts from.
    """
    run, directory, entries = config.run, config.run.output_dir, _entries(config.run.output_dir)
    if "model_type" in read_json(directory / CONFIG_FILE):
        raise InvalidConfig(f"{directory} holds a model, whose files a run would replace: choose another --output-dir")
    if run.resume or not entries:
        return
    inside = next(_options_inside(directory, config), None)
    if _has_begun(directory) and not run.overwrite:
        ways = "--resume it, --overwrite it, or " if inside is None else f"and {inside} is in it: "
        raise InvalidConfig(f"{directory} holds an earlier run: {ways}choose another --output-dir")
    if not run.overwrite:
        return
    if not ((directory / ENVIRONMENT_FILE).is_file() and "run" in read_json(directory / CONFIG_FILE)):
        raise InvalidConfig(f"{directory} does not hold a run, so it is not overwritten: choose another --output-dir")
    if inside is not None:
        raise InvalidConfig(f"{inside} is in {directory}, which --overwrite deletes: choose another --output-dir")


def _options_inside(directory: Path, config: Any) -> Iterator[str]:
    """The options whose values are files or folders inside a directory, each with its value."""
    for option in options_of(config):
        value = () if option.path[-1] == "output_dir" else option.default
        values = (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        )
        for text in (str(each) for each in values if isinstance(each, (str, Path))):
            named = {
                os.path.expanduser(each) for each in (text, text.rpartition(":")[0], text.partition("=")[2]) if each
            }
            for path in filter(os.path.exists, named):
                spelled = Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory))
                if spelled or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory)):
                    yield f"--{option.name} {text}"


def _changes(directory: Path, config: HasRun) -> list[dict[str, Any]]:
    """What resumed runs have changed until now, each with the last step before it; prints what this one changes.

    Raises:
        CheckpointError: see `open_run_directory`.
    """
    options = {".".join(option.path): option for option in options_of(config)}
    names = {path: option.name for path, option in options.items()}
    values = {path: option.default for path, option in options.items()}
    now: dict[str, Any] = json.loads(json.dumps(values, default=str))
    recorded = read_json(directory / CONFIG_FILE)
    changes: list[dict[str, Any]] = recorded.pop(CHANGES, [])
    before = flatten(recorded, whole=now)
    found = latest_checkpoint(directory.absolute())
    if not before and found is not None:
        raise CheckpointError(
            f"{directory} holds checkpoints, but no {CONFIG_FILE} with their settings: restore that file, or choose another "
            "--output-dir"
        )
    step = 0 if found is None else found[0]
    if config.run.steps < step or (config.run.steps == step and "steps" in config.run.change):
        raise CheckpointError(
            f"all {step} steps of {directory} are done, and --change steps={config.run.steps} asks for no further one: name "
            f"more than {step}"
        )
    asked = {*config.run.change} | ({"steps"} if "epochs" in config.run.change else set())
    changed = {name for name, option in names.items() if option in CHANGEABLE and option in asked}
    for name in before:
        free = names.get(name) in FREE or name.split(".")[0].replace("_", "-") in PLACES
        lengthened = name.endswith("optimizer.total_steps") and now.get(name) is not None  # see `with_schedules`
        moved = names.get(name) in FILES and _file_names(before[name]) == _file_names(now.get(name))
        if before[name] != now.get(name) and not (free or lengthened or moved or name in changed):
            way_out = f"resume it with {'the same name in another folder' if names.get(name) in FILES else 'its own settings'}"
            if (option := names.get(name)) in CHANGEABLE:
                way_out += f", or change them from here on: --change {option}=VALUE"
            elif option is not None:
                way_out += f"; {way_out_of_resuming(directory)}"
            raise CheckpointError(
                f"--resume with {name}={now.get(name)!r}, but the run in {directory} has {before[name]!r}: {way_out}"
            )
    differing = {
        names[name]: {"before": before.get(name), "after": now[name]}
        for name in sorted(changed)
        if before.get(name) != now[name]
    }
    if not differing:
        return changes
    told = ", ".join(f"{name} {each['after']} (before {each['before']})" for name, each in differing.items())
    print(f"after step {step}: {told}")
    return [*changes, {"step": step, **differing}]


def _file_names(value: Any) -> Any:
    """The names of files and folders, without the folders they are in.

    >>> _file_names(["/home/me/dots", "rewards/mine.py:score"]), _file_names(None)
    (['dots', 'mine.py:score'], None)
    """
    if isinstance(value, list):
        return [_file_names(each) for each in value]
    return PurePath(value).name if isinstance(value, str) else value
