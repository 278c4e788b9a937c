"""A configuration as a file: YAML with the names of the command line, or the ``config.json`` of a run."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin

import yaml

from dataproto.errors import InvalidConfig, writing
from recipes.options.option_table import Option, options_of
from recipes.report.page import OPTIONS_FILE

HEADER = "# The options that made this directory. `--config FILE` reads such a file; options on the command line override it.\n"
ONCE = ("resume", "overwrite")
"""Options of one call of a command, which its file leaves out."""


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
    for option in options_of(config):
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
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise InvalidConfig(f"{path} is not a list of options, one a line as in 'steps: 100'")
    known = {option.name: option for option in options if not option.positional}
    known |= {".".join(option.path).replace("_", "-"): option for option in known.values()}
    arguments = []
    for key, value in _flat(found, known):
        if key not in known:
            near = get_close_matches(key, known, 1, cutoff=0.0)
            raise InvalidConfig(f"{path}: there is no option {key!r}; the nearest is {known[near[0]].name!r}")
        if known[key].name not in without:
            arguments += _spelled(path, known[key], value)
    return arguments


def _flat(value: Mapping[Any, Any], known: Mapping[str, Option], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = prefix + str(name).replace("_", "-")
        if isinstance(inner, Mapping) and not (key in known and get_origin(known[key].kind) is dict):
            yield from _flat(inner, known, f"{key}.")
        else:
            yield key, inner


def _spelled(path: Path, option: Option, value: Any) -> list[str]:
    name = f"--{option.name}"
    if option.kind is bool:
        if not isinstance(value, bool):
            raise InvalidConfig(f"{path}: {option.name}={value!r} must be true or false")
        return [name if value else option.no_flag]
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(each, (int, float, str)):  # bool is an int
                raise InvalidConfig(f"{path}: {option.name}: {key}={each!r} must be a number, a text, true or false")
        return [name, *(str(each) for pair in value.items() for each in pair)]
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [f"{name}={value}"]
