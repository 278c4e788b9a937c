"""Canaries: tests of what our correctness takes from another library. Each fails with what depends on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import pytest


@contextmanager
def relied_on(package: str, tried: str, dependent: str) -> Iterator[None]:
    """What the block, or the decorated test, asserts of a package is relied on.

    ``tried`` is a version of which it holds, and ``dependent`` a sentence on what depends on it, which a failure says.
    """
    try:
        yield
    except Exception as error:
        said = f"{package} {version(package)} behaves otherwise than {tried} ({type(error).__name__}: {error}). {dependent}"
        pytest.fail(said, pytrace=False)
