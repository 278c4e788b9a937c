"""Episodes that go on later in the environments that they began in."""

import threading
import time
import weakref

import pytest

from dataproto.errors import InvalidConfig, MediaMismatch
from helpers.episodes import RandomEngine, hosting, renderer_of, starts_of
from rollout.continuation import WholeGroups
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, EpisodeStart, Observation
from rollout.environments.episode_loop import EpisodePlan
from rollout.environments.held_episodes import Decoding, HeldEpisodes


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


SAMPLING, LIMITS = SamplingParams(max_tokens=4), EpisodeLimits(turns=2)


class Door:
    """Episode 0 goes through at once, the others when the door is open; it notes what happens."""

    made, closed, open = [], [], threading.Event()

    def __init__(self):
        Door.made.append(self)
        self.closed = Door.closed  # of the test that made it, which may have ended when it is closed

    def reset(self, row, seed):
        self.number = seed
        return Observation(["go"])

    def step(self, action):
        if self.number:
            self.open.wait(60)
        return Observation(reward=1.0, done=True)

    def close(self):
        self.closed.append(self)


class LastDoor(Door):
    """The first one is done when another has got its answer."""

    answered, others = threading.Semaphore(0), 1

    def step(self, action):
        if self.number:
            self.answered.release()
        else:
            assert all(self.answered.acquire(timeout=60) for _ in range(self.others))
        return super().step(action)


class LastOfThreeDoors(LastDoor):
    others = 2


@pytest.fixture(autouse=True)
def _new_door():
    Door.made, Door.closed, Door.open = [], [], threading.Event()
    LastDoor.answered = threading.Semaphore(0)
    yield
    Door.open.set()


def named_starts(count):
    return [EpisodeStart(each.row, each.seed, each.environment_seed, each.uid, each.uid) for each in starts_of(count)]


def advance(held, starts, begun, wanted, make=Door, engine=RandomEngine):
    renderer = renderer_of("qwen2_5_vl")
    groups = WholeGroups([start.uid for start in starts], wanted)
    plan = EpisodePlan(make, LIMITS)
    return held.advance(plan, starts, begun, Decoding(engine(renderer), renderer, SAMPLING, groups, 1))


def test_an_episode_that_waits_for_its_environment_gets_the_answer_later():
    held, starts = HeldEpisodes(), named_starts(3)
    first = advance(held, starts, [[], [], []], wanted=1, make=LastOfThreeDoors)
    assert [episode.ended for episode in first] == ["done", None, None]
    begun = [[turn.plain() for turn in episode.begun] for episode in first]
    assert [[turn["whole"] for turn in turns] for turns in begun[1:]] == [[True], [True]]
    Door.open.set()
    second = advance(held, starts[1:], begun[1:], wanted=2)
    assert second[0] is first[1]
    assert [episode.ended for episode in second] == ["done", "done"]
    assert [episode.turns[0].token_ids for episode in second] == [turns[0]["token_ids"].tolist() for turns in begun[1:]]
    assert len(Door.made) == 3


def test_an_episode_of_an_earlier_process_is_played_again():
    starts = named_starts(2)
    first = advance(HeldEpisodes(), starts, [[], []], wanted=1, make=LastDoor)
    begun = [turn.plain() for turn in first[1].begun]
    Door.open.set()
    (again,) = advance(HeldEpisodes(), starts[1:], [begun], wanted=1)
    assert again.ended == "done"
    assert again.turns[0].token_ids == begun[0]["token_ids"].tolist()
    assert len(Door.made) == 3


def test_the_environment_of_an_episode_that_is_not_among_the_next_ones_is_closed():
    held, starts = HeldEpisodes(), named_starts(3)
    advance(held, starts, [[], [], []], wanted=1)
    Door.open.set()
    host, (episode,) = held._run.host, [each for each in held._run.held if each.start.uid == "u1"]
    begun = [turn.plain() for turn in episode.begun]
    advance(held, starts[1:2], [begun], wanted=1)
    assert "u2" not in host
    assert held._run is None  # nothing continues


def test_environments_that_are_released_are_closed_and_their_episodes_played_again():
    held, starts = HeldEpisodes(), named_starts(2)
    first = advance(held, starts, [[], []], wanted=1)
    Door.open.set()
    held.release()
    wait_until(lambda: len(Door.closed) == 2)  # one was in a call, which release does not wait for
    begun = [turn.plain() for turn in first[1].begun]
    (again,) = advance(held, starts[1:], [begun], wanted=1)
    assert (again.ended, len(Door.made)) == ("done", 3)
    held.release()


class FirstOnly(RandomEngine):
    """Answers its first request only, once there are two: then the door is open."""

    def submit(self, request, sampling, keep=False):
        number = super().submit(request, sampling, keep)
        if number:
            Door.open.set()
        return number

    def poll(self):
        return [self._complete(0)] if 0 in self.waiting else []


class FirstWaits(Door):
    def step(self, action):
        self.open.wait(60)
        return Observation(reward=1.0, done=True)


def test_an_episode_that_was_stopped_before_its_first_token_keeps_its_environment():
    held, starts = HeldEpisodes(), named_starts(2)
    first = advance(held, starts, [[], []], wanted=1, make=FirstWaits, engine=FirstOnly)
    (stopped,) = (episode for episode in first if not episode.ended)
    assert (stopped.begun, len(stopped.partial)) == ([], 0)
    (second,) = advance(held, [stopped.start], [stopped.begun], wanted=1, make=FirstWaits)
    assert second is stopped
    assert (second.ended, len(Door.made)) == ("done", 2)


class Refusing(RandomEngine):
    """Fails at its first request by an error that is no limit of an episode."""

    def submit(self, request, sampling, keep=False):
        raise MediaMismatch("other tokens")


def test_an_episode_goes_on_from_its_beginning_after_a_call_that_failed():
    held, starts = HeldEpisodes(), named_starts(2)
    first = advance(held, starts, [[], []], wanted=1, make=TwoDoors)
    begun = [[turn.plain() for turn in first[1].begun]]
    Door.open.set()
    with pytest.raises(MediaMismatch):
        advance(held, starts[1:], begun, wanted=1, make=TwoDoors, engine=Refusing)
    assert held._run is None
    (again,) = advance(held, starts[1:], begun, wanted=1, make=TwoDoors)
    assert (again.ended, len(again.turns)) == ("done", 2)
    assert again.turns[0].token_ids == begun[0][0]["token_ids"].tolist()


class TwoDoors(LastDoor):
    """The others have a second turn."""

    def step(self, action):
        seen = super().step(action)
        if self.number > 0:
            self.number = -1
            return Observation(["on"])
        return seen


class SlowStart(Door):
    def reset(self, row, seed):
        if seed:
            self.open.wait(60)
        self.number = seed
        return Observation(["go"])


def test_an_environment_that_has_not_been_reset_is_waited_for_later():
    held, starts = HeldEpisodes(), named_starts(2)
    first = advance(held, starts, [[], []], wanted=1, make=SlowStart)
    assert first[1].prompt is None
    Door.open.set()
    (second,) = advance(held, starts[1:], [[]], wanted=1, make=SlowStart)
    assert (second.ended, len(Door.made)) == ("done", 2)


def test_what_has_ended_is_not_kept():
    """Neither the threads of closed environments nor what would close them at the end of the process."""
    held, starts, before = HeldEpisodes(), named_starts(3), len(weakref.finalize._registry)
    Door.open.set()
    for _ in range(3):
        advance(held, starts, [[], [], []], wanted=3)
    assert len(weakref.finalize._registry) == before
    with hosting(Door, seconds=5.0) as host:
        for _ in range(4):
            host.reset("u", {}, 0)
            host.poll(None)
            thread = host._running["u"].thread
            host.close("u")
            thread.join(60)
        assert len(host._closing) == 1


@pytest.mark.parametrize("seconds", [0.0, float("inf"), float("nan")])
def test_a_time_that_is_no_number_of_seconds_is_refused(seconds):
    with pytest.raises(InvalidConfig, match=r"seconds=.* finite number above 0"):
        EpisodeLimits(turns=1, seconds=seconds)


def test_a_time_longer_than_a_thread_can_wait_is_taken():
    with hosting(Door, seconds=1e10) as host:
        host.reset("u", {}, 0)
        ((name, _),) = host.poll(None)
        assert name == "u"
