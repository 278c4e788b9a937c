"""Servers for the tests that do not kill them."""

import json

import pytest

from helpers.servers import ENGINE, serving
from recipes.demo.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """With the backend in NumPy."""
    with serving(tmp_path_factory.mktemp("serve"), "--gap-seconds", "30", "--poll-seconds", "5") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """The small model, in a directory of its name."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_path, tmp_path_factory):
    """With the real engine and the small model "tiny"."""
    options = json.dumps({"models": {"tiny": str(tiny_path)}})
    with serving(tmp_path_factory.mktemp("tiny"), options_of_engine=options, factory=ENGINE) as server:
        yield server
