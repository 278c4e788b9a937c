"""Benchmarks: the commands that documents name are ones that the programs take."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
COMMAND = re.compile(r"benchmarks[/.](\w+)(?:\.py)?((?:\s.*)?)", re.DOTALL)
"""A program's name and its arguments, also as ``python -m benchmarks.NAME``."""


def commands(text: str) -> list[tuple[str, ...]]:
    """Program and arguments of each benchmark that ``text`` names as code. Options that follow as code of their own, in the
    same paragraph, are of the last program."""
    found: list[tuple[str, ...]] = []
    for paragraph in text.split("\n\n"):
        name = None
        for code in re.findall(r"`([^`]+)`", paragraph):
            match = COMMAND.search(code)
            if match or not code.startswith("--"):
                name = match and match[1]
            if name and (ROOT / "benchmarks" / f"{name}.py").exists():
                found.append((name, *shlex.split(re.sub(r"[\[\]](?!\S*\")", "", match[2] if match else code))))
    return found


NAMED = sorted({command for path in DOCUMENTS for command in commands(path.read_text(encoding="utf-8"))})


class Parsed(Exception):
    """The arguments were read, and nothing has been run."""


def test_commands_are_read_with_the_options_that_follow():
    text = "`OMP_NUM_THREADS=1 python benchmarks/log_probs.py\n--tokens 8` and `--hidden 4`, `ls --all`\n\n`--other`"
    assert commands(text) == [("log_probs", "--tokens", "8"), ("log_probs", "--hidden", "4")]


@pytest.mark.parametrize("command", NAMED, ids=" ".join)
def test_a_program_takes_the_arguments_that_documents_name(command, monkeypatch):
    path = ROOT / "benchmarks" / f"{command[0]}.py"
    if "parse_args" not in path.read_text(encoding="utf-8"):
        assert not [argument for argument in command[1:] if argument.startswith("-")]
        return
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(self, *arguments, **options):
        parse_args(self, *arguments, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr("sys.argv", [str(path), *command[1:]])
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(Parsed):
        runpy.run_path(str(path), run_name="__main__")
