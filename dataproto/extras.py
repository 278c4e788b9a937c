"""What a package imports: the extras that it needs, and names whose modules are imported when they are first used."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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


def lazy_names(package: str, file: str) -> Callable[[str], Any]:
    """The ``__getattr__`` (PEP 562) of a package that imports a public name's module when the name is first used.

    So a module of the package can be imported without its neighbours: reading the options of a command loads no torch. The
    package states its names once, as imports under ``if TYPE_CHECKING:``, which type checkers read too::

        if TYPE_CHECKING:
            from workers.ranks.layout import Layout

        __getattr__ = lazy_names(__name__, __file__)
    """
    modules = _imports_for_types(Path(file).read_text(encoding="utf-8"))

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # From now on Python finds it itself.
        return value

    return find


def _imports_for_types(source: str) -> dict[str, str]:
    """Names that a source imports under ``if TYPE_CHECKING:``, and their modules.

    >>> _imports_for_types("if TYPE_CHECKING:\\n    from a.b import C, d\\nfrom e import f")
    {'C': 'a.b', 'd': 'a.b'}
    """
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom) and each.module:
                    found |= {name.name: each.module for name in each.names}
    return found


class LazyFunction:
    """A function of a module that is imported when the function is called or its signature is read; it can be pickled.

    >>> import inspect
    >>> join = LazyFunction("posixpath", "join")
    >>> join("a", "b"), list(inspect.signature(join).parameters)
    ('a/b', ['a', 'p'])
    """

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # `inspect` follows this attribute.
        function: Callable[..., Any] = getattr(import_module(self.module), self.name)
        return function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__wrapped__(*arguments, **named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyFunction) and (self.module, self.name) == (other.module, other.name)

    def __hash__(self) -> int:
        return hash((self.module, self.name))

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"


class LazyModule:
    """A module whose functions are `LazyFunction`; for a table of functions that is also read only for its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, function: str) -> LazyFunction:
        return LazyFunction(self._name, function)
