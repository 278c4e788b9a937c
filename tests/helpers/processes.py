"""Runs functions on several ranks over gloo, with one start of the processes for all functions."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from helpers.brief_configs import shorten_configs

PRELOADED = ("workers.roles.actor",)
"""Imported once, by the process from which the ranks are forked."""


FOLDER = "TEST_RANKS_FOLDER"
"""The environment variable, which ranks inherit, with the folder of what a test has made for them."""


def shared_folder() -> Path:
    """On a rank: the folder of `sharing`."""
    return Path(os.environ[FOLDER])


@contextmanager
def sharing(folder: Path) -> Iterator[Path]:
    """Ranks that are started within the block find ``folder`` by `shared_folder`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER, str(folder))
        yield folder


def check_all_passed(outcomes: Sequence[Any]) -> None:
    """Fails with the first outcome of a scenario that is not ``None``: the traceback of a rank."""
    for rank, outcome in enumerate(outcomes):
        assert outcome is None, f"rank {rank}: {outcome}"


def run_ranks(
    size: int, scenarios: Mapping[str, Callable[[], Any]], folder: Path, timeout: float = 240
) -> dict[str, list[Any]]:
    """The result of each scenario on each rank, or the traceback of its exception as text.

    Scenarios are importable functions without arguments. Each runs on all ranks, one after the other.
    """
    context = _preloaded_context()
    results = context.Queue()
    shared = (size, str(folder / "store"), dict(scenarios), dict(os.environ), results)
    ranks = [context.Process(target=_rank, args=(rank, *shared), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    found: dict[str, list[Any]] = {name: [None] * size for name in scenarios}
    try:
        for _ in range(size * len(found)):
            name, rank, outcome = results.get(timeout=timeout)
            found[name][rank] = pickle.loads(outcome)
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.kill()
    return found


@cache
def _preloaded_context() -> Any:
    """A context whose fork server has imported `PRELOADED`; a fork server that another test started is stopped."""
    forkserver._forkserver._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _rank(
    rank: int,
    size: int,
    store: str,
    scenarios: dict[str, Callable[[], Any]],
    environment: dict[str, str],
    results: Any,
) -> None:
    os.environ.update(environment)  # that of the fork server may be older
    torch.set_num_threads(1)
    disable_progress_bar()
    shorten_configs()
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    for name, scenario in scenarios.items():
        try:
            outcome = scenario()
        except BaseException:  # sent to the test, which then does not wait for the others
            outcome = traceback.format_exc()
        results.put(
            (name, rank, pickle.dumps(outcome))
        )  # by value, since this process may end before the test reads it
    dist.destroy_process_group()
