"""Servers for the tests that do not kill them: their front and their engine are threads."""

import pytest
import torch

from dataproto_server.config import EngineOptions
from dataproto_server.engine import InProcessEngine
from helpers.servers import serving_in_threads
from helpers.vector_backend import VectorBackend
from recipes.demo.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """With the backend in NumPy."""
    options = ("--gap-seconds", "30", "--poll-seconds", "1")
    with serving_in_threads(tmp_path_factory.mktemp("serve"), VectorBackend(), *options) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """The small model, in a directory of its name."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_path, tmp_path_factory):
    """With the real engine and the small model "tiny", of which one client may train all weights."""
    engine = InProcessEngine({"tiny": tiny_path}, EngineOptions(full_finetuning=True), torch.device("cpu"))
    with serving_in_threads(tmp_path_factory.mktemp("tiny"), engine) as server:
        yield server
