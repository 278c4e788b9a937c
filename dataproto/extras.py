"""The extras that a package needs, versions of packages, and modules that only this process can import."""

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

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
        raise MissingPackage(f"{user} needs {', '.join(missing)}: pip install 'dataproto-vlm[{extra}]'", name=user)


def installed_version(package: str) -> str | None:
    """The version of a package by its name on PyPI, or ``None`` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def unimportable_modules() -> list[ModuleType]:
    """The modules that other processes cannot import by their name, such as a user's file that was loaded by its path."""
    return [
        module
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None)
        and "." not in name
        and name != "__main__"
        and not any(finder.find_spec(name, None) for finder in sys.meta_path)
    ]
