"""The help of a command: the common options, or all of them."""

import os
import shutil
import sys
from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

from recipes.options.names import COMMON
from recipes.options.option_table import Option, spelled_kind, spelled_value

FEW = 16
"""A command with at most this many options shows all of them."""
INDENT = 30


def help_text(prog: str, description: str | None, options: Sequence[Option], everything: bool = False) -> str:
    """What ``--help`` prints; with ``everything``, what ``--help-all`` prints."""
    width = min(shutil.get_terminal_size().columns, 130)
    positional = [option for option in options if option.positional]
    named = [option for option in options if not option.positional]
    everything = everything or len(named) <= FEW
    shown = [option for option in named if everything or option.name in COMMON]
    usage = " ".join(["usage:", prog, *(option.name.upper() for option in positional), "[OPTIONS]"])
    lines = [usage, "", *(description or "").strip().splitlines(), ""]
    for option in positional:
        lines += _entry(option.name.upper(), option.text, width)
    shown.sort(key=lambda option: bool(_group(option)))  # those of no group first
    for group, members in groupby(shown, _group):
        lines += ["", f"{group}:"] if group else [""]
        for option in members:
            default = "" if option.default is None else f" (default: {spelled_value(option.default)})"
            lines += _entry(spelling(option), option.text + default, width)
    if left := len(named) - len(shown):
        lines += ["", f"{left} more options: {prog} --help-all"]
    return "\n".join(lines)


def _group(option: Option) -> str:
    return option.name.rpartition(".")[0]


def _entry(name: str, text: str, width: int) -> list[str]:
    lines = wrap(text, max(width - INDENT, 40)) or [""]
    first = f"  {name}"
    if len(first) > INDENT - 2:
        return [first, *(" " * INDENT + line for line in lines)]
    return [f"{first:{INDENT}}{lines[0]}", *(" " * INDENT + line for line in lines[1:])]


def spelling(option: Option) -> str:
    """An option and its values as usage shows them: ``--steps INT``, ``--compile, --no-compile``."""
    if option.name == "resume" and str in option.kinds:
        return "--resume [RUN_DIR]"
    if option.kind is bool:
        return f"--{option.name}, {option.no_flag}"
    return f"--{option.name} {spelled_kind(option.kind)}"


def show_help(text: str) -> None:
    """Prints a text. A reader that ends before the text does, such as ``head``, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter writes at its end
