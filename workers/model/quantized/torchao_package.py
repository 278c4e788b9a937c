"""torchao, an optional package: asked for by name."""

from collections.abc import Iterator
from contextlib import contextmanager

from dataproto.errors import InvalidConfig


@contextmanager
def needs_torchao(option: str) -> Iterator[None]:
    """Imports of torchao in here raise an error that names ``option`` if it is not installed.

    Raises:
        InvalidConfig: torchao is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise InvalidConfig(f"{option} needs the package torchao: pip install 'dataproto-vlm[torchao]'") from error
