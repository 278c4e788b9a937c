"""What the entry points of recipes share: options from a command line, and an exit status."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from transformers.utils.logging import disable_progress_bar

from dataproto.errors import DataProtoError, InvalidConfig

Config = TypeVar("Config")


def run_from_command_line(
    run: Callable[[Any], Path], parse: Callable[[Sequence[str]], Any], arguments: Sequence[str], made: str = "report"
) -> int:
    """Parses, runs, and returns the exit status; a user's mistake is one line on stderr. ``made`` is what a run leaves."""
    disable_progress_bar()  # of transformers; ours is enough
    try:
        print(f"{made}: {run(parse(arguments))}")
    except (DataProtoError, OSError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: run the same command with --resume to continue from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def parse_config(arguments: Sequence[str], default: Config, description: str | None, prog: str) -> Config:
    """The options of a command line over ``default``, a dataclass.

    Raises:
        InvalidConfig: an unknown or ill-typed option, or an impossible combination, in one line.
    """
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
    """Messages are not broken at the width of the terminal."""
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
    """Whether a command line has ``--model-path``: without it recipes run a small model and its defaults."""
    return _has_any(arguments, "--model-path")


def names_an_algorithm(arguments: Sequence[str]) -> bool:
    """Whether a command line names a loss or an advantage, whose papers then set what it does not."""
    return _has_any(arguments, "--algorithm.loss", "--algorithm.advantage")


def _has_any(arguments: Sequence[str], *options: str) -> bool:
    return any(argument.split("=")[0].replace("_", "-") in options for argument in arguments)
