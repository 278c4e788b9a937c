"""Users' functions that a command line names as ``FILE.py:FUNCTION``: loading them, and their errors."""

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dataproto.errors import DataProtoError, UserFunctionFailed, describe


def load_named_function(name: str, kind: str, error: type[DataProtoError]) -> Callable[..., Any]:
    """Runs the file that ``FILE.py:FUNCTION`` names and returns the function.

    Args:
        name: ``FILE.py:FUNCTION``.
        kind: the kind of function, such as ``loss``, for error messages.
        error: the class of the exception to raise.

    Raises:
        error: the file or the function does not exist, or the file cannot be imported.
    """
    file, colon, attribute = name.rpartition(":")
    path = Path(file).expanduser()
    if not colon or not file or not attribute:
        way_out = (
            f"which function of it? {name}:FUNCTION" if Path(name).is_file() else "use a known name or FILE.py:FUNCTION"
        )
        raise error(f"{name!r} is not the name of a {kind}: {way_out}")
    if not path.is_file():
        raise error(f"{name!r}: there is no file {path}")
    module_name = f"{kind}_{path.stem}_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise error(f"{name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as failure:
        del sys.modules[module_name]
        raise error(f"{path} cannot be imported: {describe(failure, str(path))}") from failure
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = inspect.getmembers(module, inspect.isfunction)
        defined = [key for key, value in functions if value.__module__ == module_name]
        raise error(f"{path} has no function {attribute!r}; it defines {', '.join(defined) or 'none'}")
    return function


def source_file(function: Callable[..., Any]) -> str | None:
    """The file that defines a function, as tracebacks name it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else code.co_filename


@contextlib.contextmanager
def in_users_function(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Raises what a user's function raises as `UserFunctionFailed`, with its file and line; functions of ours are left alone.

    Args:
        name: of the option and the function, e.g. ``algorithm.loss=mine.py:loss``; ours have no colon.
    """
    try:
        yield
    except DataProtoError:
        raise
    except (Exception, SystemExit) as failure:
        if ":" not in name:
            raise
        raise UserFunctionFailed(f"{name} raised {describe(failure, source_file(function))}") from failure
