"""Functions of the user's own that a command line names: ``FILE.py:FUNCTION``."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataproto.errors import DataProtoError


def load_named_function(name: str, kind: str, error: type[DataProtoError]) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` names. The file is run.

    Args:
        kind: what the function is, for messages.
        error: raised if there is no such file or function, or the file cannot be run.
    """
    file, colon, attribute = name.rpartition(":")
    path = Path(file).expanduser()
    if not colon or not file or not attribute:
        raise error(f"{name!r} does not name a {kind}: use file.py:function")
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
    except Exception as failure:
        del sys.modules[module_name]
        raise error(f"{path} cannot be imported: {type(failure).__name__}: {failure}") from failure
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = inspect.getmembers(module, inspect.isfunction)
        defined = [key for key, value in functions if value.__module__ == module_name]
        raise error(f"{path} has no function {attribute!r}; it defines {', '.join(defined) or 'none'}")
    return function
