"""Names and texts of options, flags with a value, and what --help shows."""

import re
from dataclasses import dataclass, field

import pytest

from dataproto.errors import InvalidConfig
from dataproto_server.config import ServeConfig
from recipes import classify, distil, geo3k_grpo, grpo, ppo, sft
from recipes.configs import (
    distil_config,
    easy_vqa_config,
    export_config,
    plan_config,
    walk_config,
    zoom_config,
)
from recipes.options import REQUIRED, options_of
from recipes.options.command_line import read
from recipes.options.names import ENDED, FILE_ONLY
from recipes.watch.viewer import ViewConfig

CONFIGS = (
    grpo.TINY,
    ppo.TINY,
    distil_config.TINY,
    easy_vqa_config.TINY,
    walk_config.TINY,
    zoom_config.TINY,
    sft.TINY,
    classify.TINY,
    export_config.DEFAULT,
    plan_config.PlanOptions(),
    plan_config.ClusterConfig(),
    ViewConfig(REQUIRED),
    ServeConfig(),
)


@dataclass(frozen=True)
class Part:
    """Part of it.

    Attributes:
        fast: how it runs
    """

    fast: bool = True


@dataclass(frozen=True)
class Whole:
    """All of it.

    Attributes:
        one: what it is, in
            two lines
        many: several numbers

    More of it.
    """

    one: int = 1
    bare: bool = False
    many: tuple[float, ...] = ()
    part: Part = field(default_factory=Part)
    run: Part = field(default_factory=Part)


OPTIONS = options_of(Whole())


def test_names_and_texts_are_those_of_the_docstring():
    found = {option.path: (option.name, option.text) for option in OPTIONS}
    assert found == {
        ("one",): ("one", "what it is, in two lines"),
        ("bare",): ("bare", ""),
        ("many",): ("many", "several numbers"),
        ("part", "fast"): ("part.fast", "how it runs"),
        ("run", "fast"): ("fast", "how it runs"),
    }


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: type(each).__name__)
def test_every_option_has_a_text(config):
    assert [option.name for option in options_of(config) if not option.text] == []


def test_flags_take_true_and_false():
    given = "--bare true --part.fast=false --one 3 --fast False --many 1 -2.5 --bare=true"
    found = read(given.split(), OPTIONS)
    assert found == {"bare": True, "part.fast": False, "one": 3, "fast": False, "many": (1.0, -2.5)}
    assert read(["--part.no-fast", "--no-fast", "--run.no-fast"], OPTIONS) == {"part.fast": False, "fast": False}
    with pytest.raises(InvalidConfig, match=r"^--bare maybe: must be true or false$"):
        read(["--bare=maybe"], OPTIONS)
    config = ppo.parse(["--algorithm.whiten", "false", "--compile", "true"])
    assert (config.algorithm.whiten, config.compute.compile) == (False, True)


def test_a_flag_is_switched_off_with_its_group():
    for option in ("--run.no-eval-first", "--run.no_eval_first", "--no-eval-first", "--run.eval-first=false"):
        assert not grpo.parse([option]).run.eval_first, option


def test_what_files_set_is_an_option_and_what_has_ended_is_none():
    names = {option.name for config in CONFIGS for option in options_of(config)}
    assert names >= FILE_ONLY
    assert not names & ENDED.keys()


def test_grpo_has_at_most_95_options(capsys):
    assert len(re.findall(r"^  --[a-z]", shown(grpo, "--help-all", capsys), re.M)) <= 95


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
    assert {option.name for option in options_of(recipe.PRESETS["tiny"])} - FILE_ONLY <= everything
    assert not FILE_ONLY & everything
    (more,) = re.findall(r"^(\d+) more options: .* --help-all$", shown(recipe, "--help", capsys), re.M)
    assert int(more) == len(everything) - len(common)
