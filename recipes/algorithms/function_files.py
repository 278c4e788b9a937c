"""Users' functions that a command line names as ``FILE.py:FUNCTION``: loading them, and their errors."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dataproto.errors import DataProtoError, UserFunctionFailed, describe, undoing


@dataclass(frozen=True)
class NamedFunction:
    """A function of a user's file. Its pickle holds the code of the file and gives the function, on any machine."""

    module: str
    path: str
    code: bytes
    name: str

    def load(self) -> Any:
        """Runs the file, and returns what has the name, if something has. Raises what the file raises."""
        module = sys.modules[self.module] = ModuleType(self.module)
        module.__file__ = self.path
        with undoing(lambda: sys.modules.pop(self.module)):
            exec(compile(self.code, self.path, "exec"), module.__dict__)
        return getattr(module, self.name, None)

    def __reduce__(self) -> Any:
        return _loaded, (self.module, self.path, self.code, self.name)


def _loaded(*of: Any) -> Any:
    return NamedFunction(*of).load()


def load_named_function(name: str, kind: str, error: type[DataProtoError]) -> Callable[..., Any]:
    """Runs the file that ``FILE.py:FUNCTION`` names and returns the function; see `named_function`."""
    return named_function(name, kind, error)[1]


def named_function(name: str, kind: str, error: type[DataProtoError]) -> tuple[NamedFunction, Callable[..., Any]]:
    """Runs the file that ``FILE.py:FUNCTION`` names and returns the function, and what other processes get of it.

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
        known = "use a known name or FILE.py:FUNCTION"
        way_out = f"which function of it? {name}:FUNCTION" if Path(name).is_file() else known
        raise error(f"{name!r} names no {kind}: {way_out}")
    if not path.is_file():
        raise error(f"{name!r}: there is no file {path}")
    if path.suffix != ".py":
        raise error(f"{name!r}: {path} is not a Python file")
    module = f"{kind}_{path.stem}_{abs(hash(path.resolve())):x}"
    named = NamedFunction(module, str(path), path.read_bytes(), attribute)
    try:
        function = named.load()
    except (Exception, SystemExit) as failure:
        raise error(f"{path} cannot be imported: {describe(failure, str(path))}") from failure
    if not callable(function):
        functions = inspect.getmembers(sys.modules[module], inspect.isfunction)
        defined = [key for key, value in functions if value.__module__ == module]
        raise error(f"{path} has no function {attribute!r}; it defines {', '.join(defined) or 'none'}")
    return named, function


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
