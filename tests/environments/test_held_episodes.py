"""Episodes that go on later in the environments that they began in."""

import threading

import pytest

from helpers.episodes import RandomEngine, renderer_of, starts_of
from rollout.carried_samples import WholeGroups
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, EpisodeStart, Observation, environment_host
from rollout.environments.environment_host import EnvironmentHost
from rollout.environments.held_episodes import EpisodePlan, HeldEpisodes

SAMPLING, LIMITS = SamplingParams(max_tokens=4), EpisodeLimits(turns=2)


class Door:
    """Episode 0 goes through at once, the others when the door is open; it notes what happens."""

    made, closed, open = 0, 0, threading.Event()

    def __init__(self):
        type(self).made += 1

    def reset(self, row, seed):
        self.number = seed
        return Observation(["go"])

    def step(self, action):
        if self.number:
            self.open.wait(60)
        return Observation(reward=1.0, done=True)

    def close(self):
        type(self).closed += 1


@pytest.fixture(autouse=True)
def _new_door():
    Door.made, Door.closed, Door.open = 0, 0, threading.Event()
    yield
    Door.open.set()


def named_starts(count):
    return [EpisodeStart(each.row, each.seed, each.environment_seed, each.uid, each.uid) for each in starts_of(count)]


def go_on(held, starts, begun, wanted):
    renderer = renderer_of("qwen2_5_vl")
    groups = WholeGroups([start.uid for start in starts], wanted)
    plan = EpisodePlan(Door, LIMITS)
    return held.go_on(RandomEngine(renderer), renderer, starts, begun, plan, SAMPLING, groups, 1)


def test_an_episode_that_waits_for_its_environment_gets_the_answer_later():
    held, starts = HeldEpisodes(), named_starts(3)
    first = go_on(held, starts, [[], [], []], wanted=1)
    assert [episode.ended for episode in first] == ["done", None, None]
    begun = [[turn.plain() for turn in episode.begun] for episode in first]
    assert [[turn["whole"] for turn in turns] for turns in begun[1:]] == [[True], [True]]
    Door.open.set()
    second = go_on(held, starts[1:], begun[1:], wanted=2)
    assert second[0] is first[1]
    assert [episode.ended for episode in second] == ["done", "done"]
    assert [episode.turns[0].token_ids for episode in second] == [turns[0]["token_ids"].tolist() for turns in begun[1:]]
    assert Door.made == 3


def test_an_episode_of_an_earlier_process_is_played_again():
    starts = named_starts(2)
    first = go_on(HeldEpisodes(), starts, [[], []], wanted=1)
    begun = [turn.plain() for turn in first[1].begun]
    Door.open.set()
    (again,) = go_on(HeldEpisodes(), starts[1:], [begun], wanted=1)
    assert again.ended == "done"
    assert again.turns[0].token_ids == begun[0]["token_ids"].tolist()
    assert Door.made == 3


def test_the_environment_of_an_episode_that_is_not_among_the_next_ones_is_closed():
    held, starts = HeldEpisodes(), named_starts(3)
    go_on(held, starts, [[], [], []], wanted=1)
    Door.open.set()
    (host,) = [held._host]
    begun = [turn.plain() for turn in held._episodes["u1"].begun]
    go_on(held, starts[1:2], [begun], wanted=1)
    assert "u2" not in host
    assert held._host is None  # nothing goes on


def test_the_time_between_two_calls_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(environment_host.time, "monotonic", lambda: now[0])
    with EnvironmentHost(Door, seconds=5.0) as host:
        host._working["u1"] = now[0]
        now[0] = 2.0
        host.pause()
        now[0] = 1000.0
        host.resume()
        assert now[0] - host._working.pop("u1") == 2.0
