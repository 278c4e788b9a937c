"""The versions that a start takes for tested are those of docs/versions.md, and within the ranges of the project."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from recipes.run import tested_versions
from recipes.run.tested_versions import COMBINATIONS, tell_untested_versions, untested_versions

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8").partition("## What was run")[2]
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")] for line in TEXT.splitlines() if line.startswith("| 2.")
]
RUN = [
    {"torch": torch, "transformers": each, "vllm": None if vllm == "-" else vllm.split(",")[0]}
    for torch, transformers, vllm, _, on, _ in ROWS
    if on != "not run"
    for each in transformers.split(", ")
]


@pytest.mark.parametrize("installed", RUN, ids=str)
def test_what_was_run_is_told_as_tested(installed):
    assert untested_versions("hf" if installed["vllm"] is None else "vllm", installed) is None


def test_the_ends_of_each_combination_were_run():
    def minor(text):
        return ".".join(text.split("+")[0].split(".")[:2])

    run = {(minor(row["torch"]), minor(row["transformers"]), row["vllm"] and minor(row["vllm"])) for row in RUN}
    without_vllm = {(torch, transformers) for torch, transformers, _ in run}
    for each in COMBINATIONS:
        (torch, last), (first, newest), (vllm, _) = each["torch"], each["transformers"], each.get("vllm", (None, None))
        assert torch == last
        assert (torch, newest, vllm) in run, each
        assert (torch, first) in without_vllm, each


def test_the_project_installs_nothing_newer_than_what_was_run_or_read():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    ranges = [Requirement(each) for each in (*project["dependencies"], *extras["train"], *extras["vllm"])]
    newest = {"torch": "2.15.99", "transformers": "5.24.99", "vllm": "0.33.99"}
    for requirement in ranges:
        if requirement.name in newest:
            last = Version(newest[requirement.name])
            assert last in requirement.specifier
            assert Version(f"{last.major}.{last.minor + 1}") not in requirement.specifier


@pytest.mark.parametrize(
    ("engine", "installed", "told"),
    [
        ("hf", {"torch": "2.13.0+cpu", "transformers": "5.20.2", "vllm": "0.30.0"}, False),
        ("hf", {"torch": "2.12.1", "transformers": "5.24.0", "vllm": None}, True),
        ("hf", {"torch": "2.13.0", "transformers": "5.25.0.dev0", "vllm": None}, True),
        ("vllm", {"torch": "2.14.0", "transformers": "5.20.0", "vllm": "0.33.0"}, True),
        ("vllm", {"torch": "2.13.0", "transformers": "5.18.0", "vllm": None}, False),
    ],
)
def test_other_combinations_are_told_in_one_line(monkeypatch, capsys, engine, installed, told):
    monkeypatch.setattr(tested_versions, "installed_version", installed.get)
    tell_untested_versions(engine)
    assert capsys.readouterr().out.count("\n") == told
