"""The options of a configuration: names, types, defaults, texts, and how words become their values."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

from dataproto.errors import InvalidConfig
from recipes.options.names import FILE_ONLY, OTHER_NAMES

Config = TypeVar("Config")

UNPREFIXED = ("compute", "data", "keys", "run", "episodes", "engine", "limits")
"""Fields of groups whose options have no prefix."""
REQUIRED: Any = MISSING
"""The value of a field without a default, which is given by position, in the defaults of a command."""
TRUTH = {"true": True, "false": False}
TEXTS = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
KINDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "BOOL"}
VALUES = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "None"}


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: on the command line, without the dashes, e.g. ``algorithm.kl-coef``.
        path: the fields that lead to its value; empty for an option that no configuration holds.
        kind: the type of its value.
        default: the value without the option.
        text: what it is for.
        positional: whether it is given by position, without its name: a field without a default.
    """

    name: str
    path: tuple[str, ...]
    kind: Any
    default: Any
    text: str
    positional: bool = False

    @property
    def no_flag(self) -> str:
        """How a flag is switched off: ``--no-compile``, ``--algorithm.no-whiten``."""
        group, dot, last = self.name.rpartition(".")
        return f"--{group}{dot}no-{last}"

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of which its value has one."""
        return get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)

    def value(self, words: Sequence[str]) -> Any:
        """The value that words spell. Raises `InvalidConfig`, also where a path or a name is empty: a variable of a shell that is
        not set would begin a run of other data, or in the working directory.
        """
        if "" in words and not isinstance(self.default, (str, dict)):
            raise InvalidConfig(f"--{self.name} '' is empty: give it a value, or leave it out")
        try:
            return value_of(self.kind, words)
        except (ValueError, KeyError, OverflowError):
            forms = dict.fromkeys(VALUES.get(kind) or spelled_kind(kind).replace("|", ", ") for kind in self.kinds)
            names = "one of " if get_origin(self.kind) is Literal else ""
            raise InvalidConfig(f"--{self.name} {' '.join(words)}: must be {names}{' or '.join(forms)}") from None


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


def on_command_line(options: Sequence[Option]) -> list[Option]:
    """The options that are not only for files."""
    return [option for option in options if option.name not in FILE_ONLY]


def _walk(config: Any, path: tuple[str, ...], prefix: str) -> Iterator[Option]:
    hints, texts = _hints_and_texts(config.__class__)
    for field in fields(config):
        kind, value, here = hints[field.name], getattr(config, field.name), (*path, field.name)
        name = f"{prefix}{field.name.replace('_', '-')}"
        if is_dataclass(value):
            yield from _walk(value, here, prefix_of(field.name, prefix))
        else:
            kind = Optional[kind] if field.default is None else kind  # noqa: UP045 of a type that is not known before
            positional = field.default is MISSING and field.default_factory is MISSING
            yield Option(name, here, kind, value, texts.get(field.name, ""), positional)


def prefix_of(group: str, prefix: str) -> str:
    """The prefix of the options in a field that is a group."""
    return prefix if group in UNPREFIXED else f"{prefix}{group.replace('_', '-')}."


@cache
def _hints_and_texts(config: type) -> tuple[dict[str, Any], dict[str, str]]:
    """The types of a class's fields, and their texts: those of the section ``Attributes`` of its docstring and of those of the
    classes that it extends.
    """
    texts: dict[str, str] = {}
    for each in reversed(config.__mro__):
        section = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        texts |= {found[1]: " ".join(found[2].split()) for found in TEXTS.finditer(section)}
    return get_type_hints(config), texts


def spellings(options: Sequence[Option]) -> dict[str, tuple[Option, bool]]:
    """Options by their names with dashes, and whether the name switches on.

    An option may also be written with the groups that it has in Python, of which some are left out on the command line.

    >>> sorted(spellings([Option("shuffle", ("data", "shuffle"), bool, True, "")]))
    ['--data.no-shuffle', '--data.shuffle', '--no-shuffle', '--shuffle']
    """
    found: dict[str, tuple[Option, bool]] = {}
    for option in options:
        whole = ".".join(option.path).replace("_", "-")
        short, other = f"{'.'.join(option.path[:1])}.{option.name}", OTHER_NAMES.get(option.name)
        names = [] if option.positional else [option.name, whole, short, other]
        for name in filter(None, names):
            found.setdefault(f"--{name}", (option, True))
            if option.kind is bool:
                group, dot, last = name.rpartition(".")
                found.setdefault(f"--{group}{dot}no-{last}", (option, False))
    return found


def value_of(kind: Any, words: Sequence[str]) -> Any:
    """The value of a type that words spell.

    Raises:
        ValueError, KeyError, OverflowError: they spell none.

    >>> value_of(dict[str, int | bool | str], ["a", "1", "b", "true"]), value_of(tuple[float, float] | None, ["None"])
    ({'a': 1, 'b': True}, None)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for each in sorted(inner, key=lambda each: (each is not NoneType, get_origin(each) is tuple, each is str)):
            with suppress(ValueError, KeyError, OverflowError):
                return value_of(each, words)
    if origin is tuple:
        kinds = inner[:1] * len(words) if Ellipsis in inner else inner
        return tuple(value_of(each, [word]) for each, word in zip(kinds, words, strict=True))
    if origin is dict:
        return dict(zip(words[::2], (value_of(inner[1], [word]) for word in words[1::2]), strict=True))
    (word,) = words
    if origin is Literal:
        return {str(choice): choice for choice in inner}[word]
    if kind is NoneType:
        return {"none": None, "null": None}[word.lower()]
    if kind is bool:
        return TRUTH[word.lower()]
    if kind is float:
        if math.isnan(number := float(word.replace(".inf", "inf"))):  # no option has a use for it
            raise ValueError(word)
        return number
    if kind in (str, Path):
        at_home = word == "~" or word.startswith("~/")  # which a shell leaves in --name=~/path and in quotes
        return kind(f"{Path.home()}{word[1:]}" if at_home else word)
    return int(word) if kind is int else {}[kind]


def built(default: Config, given: Mapping[str, Any]) -> Config:
    """A configuration with values by the names of their options. A mapping is added to the default's.

    An object that has a method ``replaced`` is changed by it.
    """
    nested: dict[str, Any] = {}
    for option in options_of(default):
        if option.name in given:
            value, within = given[option.name], nested
            for name in option.path[:-1]:
                within = within.setdefault(name, {})
            within[option.path[-1]] = {**option.default, **value} if isinstance(value, dict) else value
    return _changed(default, nested)


def _changed(config: Any, nested: Mapping[str, Any]) -> Any:
    values = {
        name: _changed(getattr(config, name), value) if is_dataclass(getattr(config, name)) else value
        for name, value in nested.items()
    }
    return config.replaced(**values) if hasattr(config, "replaced") else replace(config, **values)


def refuse_idle_options(config: Any, default: Any, given: Mapping[str, Any]) -> None:
    """Raises `InvalidConfig` for a given option that differs from ``default`` and does nothing in ``config``.

    Each dataclass of a configuration may have a method ``idle_options``: whether options do nothing, their names, which may end
    in a dot for a whole group, and the way out.
    """
    before = {option.name: option.default for option in options_of(default)}
    changed = [name for name, value in given.items() if value is not None and name in before and value != before[name]]
    for idle, way_out in _idle(config, ""):
        for name in changed:
            if name == idle or (idle.endswith(".") and name.startswith(idle)):
                raise InvalidConfig(f"{name if name in FILE_ONLY else f'--{name}'} would do nothing: {way_out}")


def _idle(config: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for is_idle, names, way_out in config.idle_options() if hasattr(config, "idle_options") else ():
        yield from ((prefix + name, way_out.replace("{group}", f"--{prefix}")) for name in names.split() if is_idle)
    for field in fields(config):
        if is_dataclass(group := getattr(config, field.name)):
            yield from _idle(group, prefix_of(field.name, prefix))


def spelled_kind(kind: Any) -> str:
    """How a value of a type is written, e.g. ``FLOAT FLOAT``."""
    origin, inner = get_origin(kind), [each for each in get_args(kind) if each is not NoneType]
    if origin is Literal:
        return "|".join(map(str, inner))
    if origin in (Union, UnionType):
        forms = dict.fromkeys(spelled_kind(each) for each in inner if get_origin(each) is not Callable)
        return "|".join(form for form in forms if f"{form} ..." not in forms)
    if origin is tuple:
        return f"{spelled_kind(inner[0])} ..." if Ellipsis in inner else " ".join(map(spelled_kind, inner))
    return "NAME VALUE ..." if origin is dict else KINDS.get(kind, "VALUE")


def spelled_value(value: Any) -> str:
    """A default as a command line spells it."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {each}" for name, each in value.items()) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value == "" or "\n" in str(value) else str(value)
