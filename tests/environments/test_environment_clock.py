"""What counts as the time of an environment, and what becomes of environments whose time is over."""

import asyncio
import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dataproto.columns import ROUTED_EXPERTS
from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.episodes import RandomEngine, hosting, play_episodes, prompts_of, renderer_of, starts_of
from rollout.continuation import BegunTurn, Tokens, WholeGroups
from rollout.engine import Completion, SamplingParams
from rollout.environments import EpisodeLimits, Observation, TurnRenderer, environment_host, episode_loop
from rollout.environments.environment_host import EnvironmentHost
from rollout.environments.episode_loop import EpisodePlan
from rollout.environments.episode_rows import episode_columns
from rollout.environments.held_episodes import Decoding, HeldEpisodes
from rollout.hf import HFEngine
from rollout.prompts import PromptBuilder

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


HOSTS = set()
"""Where environments run in a test with the fixture `hosts`."""


@pytest.fixture
def hosts(monkeypatch):
    def call(host, *message, original=EnvironmentHost._call):
        HOSTS.add(host)
        original(host, *message)

    HOSTS.clear()
    monkeypatch.setattr(EnvironmentHost, "_call", call)


def wait_for_environments():
    """Until all have answered, so that a step of an engine has the same episodes however busy the machine is."""
    wait_until(lambda: all(host._answers.qsize() >= host.working for host in HOSTS))


class SlowEngine(RandomEngine):
    """A step takes longer than the environment of an episode may: ten minutes on the clock of `leaping`."""

    leapt = 0.0

    def poll(self):
        wait_for_environments()
        SlowEngine.leapt += 600.0
        return super().poll()


@pytest.fixture
def leaping(hosts, monkeypatch):
    """Environments have a clock that goes on with each step of a `SlowEngine`."""
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
    with hosting(Quick, seconds=5.0) as host:
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
    with hosting(Waiting, seconds=60.0) as host:
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


@pytest.mark.slow
def test_environments_of_plays_share_a_lock_though_the_event_loop_is_busy():
    """A loop that was busy for a second got another one beside it, in which the lock of the first was waited for without end."""
    with hosting(Busy, seconds=60.0) as host:
        for number in range(3):
            host.reset(f"first {number}", {"computes": True} if not number else {}, 0)
        assert Busy.begun.wait(60)
        with hosting(Busy, seconds=60.0) as later:  # while the loop is busy
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


# The wall clock of a whole episode


class Endless(RandomEngine):
    """Gives each request a token a step, which takes a second on the clock of `counting`, and never an end."""

    now = 0.0

    def __init__(self, renderer):
        super().__init__(renderer)
        self.given = {}

    def poll(self):
        wait_for_environments()
        Endless.now += 1.0
        for number in self.waiting:
            self.given.setdefault(number, []).append(int(self.tokens[0]))
        return []

    def abort(self, number):
        running, tokens = number in self.waiting, self.given.pop(number, [])
        super().abort(number)
        return Completion(number, tokens, [-1.0] * len(tokens), "abort") if running else None


class OthersEnd(Endless):
    """Ends the turns of the episodes "other" alone."""

    def poll(self):
        super().poll()
        return [self._complete(number) for number in list(self.waiting) if self.requests[number].uid == "other"]


@pytest.fixture
def counting(hosts, monkeypatch):
    """Episodes have the clock of `Endless`."""
    monkeypatch.setattr(Endless, "now", 0.0)
    monkeypatch.setattr(episode_loop, "time", SimpleNamespace(monotonic=lambda: Endless.now))


LONG = SamplingParams(max_tokens=10**6)


def test_the_wall_clock_of_an_episode_counts_decoding(counting):
    renderer = renderer_of("qwen2_5_vl")
    engine, limits = Endless(renderer), EpisodeLimits(turns=3, wall_clock=20.0)
    found = play_episodes(engine, renderer, starts_of(2), Quick, LONG, limits)
    assert Endless.now == 20.0
    assert not engine.waiting
    assert [episode.ended for episode in found] == ["clock"] * 2
    assert not any(episode.failed for episode in found)
    lengths = [sum(len(turn.token_ids) for turn in episode.turns) for episode in found]
    assert max(lengths) == 20
    data = episode_columns(prompts_of(renderer.builder, 2), found, renderer, 10**6)
    assert data["response_mask"].sum(1).tolist() == lengths
    assert data["truncated"].all()


def test_the_wall_clock_of_an_episode_counts_its_environment():
    """Also where neither decoding nor another call wakes the loop."""
    Waiting.told, began = [], time.monotonic()
    (found,) = play(Waiting, seconds=600.0, wall_clock=0.3)
    assert found.ended == "clock"
    assert [turn.reward for turn in found.turns] == [0.0]
    assert time.monotonic() - began < 300
    wait_until(lambda: Waiting.told == ["cancelled", "closed"])


def test_an_episode_whose_environment_has_not_begun_when_its_time_is_over_has_no_turn():
    class Never(Waiting):
        async def reset(self, row, seed):
            return await self.step("")

    renderer = renderer_of("qwen2_5_vl")
    limits = EpisodeLimits(turns=3, wall_clock=0.1)
    found = play_episodes(RandomEngine(renderer), renderer, starts_of(1), Never, SAMPLING, limits)
    assert [(episode.ended, episode.turns) for episode in found] == [("clock", [])]
    data = episode_columns(prompts_of(renderer.builder, 1), found, renderer, 10)
    assert not data["response_mask"].any()


def test_the_wall_clock_of_an_episode_stands_still_between_steps(counting):
    renderer, held = renderer_of("qwen2_5_vl"), HeldEpisodes()
    one, other = (
        replace(starts_of(1)[0], uid=uid, trajectory=f"{uid}/0", environment_seed=0) for uid in ("one", "other")
    )

    def advance(starts, engine, begun):
        groups = WholeGroups([each.uid for each in starts], wanted=1)
        plan = EpisodePlan(Quick, EpisodeLimits(turns=3, wall_clock=500.0))
        return held.advance(plan, starts, begun, Decoding(engine, renderer, LONG, groups, 1))

    episode, ended = advance([one, other], OthersEnd(renderer), [[], []])
    played = Endless.now
    assert (episode.ended, ended.ended) == (None, "turns")
    assert 3.0 <= played == episode.elapsed < 500.0
    begun = [turn.plain() for turn in episode.begun]
    Endless.now += 10_000.0
    (again,) = advance([one], Endless(renderer), [begun])
    assert again is episode
    assert again.ended == "clock"
    assert Endless.now == 10_000.0 + 500.0
    before = sum(len(turn["token_ids"]) for turn in begun)
    assert before < len(again.turns[0].token_ids) <= before + 500 - played


class SteppedEngine(HFEngine):
    """A step takes a second on the clock of `counting`."""

    def poll(self):
        wait_for_environments()
        Endless.now += 1.0
        return super().poll()


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_a_turn_that_the_wall_clock_cut_has_the_tokens_of_one_that_goes_on(counting, tmp_path, model_type):
    builder = PromptBuilder.from_pretrained(write_checkpoint(model_type, tmp_path), max_prompt_length=300)
    renderer = TurnRenderer(builder)
    routed = {"routed_experts": True} if model_type == "qwen3_vl_moe" else {}
    engine = SteppedEngine(str(tmp_path), device=torch.device("cpu"), **routed)
    sampling, prompts = SamplingParams(max_tokens=12, seed=3, ignore_eos=True), prompts_of(builder, 2)

    def rows(**limits):
        Endless.now = 0.0
        found = play_episodes(engine, renderer, starts_of(2), Quick, sampling, EpisodeLimits(turns=1, **limits))
        return found, episode_columns(prompts, found, renderer, 12, getattr(engine, "no_experts", None))

    whole, expected = rows()
    cut, data = rows(wall_clock=6.0)
    assert [episode.ended for episode in whole] == ["length"] * 2
    assert [episode.ended for episode in cut] == ["clock"] * 2
    lengths = data["response_mask"].sum(1).tolist()
    assert 0 < max(lengths) < 12
    for row, length in enumerate(lengths):
        assert data["responses"][row, :length].equal(expected["responses"][row, :length])
        log_probs = (each["rollout_log_probs"][row, :length] for each in (data, expected))
        torch.testing.assert_close(*log_probs, atol=1e-5, rtol=0)
        if routed:
            assert len(data[ROUTED_EXPERTS][row]) == length
            assert data[ROUTED_EXPERTS][row][: length - 1].equal(expected[ROUTED_EXPERTS][row][: length - 1])


def test_the_wall_clock_must_be_a_time():
    for seconds in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidConfig, match="wall_clock="):
            EpisodeLimits(turns=1, wall_clock=seconds)


class Slow(Quick):
    """Each of its steps takes ten seconds."""

    async def step(self, action):
        Endless.now += 10.0
        return Observation(["on"])


def test_an_episode_that_is_played_again_keeps_its_turns_and_has_its_time_again(counting):
    renderer, (start,) = renderer_of("qwen2_5_vl"), starts_of(1)
    start = replace(start, uid="one", trajectory="one/0")

    def advance(begun, make, engine, **limits):
        groups = WholeGroups(["one"], wanted=1)
        plan = EpisodePlan(make, EpisodeLimits(**limits))
        return HeldEpisodes().advance(plan, [start], [begun], Decoding(engine, renderer, SAMPLING, groups, 1))[0]

    first = advance([], Quick, RandomEngine(renderer), turns=3)
    before = [first.prompt.input_ids, *(turn.shown.ids for turn in first.turns[:-1])]
    sampled = [(turn.token_ids, turn.log_probs, turn.weight_versions) for turn in first.turns]
    begun = [BegunTurn(Tokens(*each), True, ids.tolist()).plain() for each, ids in zip(sampled, before, strict=True)]
    again = advance(begun, Slow, Endless(renderer), turns=4, wall_clock=15.0)
    assert again.ended == "clock"
    assert [turn.token_ids for turn in again.turns[:3]] == [turn.token_ids for turn in first.turns]
    assert Endless.now == 3 * 10.0 + 5.0  # the last step and five of the engine are behind what it repeats


def test_an_observation_that_no_engine_has_read_has_experts(counting, tmp_path):
    """Two of three episodes wait for room in the engine when the time is over."""
    builder = PromptBuilder.from_pretrained(write_checkpoint("qwen3_vl_moe", tmp_path), max_prompt_length=300)
    renderer = TurnRenderer(builder)
    engine = SteppedEngine(str(tmp_path), device=torch.device("cpu"), max_num_seqs=1, routed_experts=True)
    ends = SamplingParams(max_tokens=12, seed=3, stop_token_ids=tuple(range(len(builder.tokenizer))))
    limits = EpisodeLimits(turns=3, wall_clock=5.0)
    episodes = play_episodes(engine, renderer, starts_of(3), Quick, ends, limits)
    assert any(episode.turns and episode.turns[-1].shown for episode in episodes)
    data = episode_columns(prompts_of(builder, 3), episodes, renderer, 12, engine.no_experts)
    experts, mask = data[ROUTED_EXPERTS], data["attention_mask"]
    for row, episode in enumerate(episodes):
        assert len(experts[row]) == int(mask[row, data["prompts"].shape[1] :].sum()), episode.ended
