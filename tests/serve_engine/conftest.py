"""An engine of a tiny checkpoint."""

import pytest

from helpers.checkpoints import write_checkpoint
from helpers.served_models import engine_of


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="session")
def shared(path):
    return engine_of(path)


@pytest.fixture
def engine(shared):
    """An engine without models."""
    yield shared
    for name in list(shared._models):
        shared.release(name)
