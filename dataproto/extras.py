"""What a package imports: the extras that it needs, and names whose modules are imported when they are first used."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from dataproto.errors import MissingPackage


def require_extra(extra: str, user: str, *packages: str) -> None:
    """Checks that packages are installed, without importing them.

    Args:
        extra: the extra that installs them.
        user: the package of this project that needs them.

    Raises:
        MissingPackage: names the missing packages and the extra. ``python -m`` prints it as one line.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        message = f"{user} needs {', '.join(missing)}: pip install 'dataproto-vlm[{extra}]'"
        raise MissingPackage(message, name=user)


def unimportable_modules() -> list[ModuleType]:
    """The modules that other processes cannot import by their name, such as a user's file that was loaded by its path."""
    finders = [finder.find_spec for finder in sys.meta_path]
    return [
        module
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None)
        and "." not in name
        and name != "__main__"
        and not any(find(name, None) for find in finders)
    ]


def lazy_names(package: str, *modules: str) -> Callable[[str], Any]:
    """The ``__getattr__`` (PEP 562) of a package that imports the module of a public name when the name is first used.

    So a module of the package can be imported without its neighbours: reading the options of a command loads no torch. Type
    checkers read imports of the same names under ``if TYPE_CHECKING:``.

    Args:
        modules: those that have the names in its ``__all__``; with a dot first, of the package.
    """

    def find(name: str) -> Any:
        if name in sys.modules[package].__all__:
            for module in modules:
                if hasattr(found := import_module(module, package), name):
                    setattr(sys.modules[package], name, getattr(found, name))  # From now on Python finds it itself.
                    return getattr(found, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
