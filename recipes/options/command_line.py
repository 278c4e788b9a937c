"""What the commands of all recipes share: options from a command line, their checks, and an exit status."""

import contextlib
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import tyro

from dataproto.errors import CheckpointError, DataProtoError, InvalidConfig, later_errors
from recipes.options.config_file import CONFIG_FILE, ONCE, OPTIONS_FILE, file_arguments
from recipes.options.help_text import help_text, show_help
from recipes.options.idle_options import refuse_idle_options
from recipes.options.option_table import TRUTH, as_given, options_of, refuse_unknown, with_plain_flags, with_short_names
from recipes.options.peer_names import own_name

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

TRACEBACK, PRESET, CONFIG, ENGINE = "--traceback", "--preset", "--config", "--engine"
PARSED = re.compile(
    r"^Error parsing \w+: |; Argument helptext:.*"
)  # beside the text of an error, to which it adds nothing
NO_NUMBER = re.compile(r"(invalid literal for int\(\) with base 10|could not convert string to float): ('.*')")
NO_FORM = re.compile(r"no type matching (.+?) could be instantiated from \[(.*?)\].*")
HOME = re.compile(r"^(--[\w.-]+=|)~(?=/|$)")
CLEARED = re.compile(r"--algorithm\.([\w-]+)=None")
LEFT_OVER = re.compile(r"^Unrecognized options: (.*)")
NAMES_OF_AN_ALGORITHM = ("--algorithm.loss", "--algorithm.advantage")
TRACEBACK_TEXT = "show the whole traceback of an error"
CONFIG_TEXT = "read options from a YAML file; those given here override it"
NOT_BEGUN = "the new one had not begun"
"""What a run that ends before its first step adds to its error, so that nothing is said of resuming it."""
TINY, ANY = "tiny", "any"
"""The presets that every recipe has: of the small model that it makes, and of a checkpoint of any size."""
PRESET_TEXT = "whose defaults: of the small model, or of a checkpoint of any or of this size (default: tiny)"
RECIPE_OPTIONS = {
    f"{CONFIG} FILE": "read options from a YAML file, such as a run's config.yaml; those given here override it",
    "--resume [RUN_DIR]": "continue the run in RUN_DIR with its own options; without RUN_DIR, that in --output-dir with these",
}
"""Options that no configuration holds, and their texts."""


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
        if TRACEBACK in status.arguments:
            traceback.print_exc()
        lines = [str(error).partition("\n")[0], *later_errors(error)]
        print(f"error: {'; '.join(lines)}", file=sys.stderr)
        status.code = 2
    except KeyboardInterrupt as error:
        instead = " instead of --overwrite" if {"--overwrite", "--run.overwrite"} & {*status.arguments} else ""
        way_on = (
            f": run the same command with --resume{instead} to continue from the last checkpoint" if resumes else ""
        )
        later = later_errors(error)
        if any(NOT_BEGUN in each for each in later):
            way_on = ""
        print("; ".join([f"\ninterrupted{way_on}", *later]), file=sys.stderr)
        status.code = 130


def parse_recipe(
    arguments: Sequence[str],
    presets: Mapping[str, Recipe],
    description: str | None,
    prog: str,
    with_algorithm: Callable[[Recipe], Recipe] = lambda config: config,
    on_machine: OnMachine[Recipe] = lambda default, given, read: read(default),
) -> Recipe:
    """The configuration of a recipe's command line, with ``--preset``, ``--config`` and ``--resume RUN_DIR``.

    The options are over those of the run in RUN_DIR, else over the preset, which is ``tiny`` unless another one is named. Those
    of a file come before those of the command line.

    Args:
        presets: configurations by name, each with that name as its ``preset``; ``tiny`` and ``any`` are among them.
        with_algorithm: changes the defaults where the options name a loss or an advantage.
        on_machine: changes the defaults for the devices that there are, and reads the options over them.

    Raises:
        InvalidConfig: an unknown, ill-typed or idle option, or an impossible combination, in one line.
    """
    rest, run_dir = _take_run_dir(with_short_names(_at_home(arguments), options_of(presets[TINY])))
    rest, preset = _take(rest, PRESET)
    if asks_for_help(arguments):
        print_help(arguments, _preset(preset or TINY, presets), description, prog, presets)
    rest, file = _take(rest, CONFIG)
    if run_dir is not None and (preset or file):
        raise InvalidConfig(
            f"--resume {run_dir} continues with the options of that run: leave out --preset and --config"
        )
    if run_dir is not None:
        began = _recorded(run_dir, presets, prog, rest)
        return parse_config([*rest, "--resume", f"--output-dir={run_dir}"], began, None, prog)
    if _has_any(rest, "--steps") and _has_any(rest, "--epochs"):
        raise InvalidConfig("--steps and --epochs both set the length of the run: give one of them")
    read, read_preset = _take(file_arguments(Path(file), options_of(presets[TINY]), ONCE) if file else (), PRESET)
    given = [*read, *rest]
    default = _chosen_preset(preset or read_preset, presets, given)
    if names_an_algorithm(given):
        default = with_algorithm(default)
    config = on_machine(default, given, lambda default: parse_config(given, default, description, prog))
    if config.preset != TINY and config.model_path is None:
        raise InvalidConfig(f"--preset {config.preset} is for a checkpoint: add --model-path")
    return config


def _preset(name: str, presets: Mapping[str, Recipe]) -> Recipe:
    if name not in presets:
        raise InvalidConfig(f"--preset {name} is unknown: choose one of {', '.join(presets)}")
    return presets[name]


def _chosen_preset(name: str | None, presets: Mapping[str, Recipe], given: Sequence[str]) -> Recipe:
    """The defaults of a command line. They do not depend on the model, so one that is named needs a preset. The engine options of
    a preset are for its own engine.
    """
    if name is None and names_a_model(given):
        others = ", ".join(each for each in presets if each not in (TINY, ANY))
        raise InvalidConfig(
            "--model-path needs --preset, which says whose defaults apply: any (for a checkpoint of any size)"
            f"{f', {others}' if others else ''}, or tiny (those of the small model)"
        )
    preset = _preset(name or TINY, presets)
    engine = _take(given, ENGINE)[1]
    if not getattr(preset, "engine_options", None) or engine in (None, getattr(preset, "engine", None)):
        return preset
    return replace(preset, engine_options={})  # type: ignore[type-var]


def _recorded(run_dir: str, presets: Mapping[str, Recipe], prog: str, given: Sequence[str]) -> Recipe:
    """The options with which the run in a directory began, but with functions from where the command line has them now."""
    files = [Path(run_dir, name) for name in (OPTIONS_FILE, CONFIG_FILE)]
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        raise CheckpointError(
            f"--resume {run_dir}: there is no run, which would have a {OPTIONS_FILE} or {CONFIG_FILE}"
        )
    options = options_of(presets[TINY])
    filled_in = [option.name for option in options if option.name.endswith(".total-steps")] * (file.name == CONFIG_FILE)
    functions = ((name, _take(given, name)[1]) for name in NAMES_OF_AN_ALGORITHM)
    moved = [f"{name}={place}" for name, place in functions if place is not None]
    try:
        recorded, preset = _take(file_arguments(file, options, (*ONCE, *filled_in)), PRESET)
    except InvalidConfig as error:
        raise InvalidConfig(
            f"{error}; a run of another command or version begins anew, from its weights: --model-path "
            f"{Path(run_dir, 'global_step_N', 'actor', 'huggingface')}"
        ) from error
    default = presets[ANY] if names_a_model(recorded) else presets[TINY]  # of a run that has recorded no preset
    return _parse([*recorded, *moved], default if preset is None else _preset(preset, presets), prog)


def parse_config(arguments: Sequence[str], default: Config, description: str | None, prog: str) -> Config:
    """The options of a command line over those of the file that ``--config`` names, over ``default``, a dataclass.

    Raises:
        InvalidConfig: an unknown, ill-typed or idle option, or an impossible combination, in one line.
    """
    if asks_for_help(arguments):
        print_help(arguments, default, description, prog)
    options = options_of(default)
    rest, file = _take(with_short_names(_at_home(arguments), options), CONFIG)
    given = [*(file_arguments(Path(file), options) if file else ()), *with_plain_flags(rest, options)]
    given = [argument for argument in given if argument != TRACEBACK]
    refuse_unknown(given, options)
    config = _parse(given, default, prog)
    refuse_idle_options(config, default)
    return config


def divided(arguments: Sequence[str], default: Any) -> tuple[list[str], list[str]]:
    """A command line's options of ``default``, with their values, and all the others.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Own:
    ...     fit: bool = False
    ...     devices: int = 1
    >>> divided(["--steps", "3", "--devices", "2", "--fit", "--seed=1"], Own())
    (['--devices', '2', '--fit'], ['--steps', '3', '--seed=1'])
    """
    names = {f"--{option.name}": option for option in options_of(default)}
    names |= {option.no_flag: option for option in options_of(default) if option.kind is bool}
    own: list[str] = []
    others: list[str] = []
    given = list(arguments)
    while given:
        argument = given.pop(0)
        option = names.get(argument.partition("=")[0].replace("_", "-"))
        (others if option is None else own).append(argument)
        takes_next = given and (option is not None and (option.kind is not bool or given[0].lower() in TRUTH))
        if takes_next and "=" not in argument:
            own.append(given.pop(0))
    return own, others


def _parse(arguments: Sequence[str], default: Config, prog: str) -> Config:
    """The options over ``default``. What is given of an option ``NAME VALUE ...`` is added to the default's values."""
    refusal = io.StringIO()
    mappings = _mappings(default)
    empty = _with_mappings(
        default, {place: {} for place in mappings}
    )  # tyro takes NAME VALUE ... only over an empty default
    try:
        with contextlib.redirect_stderr(refusal), _unwrapped(), warnings.catch_warnings():
            joined = _joined(
                _at_home(arguments), [f"--{option.name}" for option in options_of(default) if option.path in mappings]
            )
            names = [*map(CLEARED.fullmatch, joined)]
            joined = [argument for argument, name in zip(joined, names, strict=True) if name is None]
            cleared = [name[1].replace("-", "_") for name in names if name is not None]
            warnings.simplefilter("ignore")  # of tyro, for options that a paper sets
            config = tyro.cli(type(default), args=joined, default=as_given(empty, cleared), prog=prog, add_help=False)
    except SystemExit:
        lines = [line.strip("╭╮╰╯│─ ") for line in refusal.getvalue().splitlines()]
        text = "; ".join(line for line in lines[1:] if line)
        text = NO_FORM.sub(_no_form, NO_NUMBER.sub(_no_number, PARSED.sub("", text)))
        text = LEFT_OVER.sub(_left_over, text).replace(":; ", ": ")
        raise InvalidConfig(text) from None
    given = _mappings(config)
    return _with_mappings(config, {place: mappings.get(place, {}) | values for place, values in given.items()})


def _at_home(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``~/`` at the start of a value replaced by the home directory. A shell does not replace it in
    ``--name=~/path`` or in quotes, and files of options are not read by a shell.
    """
    return [HOME.sub(lambda found: f"{found[1]}{Path.home()}", argument) for argument in arguments]


def _no_form(refusal: re.Match[str]) -> str:
    """Values that no form of an option takes, without the parser's list of what each form lacks."""
    forms, given = re.sub("[{}]", "", refusal[1]).replace("|", " or "), re.sub("[',]", "", refusal[2])
    return f"{given} is not {forms}"


def _no_number(refusal: re.Match[str]) -> str:
    """A value that Python does not convert to the number that an option takes."""
    return f"{refusal[2]} is not a {'whole ' if 'int' in refusal[1] else ''}number"


def _left_over(refusal: re.Match[str]) -> str:
    """Words that belong to no option; those that are another framework's ``KEY=VALUE`` with the name that they have here."""
    theirs = ((word, own_name(word)) for word in refusal[1].split(", ") if "=" in word)
    named = "; ".join(f"{word} is {ours} here" for word, ours in theirs if ours)
    hint = f": options are --NAME VALUE{f'; {named}' if named else ''} (docs/moving.md)" if "=" in refusal[1] else ""
    return f"{refusal[1]}: belongs to no option{hint}"


def _joined(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """The command line with all values of each option ``NAME VALUE ...`` in one place; tyro would take the last ones alone.

    >>> _joined(["--engine-options", "a", "1", "--steps", "3", "--engine-options", "b", "2"], ["--engine-options"])
    ['--steps', '3', '--engine-options', 'a', '1', 'b', '2']
    """
    rest: list[str] = []
    values: dict[str, list[str]] = {}
    inside: list[str] = rest
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.replace("_", "-")
            inside = values.setdefault(name, [name]) if name in names else rest
            if name in names:
                continue
        inside.append(argument)
    return [*rest, *(each for given in values.values() for each in given)]


FieldPath = tuple[str, ...]
"""The names of the fields that lead to a value of a configuration."""


def _mappings(config: Any, place: FieldPath = ()) -> dict[FieldPath, dict[str, Any]]:
    """The values of a configuration that are mappings, by their places."""
    found: dict[FieldPath, dict[str, Any]] = {}
    for field in fields(config):
        value, here = getattr(config, field.name), (*place, field.name)
        if isinstance(value, dict):
            found[here] = value
        elif is_dataclass(value):
            found |= _mappings(value, here)
    return found


def _with_mappings(config: Config, mappings: Mapping[FieldPath, dict[str, Any]]) -> Config:
    for place, mapping in mappings.items():
        config = _replaced(config, place, mapping)
    return config


def _replaced(config: Any, place: FieldPath, value: Any) -> Any:
    name, rest = place[0], place[1:]
    return replace(config, **{name: _replaced(getattr(config, name), rest, value) if rest else value})


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether a command line has ``--help`` or ``--help-all``."""
    return bool({"-h", "--help", "--help-all"} & {*arguments})


def print_help(
    arguments: Sequence[str],
    default: Any,
    description: str | None,
    prog: str,
    presets: Mapping[str, Any] | None = None,
) -> NoReturn:
    """Prints the options, with ``--help-all`` all of them, and ends the program."""
    options = [option for option in options_of(default) if not (presets and option.name in ("resume", "preset"))]
    more = {f"{PRESET} {'|'.join(presets)}": PRESET_TEXT} | RECIPE_OPTIONS if presets else {}
    if not presets and any(not option.positional for option in options):
        more = {f"{CONFIG} FILE": CONFIG_TEXT}
    show_help(help_text(prog, description, options, "--help-all" in arguments, more | {TRACEBACK: TRACEBACK_TEXT}))
    raise SystemExit(0)


def _take(arguments: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """The command line without an option, and the option's last value."""
    rest, value = [], None
    given = list(arguments)
    while given:
        argument = given.pop(0)
        if argument == name:
            if not given:
                raise InvalidConfig(f"{name} needs a value")
            value = given.pop(0)
        elif argument.startswith(f"{name}="):
            value = argument.removeprefix(f"{name}=")
        else:
            rest.append(argument)
    return rest, value


def _take_run_dir(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The command line without ``--resume RUN_DIR``, and the directory; ``--resume`` alone is a flag and stays."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--resume":
            after = arguments[place + 1 :]
            if not equals and after and not after[0].startswith("-"):
                value, after = after[0], after[1:]
            if value and value.lower() not in ("true", "false"):
                return [*arguments[:place], *after], value
    return list(arguments), None


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
    """Whether a command line has ``--model-path``; without it recipes train a small model."""
    return _has_any([each for each in arguments if each != "--model-path=None"], "--model-path")  # null in a file


def names_an_algorithm(arguments: Sequence[str]) -> bool:
    """Whether a command line names a loss or an advantage, whose paper then sets the options that it leaves out."""
    return _has_any(arguments, *NAMES_OF_AN_ALGORITHM)


def _has_any(arguments: Sequence[str], *options: str) -> bool:
    return any(argument.split("=")[0].replace("_", "-") in options for argument in arguments)
