"""A configuration as a file: YAML with the names of the command line, or the ``config.json`` of a run."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

import yaml

from dataproto.errors import InvalidConfig, writing
from recipes.options.option_table import TRUTH, Option, as_given, options_of

OPTIONS_FILE, CONFIG_FILE = "config.yaml", "config.json"
"""In a run's directory: the options as they were asked for, to start or resume a run from, and all options as they are."""
HEADER = "# The options that made this directory. `--config FILE` reads such a file; options on the command line override it.\n"
ONCE = ("resume", "overwrite")
"""Options of one call of a command, which its file leaves out."""
AMBIGUOUS = ("yes", "no", "on", "off", "y", "n")
"""Texts that YAML 1.1 reads as true or false, and YAML 1.2 as texts."""
NULL = "tag:yaml.org,2002:null"


class _AsWritten(yaml.SafeLoader):
    """Reads each value as the text that stands in the file, as a command line does; only a null is a value of its own.

    YAML 1.1 would make a truth of ``yes``, 750 minutes of ``12:30`` and 8 of ``010``. A key that stands twice in one group is an
    error, where YAML's usual readers drop what it had first.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            line, name = key.start_mark.line + 1, str(key.value)
            if name in first:
                raise InvalidConfig(f"{name!r} stands in line {first[name]} and again in line {line}: join the two")
            first[name] = line
        return node

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        text = super().construct_scalar(node)
        return _Quoted(text) if node.style in ("'", '"') else text


class _Quoted(str):
    """A text that stands in quotes."""


_AsWritten.add_implicit_resolver(NULL, re.compile("^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_AsWritten.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])


def write_options(directory: Path, config: Any) -> Path:
    """Writes ``config.yaml``, the options of a configuration, into a directory, and returns the file's path."""
    path = directory / OPTIONS_FILE
    with writing(path):
        path.write_text(config_as_yaml(config), encoding="utf-8")
    return path


def config_as_yaml(config: Any) -> str:
    """The options of a configuration, without `ONCE`, as YAML that `file_arguments` reads.

    What is given by position stands in comments.
    """
    nested: dict[str, Any] = {}
    comments = ""
    for option in options_of(as_given(config)):
        group, _, name = option.name.rpartition(".")
        if option.positional:
            comments += f"# {option.name.upper()}: {option.default}\n"
        elif option.name not in ONCE:
            (nested.setdefault(group, {}) if group else nested)[name] = _plain(option.default)
    return HEADER + comments + yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, Path) else value


def file_arguments(path: Path, options: Sequence[Option], without: Sequence[str] = ()) -> list[str]:
    """A file's options as a command line spells them.

    Keys are names as on the command line, nested or with dots, with ``-`` or ``_``, or those of ``config.json``.

    Args:
        without: names of options that are left out.

    Raises:
        InvalidConfig: the file cannot be read, or has a key that is no option; names it and the nearest one.
    """
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _AsWritten)
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error}") from None
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise InvalidConfig(f"{path} is not a list of options, one a line as in 'steps: 100'")
    known = {option.name: option for option in options if not option.positional}
    known |= {".".join(option.path).replace("_", "-"): option for option in known.values()}
    arguments: list[str] = []
    given: set[str] = set()
    for key, value in _flat(found, known):
        if key not in known:
            near = get_close_matches(key, known, 1, cutoff=0.0)
            raise InvalidConfig(f"{path}: there is no option {key!r}; the nearest is {known[near[0]].name!r}")
        option = known[key]
        if option.name in given:
            raise InvalidConfig(f"{path}: {option.name} stands twice, under several of its names: leave one")
        given.add(option.name)
        if option.name not in without:
            try:
                arguments += _spelled(option, value)
            except InvalidConfig as error:
                raise InvalidConfig(f"{path}: {option.name}{error}") from None
    return arguments


def _flat(value: Mapping[Any, Any], known: Mapping[str, Option], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = prefix + str(name).replace("_", "-")
        if isinstance(inner, Mapping) and not (key in known and get_origin(known[key].kind) is dict):
            yield from _flat(inner, known, f"{key}.")
        else:
            yield key, inner


def _spelled(option: Option, value: Any) -> list[str]:
    """An option with its value as on the command line. Raises `InvalidConfig` without the option's name."""
    name = f"--{option.name}"
    if option.kind is bool:
        if str(value).lower() not in TRUTH:
            raise InvalidConfig(f"={value!s} must be true or false")
        return [name if TRUTH[value.lower()] else option.no_flag]
    if isinstance(value, Mapping):
        kind = get_args(option.kind)[1]
        return [name, *(text for key, each in value.items() for text in (str(key), _text(kind, each, f": {key}=")))]
    if isinstance(value, list):
        return [name, *(_text(option.kind, each, ": ") for each in value)]
    return [f"{name}={value if value is None else _text(option.kind, value, '=', within=False)}"]


def _text(kind: Any, value: Any, place: str, within: bool = True) -> str:
    """A value, of an option of type ``kind``, as a command line spells it.

    Args:
        place: of the value in the option, for an error.
        within: whether it is one of several, each a word of its own.
    """
    if not isinstance(value, str):
        raise InvalidConfig(f"{place}{value!r} must be a number, a text, true or false")
    if within and re.match("--[a-zA-Z]", value):  # which a command line takes for the next option
        raise InvalidConfig(f"{place}{value!r} begins as an option does, which a value in a list cannot")
    if _takes(kind, bool) and not isinstance(value, _Quoted):
        if value.lower() in AMBIGUOUS:
            raise InvalidConfig(f"{place}{value}: write true or false, or, for the text, quotes around it")
        return str(TRUTH.get(value.lower(), value))
    return value if _takes(kind, str) else value.replace(".inf", "inf").replace(".nan", "nan")


def _takes(kind: Any, wanted: type) -> bool:
    """Whether a value of type ``kind`` can be, or contain, one of type ``wanted``.

    >>> _takes(tuple[str, ...] | None, str), _takes(dict[str, int], bool)
    (True, False)
    """
    return kind is wanted or any(_takes(each, wanted) for each in get_args(kind))
