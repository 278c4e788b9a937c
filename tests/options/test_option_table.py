"""Names and texts of options, flags with a value, and what --help shows."""

import re
from dataclasses import dataclass, field

import pytest
import tyro

from dataproto.errors import InvalidConfig
from dataproto_server.config import ServeConfig
from recipes import classify, distil, geo3k_grpo, grpo, ppo, sft
from recipes.configs import (
    distil_config,
    easy_vqa_config,
    export_config,
    make_vlm_config,
    plan_config,
    simulation_config,
    walk_config,
    zoom_config,
)
from recipes.options import options_of, with_plain_flags
from recipes.options.option_table import Option, with_short_names
from recipes.parity import ParityConfig
from recipes.watch.viewer import ViewConfig

CONFIGS = (
    grpo.TINY,
    ppo.TINY,
    distil_config.TINY,
    easy_vqa_config.TINY,
    walk_config.TINY,
    zoom_config.TINY,
    make_vlm_config.MakeVLMConfig(),
    sft.TINY,
    classify.TINY,
    ParityConfig(),
    export_config.DEFAULT,
    plan_config.PlanOptions(),
    simulation_config.SimulationConfig(),
    ViewConfig(tyro.MISSING),
    ServeConfig(),
)


@dataclass(frozen=True)
class Part:
    fast: bool = True  # how it runs


@dataclass(frozen=True)
class Whole:
    # above it
    # in two lines
    one: int = 1  # and within
    bare: bool = False
    part: Part = field(default_factory=Part)
    merged: tyro.conf.OmitArgPrefixes[Part] = field(default_factory=Part)


def test_names_and_texts_are_those_of_the_source():
    found = {option.path: (option.name, option.text) for option in options_of(Whole())}
    assert found == {
        ("one",): ("one", "above it in two lines and within"),
        ("bare",): ("bare", ""),
        ("part", "fast"): ("part.fast", "how it runs"),
        ("merged", "fast"): ("fast", "how it runs"),
    }


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: type(each).__name__)
def test_every_option_has_a_text(config):
    assert [option.name for option in options_of(config) if not option.text] == []


def test_flags_take_true_and_false():
    options = options_of(Whole())
    given = ["--bare", "true", "--part.fast=false", "--one", "3", "--fast", "False", "--bare", "--bare=true"]
    wanted = ["--bare", "--part.no-fast", "--one", "3", "--no-fast", "--bare", "--bare"]
    assert with_plain_flags(given, options) == wanted
    with pytest.raises(InvalidConfig, match="--bare=maybe: must be true or false"):
        with_plain_flags(["--bare=maybe"], options)
    config = ppo.parse(["--algorithm.whiten", "false", "--compile", "true", "--algorithm.entropy_anneal=false"])
    assert (config.algorithm.whiten, config.compute.compile) == (False, True)


def test_a_flag_is_switched_off_with_its_group():
    for option in ("--run.no-eval-first", "--run.no_eval_first", "--no-eval-first", "--run.eval-first=false"):
        assert not grpo.parse([option]).run.eval_first, option
    nested = Option("fast", ("whole", "part", "fast"), bool, True, "")
    assert with_short_names(["--whole.part.no-fast", "--whole.no-fast"], [nested]) == ["--no-fast", "--no-fast"]


def shown(recipe, option, capsys):
    with pytest.raises(SystemExit) as stop:
        recipe.parse([option])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("recipe", [grpo, ppo, distil, sft, classify, geo3k_grpo])
def test_help_shows_the_common_options_and_says_how_many_more_there_are(recipe, capsys):
    common, everything = (
        {*re.findall(r"^  --([\w.-]+)", shown(recipe, option, capsys), re.M)} for option in ("--help", "--help-all")
    )
    assert {"preset", "config", "resume", "model-path", "data-path", "steps", "optimizer.lr"} <= common < everything
    assert {option.name for option in options_of(recipe.TINY)} <= everything
    (more,) = re.findall(r"^(\d+) more options: .* --help-all$", shown(recipe, "--help", capsys), re.M)
    assert int(more) == len(everything) - len(common)
