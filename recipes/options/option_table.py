"""The options of a configuration: names, types, defaults, and the texts that stand as comments beside the fields."""

import inspect
import io
import tokenize
from ast import AnnAssign, ClassDef, Name, parse
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from textwrap import dedent
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from dataproto.errors import InvalidConfig
from recipes.options.peer_names import own_name

TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: on the command line, without the dashes, e.g. ``algorithm.kl-coef``.
        path: the fields that lead to its value.
        kind: the type of its value.
        default: the value without the option.
        text: what it is for.
        positional: whether it is given by position, without its name.
        aliases: further names, with the dashes.
    """

    name: str
    path: tuple[str, ...]
    kind: Any
    default: Any
    text: str
    positional: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def no_flag(self) -> str:
        """How a flag is switched off: ``--no-compile``, ``--algorithm.no-whiten``."""
        group, dot, last = self.name.rpartition(".")
        return f"--{group}{dot}no-{last}"


def options_of(config: Any) -> list[Option]:
    """All options of a configuration, a dataclass with dataclasses in it, in order.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Config:
    ...     max_tokens: int = 7
    >>> [(option.name, option.default) for option in options_of(Config())]
    [('max-tokens', 7)]
    """
    return list(_walk(config, (), ""))


def as_given(config: Any, cleared: Collection[str] = ()) -> Any:
    """A configuration with `None` where an option of its algorithm has the value of a paper, which an option given later may
    change.

    Args:
        cleared: further options of the algorithm.
    """
    if not hasattr(config, "algorithm"):
        return config
    config, algorithm = copy(config), copy(config.algorithm)
    for name in {*algorithm.of_the_paper, *cleared}:
        object.__setattr__(algorithm, name, None)
    object.__setattr__(config, "algorithm", algorithm)
    return config


def _walk(config: Any, path: tuple[str, ...], prefix: str) -> Iterator[Option]:
    hints = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        hint, value, here = hints[field.name], getattr(config, field.name), (*path, field.name)
        kind, marks = (hint, ()) if get_origin(hint) is not Annotated else (get_args(hint)[0], get_args(hint)[1:])
        name = f"{prefix}{field.name.replace('_', '-')}"
        if is_dataclass(kind):
            yield from _walk(value, here, prefix if tyro.conf.OmitArgPrefixes in marks else f"{name}.")
        else:
            text = field_text(type(config), field.name)
            aliases = tuple(alias for mark in marks for alias in getattr(mark, "aliases", None) or ())
            yield Option(name, here, kind, value, text, tyro.conf.Positional in marks, aliases)


def field_text(config: type, name: str) -> str:
    """The comment of a field: behind it, or in the lines above it; empty without one."""
    return next((texts[name] for each in config.__mro__ if (texts := _texts(each)) and name in texts), "")


@cache
def _texts(config: type) -> dict[str, str]:
    """The comments of the fields that a class itself declares."""
    if not is_dataclass(config):
        return {}
    try:
        source = dedent(inspect.getsource(config))
    except (OSError, TypeError):  # made without a file
        return {}
    comments: dict[int, tuple[str, bool]] = {}  # line: text, whether it has the line to itself
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# "), not token.line[: token.start[1]].strip()
    found = {}
    (declaration,) = (node for node in parse(source).body if isinstance(node, ClassDef))
    for node in declaration.body:
        if isinstance(node, AnnAssign) and isinstance(node.target, Name):
            above = node.lineno - 1
            while comments.get(above, ("", False))[1]:
                above -= 1
            lines = range(above + 1, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(comments[line][0] for line in lines if line in comments)
    return found


def with_short_names(arguments: Sequence[str], options: Sequence[Option]) -> list[str]:
    """Options written with the group that their configuration has in Python by their names on the command line.

    >>> size = Option("batch-size", ("data", "batch_size"), int, 8, "")
    >>> with_short_names(["--data.batch_size=4", "--data.batch-size", "8", "--seed", "1"], [size])
    ['--batch-size=4', '--batch-size', '8', '--seed', '1']
    >>> with_short_names(["--run.no-shuffle"], [Option("shuffle", ("run", "shuffle"), bool, True, "")])
    ['--no-shuffle']
    """
    named = [option for option in options if not option.positional]
    whole = {f"--{option.path[0]}.{option.name}": option.name for option in named}  # groups within it are left out
    whole |= {f"--{'.'.join(option.path).replace('_', '-')}": option.name for option in named}
    for flag in (option for option in named if option.kind is bool):
        *groups, last = flag.path
        no_flag = flag.no_flag.removeprefix("--")
        whole |= {f"--{groups[0]}.{no_flag}": no_flag} if groups else {}
        whole[f"--{'.'.join([*groups, f'no-{last}']).replace('_', '-')}"] = no_flag
    parts = (argument.partition("=") for argument in arguments)
    return [
        f"--{whole[name.replace('_', '-')]}{equals}{value}"
        if name.replace("_", "-") in whole
        else name + equals + value
        for name, equals, value in parts
    ]


def with_plain_flags(arguments: Sequence[str], options: Sequence[Option]) -> list[str]:
    """``--flag true`` as ``--flag``, and ``--flag false`` as ``--no-flag``; the same for ``--flag=true``.

    Among the values of an option ``NAME VALUE ...`` that are not all texts, ``true`` and ``false`` are made those that tyro reads
    as such.

    Raises:
        InvalidConfig: ``--flag=VALUE`` with another value.
    """
    flags = {f"--{option.name}": option for option in options if option.kind is bool}
    mappings = {
        f"--{option.name}" for option in options if get_origin(option.kind) is dict and option.kind != dict[str, str]
    }
    found: list[str] = []
    given = list(arguments)
    while given:
        argument = given.pop(0)
        name, equals, value = argument.partition("=")
        option = flags.get(name.replace("_", "-"))
        if option is None:
            found.append(argument)
            if argument.replace("_", "-") in mappings:
                values = [*takewhile(lambda each: not each.startswith("--"), given)]
                found += [
                    str(TRUTH.get(each.lower(), each)) if place % 2 else each for place, each in enumerate(values)
                ]
                del given[: len(values)]
            continue
        if not equals and given and given[0].lower() in TRUTH:
            equals, value = "=", given.pop(0)
        if equals and value.lower() not in TRUTH:
            raise InvalidConfig(f"{name}={value}: must be true or false")
        found.append(f"--{option.name}" if not equals or TRUTH[value.lower()] else option.no_flag)
    return found


def refuse_unknown(arguments: Sequence[str], options: Sequence[Option]) -> None:
    """Raises `InvalidConfig` for a name that is no option's; names those that it abbreviates or spells out, or else the nearest
    one.
    """
    names = [option.name for option in options if not option.positional]
    known = {f"--{name}" for name in names} | {alias for option in options for alias in option.aliases}
    known |= {option.no_flag for option in options if option.kind is bool}
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if (
            name.startswith("--") and name[2:3].isalpha() and name not in known
        ):  # "---" is a value, e.g. of --rollout.stop
            near = _meant(name[2:], options) or get_close_matches(name[2:], names, 1, cutoff=0.8)
            hint = f"the nearest is --{' or --'.join(near)}" if near else "--help-all shows all"
            if (ours := _peers(argument, known)) is not None:
                hint = f"here it is {ours}"
            raise InvalidConfig(f"there is no option {name}: {hint}")


def _peers(argument: str, known: Collection[str]) -> str | None:
    """What an option of another framework is called here, if the command has that."""
    ours = own_name(argument)
    return ours if ours is not None and all(word in known for word in ours.split() if word.startswith("--")) else None


def _meant(name: str, options: Sequence[Option]) -> list[str]:
    """Options that end in ``name``.

    >>> _meant("lr", [Option("optimizer.lr", ("optimizer", "lr"), float, 1e-6, "")])
    ['optimizer.lr']
    """
    return [option.name for option in options if not option.positional and option.name.endswith(f".{name}")]
