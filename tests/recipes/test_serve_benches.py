"""What the benchmarks of the server share: threads of torch, and what they say while they wait."""

import os
import threading

import pytest

pytest.importorskip("psutil")

from benchmarks.served_processes import last_line, limit_threads, told


@pytest.mark.parametrize(("given", "threads"), [(None, "3"), ("1", "1")])
def test_torch_has_a_thread_for_each_core_that_it_may_use(monkeypatch, given, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7})
    assert limit_threads() == 3
    assert os.environ["OMP_NUM_THREADS"] == threads


def test_who_waits_says_the_last_line_of_the_log_again_and_again(tmp_path):
    log, said, twice = tmp_path / "server.log", [], threading.Event()
    log.write_bytes(b"x" * 20_000 + b"\nvLLM starts\nloading: 10 %\rloading: 50 %\n\n")

    def say(text):
        said.append(text)
        if len(said) == 2:
            twice.set()

    with told("tenant 0 waits", log, say, seconds=0.01):
        assert twice.wait(60)
    assert set(said) == {"tenant 0 waits; the last line of server.log: loading: 50 %"}
    log.write_text("")
    assert last_line(log) == "(nothing yet)"
