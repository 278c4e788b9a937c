"""What the commands of all recipes share: options from a command line, their checks, and an exit status."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import tyro
from transformers.utils.logging import disable_progress_bar

from dataproto.errors import DataProtoError, InvalidConfig
from rollout.engine import ENGINES
from workers.ranks.layout import Layout

Config = TypeVar("Config")


@dataclass
class ExitStatus:
    """The exit status of a command: 0 unless it failed."""

    code: int = 0


@contextlib.contextmanager
def exit_status() -> Iterator[ExitStatus]:
    """Sets the exit status of the block: 2 after a user's mistake, which is one line on stderr, and 130 after an interrupt."""
    disable_progress_bar()  # of transformers; a run shows its own
    status = ExitStatus()
    try:
        yield status
    except (DataProtoError, OSError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        status.code = 2
    except KeyboardInterrupt:
        print("\ninterrupted: run the same command with --resume to continue from the last checkpoint", file=sys.stderr)
        status.code = 130


def parse_config(arguments: Sequence[str], default: Config, description: str | None, prog: str) -> Config:
    """The options of a command line over ``default``, a dataclass.

    Raises:
        InvalidConfig: an unknown or ill-typed option, or an impossible combination, in one line.
    """
    if _has_any(arguments, "--steps") and _has_any(arguments, "--epochs"):
        raise InvalidConfig("--steps and --epochs both set the length of the run: give one of them")
    refusal = io.StringIO()
    asks_for_help = bool({"-h", "--help"} & {*arguments})
    try:
        with contextlib.redirect_stderr(refusal), contextlib.nullcontext() if asks_for_help else _unwrapped():
            return tyro.cli(type(default), args=list(arguments), default=default, description=description, prog=prog)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        lines = [line.strip("╭╮╰╯│─ ") for line in refusal.getvalue().splitlines()]
        raise InvalidConfig("; ".join(line for line in lines[1:] if line)) from None


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Keeps tyro from breaking its messages at the width of the terminal."""
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width


def names_a_model(arguments: Sequence[str]) -> bool:
    """Whether a command line has ``--model-path``; without it recipes train a small model with defaults for it."""
    return _has_any(arguments, "--model-path")


def names_an_algorithm(arguments: Sequence[str]) -> bool:
    """Whether a command line names a loss or an advantage, whose paper then sets the options that it leaves out."""
    return _has_any(arguments, "--algorithm.loss", "--algorithm.advantage")


def _has_any(arguments: Sequence[str], *options: str) -> bool:
    return any(argument.split("=")[0].replace("_", "-") in options for argument in arguments)


class Placed(Protocol):
    """The fields of a recipe's configuration that say where and in how many processes it runs."""

    @property
    def engine(self) -> str: ...

    @property
    def on(self) -> str: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def max_restarts(self) -> int: ...


def check_placement(config: Placed) -> None:
    """Refuses what no machine can run.

    Raises:
        InvalidConfig: an unknown engine, a number out of range, or several processes without Ray.
    """
    if config.engine not in ENGINES:
        raise InvalidConfig(f"engine {config.engine!r} is unknown: choose one of {', '.join(sorted(ENGINES))}")
    if config.max_restarts < 0:
        raise InvalidConfig(f"max_restarts={config.max_restarts}: must be at least 0")
    if config.on == "local" and config.layout.world_size > 1:
        raise InvalidConfig(f"{config.layout} needs {config.layout.world_size} processes: add --on ray")
