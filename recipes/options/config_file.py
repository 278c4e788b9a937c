"""A configuration as a file: YAML with the names of the command line, or the ``config.json`` of a run."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

import yaml

from dataproto.errors import InvalidConfig, replace_file
from recipes.options.names import ENDED, own_name
from recipes.options.option_table import Option, options_of, spelled_value

OPTIONS_FILE, CONFIG_FILE = "config.yaml", "config.json"
"""In a run's directory: the options as they were asked for, to start or resume a run from, and all options as they are."""
HEADER = "# The options that made this directory. `--config FILE` reads such a file; options on the command line override it.\n"
ONCE = ("resume", "overwrite", "change")
"""Options of one call of a command, which its file leaves out."""
CHANGES = "changes"
"""The key of ``config.json`` under which the changes of a resumed run are recorded, each with its step."""
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


def settings_line(config: Any) -> str:
    """What the preset of a run and its options have chosen, in one line: all values that are not those of ``--preset any``."""
    usual = {option.path: option.default for option in options_of(type(config)())}
    chosen = {option.name: option.default for option in options_of(config) if option.default != usual.get(option.path)}
    texts = [f"{name} {spelled_value(value)}" for name, value in chosen.items() if name not in (*ONCE, "preset")]
    return f"preset {config.preset} and options: {', '.join(texts) or 'all by default'}"


def write_options(directory: Path, config: Any) -> Path:
    """Writes ``config.yaml``, the options of a configuration, into a directory, and returns the file's path."""
    return replace_file(directory / OPTIONS_FILE, config_as_yaml(config).encode())


def config_as_yaml(config: Any) -> str:
    """The options of a configuration, without `ONCE`, as YAML that `file_values` reads.

    What is given by position stands in comments.
    """
    nested: dict[str, Any] = {}
    comments = ""
    open_names = [("algorithm", name) for name in getattr(getattr(config, "algorithm", None), "of_the_paper", ())]
    for option in options_of(config):
        group, _, name = option.name.rpartition(".")
        if option.positional:
            comments += f"# {option.name.upper()}: {option.default}\n"
        elif option.name not in ONCE:
            value = None if option.path in open_names else option.default
            (nested.setdefault(group, {}) if group else nested)[name] = value
    nested = json.loads(json.dumps(nested, default=str))  # paths as texts, tuples as lists
    return HEADER + comments + yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)


def file_values(path: Path, options: Sequence[Option], without: Sequence[str] = ()) -> dict[str, Any]:
    """A file's options by name, with their values.

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
    given: dict[str, Any] = {}
    for key, value in _flat(found, known):
        if key == CHANGES:
            continue
        if key not in known:
            near = [name for name in known if name.endswith(f".{key}")] or get_close_matches(key, known, 1, cutoff=0.0)
            hint = (
                ENDED.get(key)
                or f"the nearest is {' or '.join(dict.fromkeys(repr(known[name].name) for name in near))}"
            )
            ours = (own_name(key) or "").split(maxsplit=1)
            if ours and ours[0].removeprefix("--") in known:
                hint = f"here it is {': '.join(ours).removeprefix('--')!r}"
            raise InvalidConfig(f"{path}: there is no option {key!r}; {hint}")
        option = known[key]
        if option.name in given:
            raise InvalidConfig(f"{path}: {option.name} stands twice, under several of its names: leave one")
        try:
            given[option.name] = option.value(_words(option, value))
        except InvalidConfig as error:
            raise InvalidConfig(f"{path}: {str(error).removeprefix('--')}") from None
    return {name: value for name, value in given.items() if name not in without}


def _flat(value: Mapping[Any, Any], known: Mapping[str, Option], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = prefix + str(name).replace("_", "-")
        if isinstance(inner, Mapping) and not (key in known and get_origin(known[key].kind) is dict):
            yield from _flat(inner, known, f"{key}.")
        else:
            yield key, inner


def _words(option: Option, value: Any) -> list[str]:
    """A value of a file as the words of a command line. Raises `InvalidConfig`."""
    if isinstance(value, Mapping):
        return [word for name, each in value.items() for word in (str(name), _word(option, each, f"{name}="))]
    if isinstance(value, list):
        return [_word(option, each) for each in value]
    return ["None" if value is None else _word(option, value)]


def _word(option: Option, value: Any, name: str = "") -> str:
    """One value of an option; ``name`` is its own within the option."""
    if not isinstance(value, str):
        raise InvalidConfig(f"{option.name}: {name}{value!r} must be a number, a text, true or false")
    takes_both = any(get_origin(kind) is dict and bool in get_args(get_args(kind)[1]) for kind in option.kinds)
    if takes_both and not isinstance(value, _Quoted) and value.lower() in AMBIGUOUS:
        raise InvalidConfig(f"{option.name}: {name}{value}: write true or false, or, for the text, quotes around it")
    return value
