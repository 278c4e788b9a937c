"""The extras that a package of this project needs, and the error where one is not installed."""

from importlib.util import find_spec

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
