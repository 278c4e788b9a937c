"""docs/algorithms.md agrees with the code on options, roles and columns."""

import inspect
import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from dataproto.columns import COLUMNS
from recipes import distil, grpo, ppo, walk
from recipes.algorithms.correction import Correction, Rejection
from recipes.algorithms.kl import KL_ESTIMATORS
from recipes.algorithms.options import AlgorithmConfig
from recipes.algorithms.registry import ADVANTAGES, LOSSES
from recipes.ppo import PPOConfig
from workers.training.loss_sums import MODES

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
RECIPES = {"grpo": grpo, "ppo": ppo, "distil": distil, "walk": walk}


def table(heading: str) -> list[list[str]]:
    """The rows of the first table after a heading."""
    lines = TEXT.split(heading, 1)[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


@cache
def default(recipe):
    return RECIPES[recipe].parse(["--preset", "any", "--model-path", "anything"])


ALGORITHMS = table("# Algorithms")
OPTIONS = table("## The options")


@pytest.mark.parametrize("row", ALGORITHMS, ids=lambda row: row[0])
def test_commands_parse_and_need_the_listed_roles(row):
    name, paper, command, roles, _ = row
    assert re.search(r"arxiv\.org/abs/\d{4}\.\d{5}", paper), name
    recipe, *given = shlex.split(command.strip("`"))
    config = RECIPES[recipe].parse(["--preset", "any", "--model-path", "anything", *given])
    needed = [
        role
        for role, is_needed in (("critic", config.critic is not None), ("reference", config.algorithm.needs_reference))
        if is_needed
    ]
    assert roles == (", ".join(needed) or "none")
    for option in (
        part.removeprefix("--algorithm.").replace("-", "_") for part in given if part.startswith("--algorithm.")
    ):
        changed = getattr(config.algorithm, option) != getattr(default(recipe).algorithm, option)
        assert changed, f"{name}: {option} is what it is without the option"


def test_the_table_lists_exactly_the_values_of_each_choice():
    listed = {option.strip("`"): set(re.findall(r"`([\w-]+)`", values)) for option, values, _ in OPTIONS}
    assert listed["advantage"] == set(ADVANTAGES.names) | {"distil"}
    assert listed["loss"] == set(LOSSES.names)
    assert listed["aggregation"] == set(MODES)
    assert listed["correction`, `correction_limit"] == set(get_args(Correction))
    assert listed["rejection`, `rejection_bounds"] == set(get_args(Rejection))
    estimators = set(re.findall(r"`(k\d\+?)`", next(values for option, values, _ in OPTIONS if "`kl`" in option)))
    assert estimators == set(KL_ESTIMATORS)


def test_the_table_lists_the_options_that_names_set():
    listed = {}
    for name, option, sets in table("## What a name sets"):
        found = re.findall(r"`(\w+)` (\([^)]*\)|[^,]+)", sets)
        listed[option, name.strip("`")] = {key: value.strip() for key, value in found}
    registered = {
        (registry.kind, name): {key: str(value) for key, value in registry.find(name).paper.items()}
        for registry in (ADVANTAGES, LOSSES)
        for name in registry.names
    }
    assert listed == {key: paper for key, paper in registered.items() if paper}


def test_every_correction_in_the_table_parses():
    for _, options, _ in table("## Corrections for the engine"):
        config = grpo.parse(["--preset", "any", "--model-path", "anything", *shlex.split(options.strip("`"))])
        assert config.algorithm.compares_engine


def test_option_comments_list_all_names():
    source = Path(grpo.__file__).with_name("algorithms").joinpath("options.py").read_text()
    for registry, field in ((ADVANTAGES, "    advantage: str"), (LOSSES, "    loss: str")):
        comment = source.split(field)[0].rsplit("\n    #", 3)
        text = " ".join(comment[-3:])
        assert all(re.search(rf"\b{name}\b", text) for name in registry.names if name != "gae"), registry.kind


def test_the_table_lists_exactly_the_options():
    listed = {name for option, _, _ in OPTIONS for name in re.findall(r"`(\w+)`", option)}
    assert listed == {field.name for field in fields(PPOConfig)}
    of_ppo = {
        name
        for option, _, use in OPTIONS
        if use.startswith("of `ppo` and `walk`")
        for name in re.findall(r"`(\w+)`", option)
    }
    assert listed - of_ppo == {field.name for field in fields(AlgorithmConfig)}


@pytest.mark.slow
def test_every_advantage_and_loss_has_an_algorithm_that_selects_it():
    configs = []
    for row in ALGORITHMS:
        recipe, *given = shlex.split(row[2].strip("`"))
        configs.append(RECIPES[recipe].parse(["--preset", "any", "--model-path", "anything", *given]).algorithm)
    assert {config.advantage for config in configs} == set(ADVANTAGES.names)
    assert {config.loss for config in configs} == set(LOSSES.names)


def test_columns_are_known():
    named = [name for row in table("## Columns") for name in re.findall(r"`(\w+)`", row[0])]
    assert named
    assert all(name in COLUMNS for name in named)


def test_arguments_that_are_told_without_an_import_are_those_of_the_functions():
    told = [each for known in (ADVANTAGES, LOSSES) for name in known.names if (each := known.find(name)).arguments]
    assert told
    for algorithm in told:
        assert {*algorithm.arguments} <= {*inspect.signature(algorithm.function).parameters}
