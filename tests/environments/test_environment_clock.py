"""What counts as the time of an environment, and what becomes of environments whose time is over."""

import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from helpers.episodes import RandomEngine, renderer_of, starts_of
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, Observation, environment_host, play_episodes
from rollout.environments.environment_host import EnvironmentHost

SAMPLING = SamplingParams(max_tokens=4)


def play(make, count=1, engine=RandomEngine, **limits):
    renderer = renderer_of("qwen2_5_vl")
    played = EpisodeLimits(**{"turns": 3, "seconds": 60.0} | limits)
    return play_episodes(engine(renderer), renderer, starts_of(count), make, SAMPLING, played)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


class Quick:
    """Answers at once."""

    def reset(self, row, seed):
        return Observation(["go"])

    def step(self, action):
        return Observation(["on"])


class SlowEngine(RandomEngine):
    """A step takes longer than the environment of an episode may: ten minutes on the clock of `leaping`."""

    hosts, leapt = set(), 0.0

    def poll(self):
        wait_until(lambda: all(host._answers.qsize() >= host.working for host in SlowEngine.hosts))
        SlowEngine.leapt += 600.0
        return super().poll()


@pytest.fixture
def leaping(monkeypatch):
    """Environments have a clock that goes on with each step of a `SlowEngine`, so that a busy machine is no part of the test."""

    def call(host, *message, original=EnvironmentHost._call):
        SlowEngine.hosts.add(host)
        original(host, *message)

    monkeypatch.setattr(SlowEngine, "hosts", set())
    monkeypatch.setattr(EnvironmentHost, "_call", call)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + SlowEngine.leapt)
    monkeypatch.setattr(environment_host, "time", clock)


def test_the_time_in_which_the_engine_decodes_does_not_count(leaping):
    """Neither before an action nor while the environment's answer waits for the engine's step."""
    found = play(Quick, 4, SlowEngine, turns=4, seconds=60.0)
    assert [episode.ended for episode in found] == ["turns"] * 4


class Late(Quick):
    def step(self, action):
        time.sleep(0.3)
        return Observation(done=True, reward=1.0)


@pytest.mark.parametrize("engine", [RandomEngine, SlowEngine])
def test_an_answer_after_the_limit_is_too_late_however_busy_the_engine_is(engine, leaping):
    (found,) = play(Late, engine=engine, seconds=0.2)
    assert found.ended == "timeout"
    assert "more than 0.2 s" in found.message or "did not return" in found.message


def test_the_time_of_a_pause_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(environment_host.time, "monotonic", lambda: now[0])
    with EnvironmentHost(Quick, seconds=5.0) as host:
        for seconds in (2.0, 1000.0, 1000.0):
            host.pause()
            host.resume()
            began = host._now()
            now[0] += 1.0
            host.pause()
            now[0] += seconds
            assert host._now() == began + 1.0  # also of an answer in the pause
            host.resume()
            now[0] += 1.0
            assert host._now() == began + 2.0


class Waiting:
    """Waits for ever in its second step; says what was done to it."""

    told = []

    async def reset(self, row, seed):
        return Observation(["go"])

    async def step(self, action):
        try:
            await asyncio.Event().wait()
        finally:
            Waiting.told.append("cancelled")

    async def close(self):
        await asyncio.sleep(0)
        Waiting.told.append("closed")


def environment_threads():
    return [each for each in threading.enumerate() if getattr(each._target, "__name__", "") == "_serve"]


def test_an_async_environment_that_hangs_is_cancelled_and_closed():
    Waiting.told, before = [], environment_threads()
    (found,) = play(Waiting, seconds=0.2)
    assert found.ended == "timeout"
    wait_until(lambda: Waiting.told == ["cancelled", "closed"])
    wait_until(lambda: set(environment_threads()) <= set(before))


def test_an_async_environment_is_cancelled_and_closed_when_its_host_is_shut_in_a_call():
    Waiting.told, before = [], environment_threads()
    with EnvironmentHost(Waiting, seconds=60.0) as host:
        host.reset("u", {}, 0)
        host.poll(None)
        host.step("u", "on")
        wait_until(lambda: host._running["u"].future is not None and not host._running["u"].future.done())
    assert Waiting.told == ["cancelled", "closed"]
    wait_until(lambda: set(environment_threads()) <= set(before))


class Sharing(Quick):
    """Environments of all plays wait for each other at a lock, which belongs to the event loop that it is first waited in."""

    lock = asyncio.Lock()

    async def step(self, action):
        async with Sharing.lock:
            await asyncio.sleep(0.02)
        return Observation(done=True)


def test_async_environments_of_several_plays_share_a_lock():
    for _ in range(2):
        assert [episode.ended for episode in play(Sharing, 4)] == ["done"] * 4


class Busy(Sharing):
    """Computes on the event loop while it holds the lock."""

    begun = threading.Event()

    async def reset(self, row, seed):
        async with Sharing.lock:
            if row:
                Busy.begun.set()
                time.sleep(1.5)
            await asyncio.sleep(0.02)
        return Observation(["go"])


def test_environments_of_plays_share_a_lock_though_the_event_loop_is_busy():
    """A loop that was busy for a second got another one beside it, in which the lock of the first was waited for without end."""
    with EnvironmentHost(Busy, seconds=60.0) as host:
        for number in range(3):
            host.reset(f"first {number}", {"computes": True} if not number else {}, 0)
        assert Busy.begun.wait(60)
        with EnvironmentHost(Busy, seconds=60.0) as later:  # while the loop is busy
            for number in range(2):
                later.reset(f"later {number}", {}, 0)
            for each, count in ((host, 3), (later, 2)):
                answers = []
                while len(answers) < count:
                    answers += each.poll(None)
                assert [outcome.content for _, outcome in answers] == [["go"]] * count


class Blocking(Quick):
    let_go = threading.Event()

    async def step(self, action):
        Blocking.let_go.wait(60)


def test_a_method_that_blocks_the_event_loop_blocks_no_later_play(monkeypatch, caplog):
    monkeypatch.setattr(environment_host, "LOOP_S", 0.2)
    monkeypatch.setattr(environment_host, "CLOSING_S", 0.1)
    try:
        assert play(Blocking, seconds=0.2)[0].ended == "timeout"

        class Async(Quick):
            async def step(self, action):
                return Observation(done=True)

        with caplog.at_level(logging.WARNING, environment_host.__name__):
            assert play(Async, 2, seconds=5.0)[0].ended == "done"
        (warned,) = caplog.messages
        assert "blocks the event loop for over 0.2 s" in warned
    finally:
        Blocking.let_go.set()
