"""What the commands of all recipes share: options from a command line and a file, and an exit status."""

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_origin

from dataproto.errors import CheckpointError, DataProtoError, InvalidConfig, later_errors
from recipes.options.config_file import ONCE, OPTIONS_FILE, file_values
from recipes.options.help_text import help_text, show_help
from recipes.options.names import CHANGEABLE, ENDED, FILE_ONLY, FREE, PLACES, own_name
from recipes.options.option_table import (
    TRUTH,
    Option,
    built,
    on_command_line,
    options_of,
    refuse_idle_options,
    spellings,
)

Config = TypeVar("Config")


class HasPreset(Protocol):
    """The fields of a recipe's configuration that say whose defaults it has, and what it trains."""

    @property
    def preset(self) -> str: ...

    @property
    def model_path(self) -> str | None: ...


Recipe = TypeVar("Recipe", bound=HasPreset)
OnMachine = Callable[[Recipe, Sequence[str], Callable[[Recipe], Recipe]], Recipe]
"""``on_machine(default, given, read)``: the options ``given`` over the defaults for a machine, by ``read(defaults)``."""

HELP = ("-h", "--help", "--help-all")
IS_OPTION = re.compile("--[a-zA-Z]")
PYTHON_NAME = re.compile(r"(?<![\w./'\"-])([a-z]+(?:[._][a-z]\w*)+(?![\w.]*=)|[a-z][\w.]*(?==\S))(=?)")
"""A name with an underscore or a dot in it, or before a value."""
TINY, ANY = "tiny", "any"
"""The presets that every recipe has: of the small model that it makes, and of a checkpoint of any size."""
CONFIG = Option("config", (), str | None, None, "a YAML file with options, which those given here override")
TRACEBACK = Option("traceback", (), bool, False, "show the whole traceback of an error")
PRESET_TEXT = "whose defaults: those of the small model, of a checkpoint of any size, or of one of this size"
RESUME_TEXT = "continue the run in this directory with its own options; without one, that in --output-dir with these"


@dataclass
class ExitStatus:
    """The arguments of a command, and its exit status: 0 unless it failed."""

    arguments: Sequence[str]
    code: int = 0


@contextlib.contextmanager
def exit_status(arguments: Sequence[str] | None = None, resumes: bool = True) -> Iterator[ExitStatus]:
    """Sets the exit status of the block: 2 after a user's mistake, which is one line on stderr, and 130 after an interrupt.

    Args:
        arguments: of the command, by default those of this process; with ``--traceback`` among them a mistake is shown with its
            traceback.
        resumes: whether the command has ``--resume``, which an interrupt then names.
    """
    status = ExitStatus(sys.argv[1:] if arguments is None else arguments)
    try:
        yield status
    except (DataProtoError, OSError) as error:
        if f"--{TRACEBACK.name}" in status.arguments:
            traceback.print_exc()
        lines = [str(error).partition("\n")[0], *later_errors(error)]
        print(f"error: {'; '.join(lines)}", file=sys.stderr)
        status.code = 2
    except KeyboardInterrupt as error:
        instead = " instead of --overwrite" if {"--overwrite", "--run.overwrite"} & {*status.arguments} else ""
        way_on = f": run the command with --resume{instead} to continue from the last checkpoint" if resumes else ""
        print("; ".join([f"\ninterrupted{way_on}", *later_errors(error)]), file=sys.stderr)
        status.code = 130


def training_command(
    parse: Callable[[Sequence[str]], Config], train: Callable[..., Path], *makers: Callable[[Config], Any]
) -> Callable[..., int]:
    """The ``main`` of a recipe: parses a command line unless it is given a configuration, trains, prints where the report is, and
    returns the exit status; a user's mistake is one line on stderr.

    ``train`` takes the configuration, and what each of ``makers`` makes of it.
    """

    def main(arguments: Sequence[str] | None = None, config: Config | None = None) -> int:
        """Parses the command line, trains, and returns the exit status; a user's mistake is one line on stderr."""
        with exit_status(arguments) as status:
            config = config or parse(status.arguments)
            print(f"report: {train(config, *(make(config) for make in makers))}")
        return status.code

    return main


def parse_recipe(
    arguments: Sequence[str],
    presets: Mapping[str, Recipe],
    description: str | None,
    prog: str,
    on_machine: OnMachine[Recipe] = lambda default, given, read: read(default),
) -> Recipe:
    """The configuration of a recipe's command line, with ``--preset``, ``--config`` and ``--resume RUN_DIR``.

    The options are over those of the run in RUN_DIR, else over the preset, which is ``tiny`` unless another one is named. Those
    of a file come before those of the command line.

    Args:
        presets: configurations by name, each with that name as its ``preset``; ``tiny`` and ``any`` are among them.
        on_machine: changes the defaults for the devices that there are, and reads the options over them.

    Raises:
        InvalidConfig: an unknown, ill-typed or idle option, or an impossible combination, in one line.
    """
    options = options_of(presets[TINY])
    given = read(arguments, recipe_options(presets))
    show_help_if_asked(arguments, recipe_options(presets, given.get("preset", TINY)), description, prog)
    if "change" in given:
        given |= _changes(given, presets[TINY])
    if isinstance(run_dir := given.get("resume"), str):
        elsewhere = given.get("output-dir", Path(run_dir)).resolve() != Path(run_dir).resolve()
        if elsewhere or "preset" in given or "config" in given:
            own = "continues with its own options in its own directory"
            raise InvalidConfig(f"--resume {run_dir} {own}: leave out --preset, --config and --output-dir")
        began = _recorded(run_dir, presets, given)
        length = {"epochs": None} if "steps" in given else {}
        return over(began, length | given | {"resume": True, "output-dir": Path(run_dir)})
    if "steps" in given and "epochs" in given:
        raise InvalidConfig("--steps and --epochs both set the length of the run: give one of them")
    if given.get("config"):
        given = joined(file_values(Path(given["config"]), options, ONCE), given)
    default = _chosen_preset(presets, given)
    config = on_machine(default, [f"--{name}" for name in given], lambda default: over(default, given))
    if config.preset != TINY and config.model_path is None:
        raise InvalidConfig(f"--preset {config.preset} is for a checkpoint: add --model-path")
    return config


def recipe_options(presets: Mapping[str, Any], preset: str = TINY) -> list[Option]:
    """The options of a recipe's command line, with the defaults of a preset."""
    chosen = Option("preset", ("preset",), Literal[tuple(presets)], TINY, PRESET_TEXT)
    resumed = Option("resume", ("run", "resume"), bool | str, False, RESUME_TEXT)
    others = [option for option in options_of(presets[preset]) if option.name not in ("preset", "resume")]
    return [chosen, CONFIG, resumed, TRACEBACK, *others]


def _chosen_preset(presets: Mapping[str, Recipe], given: Mapping[str, Any]) -> Recipe:
    """The defaults of a command line. They do not depend on the model, so one that is named needs a preset. The engine options of
    a preset are for its own engine.
    """
    if "preset" not in given and given.get("model-path") is not None:
        others = "".join(f", {each}" for each in presets if each not in (TINY, ANY))
        raise InvalidConfig(
            "--model-path needs --preset, which says whose defaults apply: any (for a checkpoint of any size)"
            f"{others}, or tiny (those of the small model)"
        )
    name = given.get("preset", TINY)
    if name not in presets:
        raise InvalidConfig(f"preset {name} is unknown: choose one of {', '.join(presets)}")
    preset: Any = presets[name]
    own = not getattr(preset, "engine_options", None) or given.get("engine", preset.engine) == preset.engine
    return preset if own else replace(preset, engine_options={})


def _recorded(run_dir: str, presets: Mapping[str, Recipe], given: Mapping[str, Any]) -> Recipe:
    """The options with which the run in a directory began, but with functions from where the command line has them now."""
    file = Path(run_dir, OPTIONS_FILE)
    if not file.is_file():
        raise CheckpointError(f"--resume {run_dir}: there is no run, which has {OPTIONS_FILE}")
    try:
        recorded = file_values(file, options_of(presets[TINY]), ONCE)
    except InvalidConfig as error:
        raise InvalidConfig(
            f"{error}; a run of another command or version begins anew, from its weights: --model-path "
            f"{Path(run_dir, 'global_step_N', 'actor', 'huggingface')}"
        ) from error
    moved = {name: given[name] for name in ("algorithm.loss", "algorithm.advantage") if name in given}
    return built(_chosen_preset(presets, recorded), recorded | moved)


def _changes(given: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """The options that ``--change NAME=VALUE ...`` gives to a run that is resumed, and ``change``, their names.

    Words without the name of an option belong to the value before them.
    """
    if not given.get("resume"):
        raise InvalidConfig("--change is for a run that continues: add --resume RUN_DIR")
    options = options_of(default)
    known, words = spellings(options), list[str]()
    for word in given["change"]:
        name, equals, value = word.partition("=")
        name = f"--{name.removeprefix('--').replace('_', '-')}"
        words += [name, value] if equals and name in known else [word]
    values, others = divided(words, known)
    for word in others:
        if "=" in word:
            raise _unknown(f"--{word.removeprefix('--')}", options)
        raise InvalidConfig(f"--change {word}: write NAME=VALUE")
    run_dir = given["resume"] if isinstance(given["resume"], str) else given.get("output-dir", default.run.output_dir)
    if refused := [name for name in values if name not in CHANGEABLE | FREE and name.split(".")[0] not in PLACES]:
        raise InvalidConfig(f"--change {refused[0]}: {way_out_of_resuming(run_dir)}")
    return values | {"change": tuple(values)}


def way_out_of_resuming(run_dir: str | Path) -> str:
    """What to do where a resumed run cannot have other values of an option."""
    weights = Path(run_dir, "global_step_N", "actor", "huggingface")
    return (
        "a run that is resumed keeps it; begin a new run from its weights, with another --output-dir: "
        f"--preset any --model-path {weights}"
    )


def parse_config(arguments: Sequence[str], default: Config, description: str | None, prog: str) -> Config:
    """The options of a command line over those of the file that ``--config`` names, over ``default``, a dataclass.

    Raises:
        InvalidConfig: an unknown, ill-typed or idle option, or an impossible combination, in one line.
    """
    options = [CONFIG, TRACEBACK, *options_of(default)]
    show_help_if_asked(arguments, options, description, prog)
    given = read(arguments, options)
    if missing := [option.name.upper() for option in options if option.positional and option.name not in given]:
        raise InvalidConfig(f"{prog} needs {' and '.join(missing)}")
    if given.get("config"):
        given = joined(file_values(Path(given["config"]), options_of(default)), given)
    return over(default, given)


def own_options(
    arguments: Sequence[str], default: Config, description: str | None, prog: str
) -> tuple[Config, list[str]]:
    """The options of a command that takes those of another one too, over ``default``, and the words that belong to the other one.

    Raises:
        InvalidConfig: an ill-typed or idle option, or an impossible combination, in one line.
    """
    options = options_of(default)
    show_help_if_asked(arguments, options, description, prog)
    given, others = divided(arguments, spellings(on_command_line(options)))
    return over(default, given), others


def over(default: Config, given: Mapping[str, Any]) -> Config:
    """Given options over a default. Raises `InvalidConfig` for an impossible combination, or an option that does nothing."""
    try:
        config = built(default, given)
    except InvalidConfig as error:
        raise InvalidConfig(as_typed(str(error), options_of(default), given)) from error
    refuse_idle_options(config, default, given)
    return config


def as_typed(message: str, options: Sequence[Option], given: Collection[str]) -> str:
    """The message of a configuration with the names of a command line in place of those of Python, where they are clear.

    >>> options = [Option("algorithm.kl-coef", ("algorithm", "kl_coef"), float, 0, "")]
    >>> as_typed("algorithm.kl_coef=-1: must be at least 0; leave out kl_coef", options, ["algorithm.kl-coef"])
    '--algorithm.kl-coef -1: must be at least 0; leave out --algorithm.kl-coef'
    """

    def typed(found: re.Match[str]) -> str:
        name = found[1].replace("_", "-")
        wholes = {option.name: ".".join(option.path).replace("_", "-") for option in on_command_line(options)}
        named = [each for each, whole in wholes.items() if name in (each, whole)]
        named = named or [each for each in wholes if each.endswith(f".{name}")]
        named = [each for each in named if each in given] or named
        return f"--{named[0]}{' ' * bool(found[2])}" if len(named) == 1 else found[0]

    return PYTHON_NAME.sub(typed, message)


def joined(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Options of which the later ones count; the values of ``NAME VALUE ...`` are joined.

    >>> joined({"steps": 3, "engine-options": {"a": 1}}, {"steps": 4, "engine-options": {"b": 2}})
    {'steps': 4, 'engine-options': {'a': 1, 'b': 2}}
    """
    mappings = {name: value for name, value in then.items() if isinstance(value, dict)}
    return {**first, **then, **{name: {**(first.get(name) or {}), **value} for name, value in mappings.items()}}


def read(arguments: Sequence[str], options: Sequence[Option]) -> dict[str, Any]:
    """The values of a command line by the names of their options.

    Raises:
        InvalidConfig: an option is unknown or has no such value, or a word belongs to no option.

    >>> read(["--rows=3", "--no-fit"], [Option("rows", ("rows",), int, 1, ""), Option("fit", ("fit",), bool, True, "")])
    {'rows': 3, 'fit': False}
    """
    given, others = divided(arguments, spellings(on_command_line(options)))
    positional = [option for option in options if option.positional]
    for word in others:
        if IS_OPTION.match(word):
            raise _unknown(word, options)
    for option, word in zip(positional, others, strict=False):
        given[option.name] = option.value([word])
    if left := others[len(positional) :]:
        raise InvalidConfig(_left_over(left))
    return given


def divided(arguments: Sequence[str], named: Mapping[str, tuple[Option, bool]]) -> tuple[dict[str, Any], list[str]]:
    """The values that a command line gives to options, by their `spellings`, and all its other words but those that ask for help.

    >>> divided(["--steps", "3", "--compile", "--seed=1"], spellings([Option("compile", ("compile",), bool, False, "")]))
    ({'compile': True}, ['--steps', '3', '--seed=1'])
    """
    given: dict[str, Any] = {}
    others: list[str] = []
    rest = [word for word in arguments if word not in HELP]
    while rest:
        word = rest.pop(0)
        name, equals, first = word.partition("=")
        option, on = named.get(name.replace("_", "-"), (None, True))
        if option is None:
            others.append(word)
            continue
        words = [first] if equals else ["false"] if not on else _values(option, rest)
        given = joined(given, {option.name: option.value(words)})
    return given, others


def _values(option: Option, rest: list[str]) -> list[str]:
    """Takes the words that follow an option and are its value from the ``rest`` of a command line."""
    end = next((place for place, word in enumerate(rest) if IS_OPTION.match(word)), len(rest))
    if bool in option.kinds:
        takes = end and (rest[0].lower() in TRUTH or (str in option.kinds and not rest[0].startswith("-")))
        return [rest.pop(0)] if takes else ["true"]
    if not any(get_origin(kind) in (tuple, dict) for kind in option.kinds):  # its value is one word
        if not end:
            raise InvalidConfig(f"--{option.name} needs a value")
        end = 1
    words, rest[:] = rest[:end], rest[end:]
    return words


def _unknown(word: str, options: Sequence[Option]) -> InvalidConfig:
    """The error for a name that is no option's: names those that it abbreviates or spells out, or else the nearest one."""
    name = word.partition("=")[0].replace("_", "-").removeprefix("--")
    names = [option.name for option in on_command_line(options) if not option.positional]
    known = spellings(on_command_line(options))
    if name in FILE_ONLY and any(option.name == name for option in options):
        return InvalidConfig(f"--{name} is read from files only: --config FILE with the line '{name}: VALUE'")
    if (ended := ENDED.get(name)) is not None:
        return InvalidConfig(f"--{name} has ended: {ended}")
    near = [each for each in names if each.endswith(f".{name}")] or get_close_matches(name, names, 1, cutoff=0.8)
    hint = f"the nearest is --{' or --'.join(near)}" if near else "--help-all shows all"
    ours = own_name(word)
    if ours is not None and all(each in known for each in ours.split() if each.startswith("--")):
        hint = f"here it is {ours}"
    return InvalidConfig(f"there is no option --{name}: {hint}")


def _left_over(words: Sequence[str]) -> str:
    """Words that belong to no option; those that are another framework's ``KEY=VALUE`` with the name that they have here."""
    theirs = ((word, own_name(word)) for word in words if "=" in word)
    named = "; ".join(f"{word} is {ours} here" for word, ours in theirs if ours)
    pairs = any("=" in word for word in words)
    hint = f": options are --NAME VALUE{f'; {named}' if named else ''} (docs/moving.md)" if pairs else ""
    return f"{', '.join(words)}: belongs to no option{hint}"


def show_help_if_asked(arguments: Sequence[str], options: Sequence[Option], description: str | None, prog: str) -> None:
    """Prints options and ends the program if a command line has ``--help``, or ``--help-all``, which prints all of them."""
    if {*HELP} & {*arguments}:
        show_help(help_text(prog, description, on_command_line(options), "--help-all" in arguments))
        sys.exit(0)
