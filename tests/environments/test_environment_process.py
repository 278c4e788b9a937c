"""Environments in processes of their own: what they do there is what they do here, and their memory is bounded."""

import multiprocessing
import os
import threading
import time

import pytest

from dataproto.errors import InvalidConfig
from helpers.environments import Drawing, Greedy, Hanging, Leaving, Misbehaving, Slow
from helpers.episodes import RandomEngine, hosting, play_episodes, renderer_of, starts_of
from recipes.algorithms.function_files import load_named_function
from rollout.engine import SamplingParams
from rollout.environments import EnvironmentFailed, EpisodeLimits, environment_process
from rollout.environments.environment_process import in_process

SAMPLING = SamplingParams(max_tokens=5)


@pytest.mark.slow
def test_memory_and_crashes_end_an_episode_and_never_the_run():
    renderer, limits = renderer_of("qwen2_5_vl"), EpisodeLimits(turns=4, memory_gib=0.5)
    found = play_episodes(RandomEngine(renderer), renderer, starts_of(10), Misbehaving, SAMPLING, limits)
    reasons = ["done", "memory", "memory", "memory", "done", "error", "error", "error", "invalid", "error"]
    assert [episode.ended for episode in found] == reasons
    for number in (1, 2, 3):
        assert found[number].message == "step needs more than the 0.5 GiB that its process may have"
    for number, text in {5: "by SIGABRT", 6: "SystemExit: 3", 7: "exit status 4", 8: "a str", 9: "'no map'"}.items():
        assert text in found[number].message
    assert [turn.reward for turn in found[4].turns] == [0.5, 2.0]  # it goes on after a refusal
    assert found[0].info == {"bytes": 2}
    assert all(episode.failed == (reason != "done") for episode, reason in zip(found, reasons))


@pytest.mark.slow
def test_episodes_are_those_of_environments_in_threads():
    renderer = renderer_of("qwen2_5_vl")
    threads, processes = (
        play_episodes(
            RandomEngine(renderer),
            renderer,
            starts_of(6),
            Drawing,
            SAMPLING,
            EpisodeLimits(3, memory_gib=memory),
        )
        for memory in (None, 1.0)
    )
    for one, other in zip(threads, processes):
        assert [turn.token_ids for turn in one.turns] == [turn.token_ids for turn in other.turns]
        assert [turn.state for turn in one.turns] == [turn.state for turn in other.turns]
        assert [turn.reward for turn in one.turns] == [turn.reward for turn in other.turns]
        assert one.ended == other.ended


def gone(process):
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:
        time.sleep(0.05)
    return not os.path.exists(f"/proc/{process}")


@pytest.mark.slow
def test_a_process_ends_with_its_episode_and_one_that_hangs_is_killed():
    with hosting(Hanging, seconds=60.0, memory_gib=1.0) as host:
        for number in range(2):
            host.reset(str(number), {}, 0)
            ((_, seen),) = host.poll(None)
            process = int(seen.content[0])
            assert process != os.getpid()
            if number:
                host.step("1", "")
            host.close(str(number))
            assert gone(process)
        host.reset("2", {}, 0)
        ((_, seen),) = host.poll(None)
        host._running["2"].seconds = 0.2
        host.step("2", "")
        ((_, failure),) = host.poll(None)
        assert isinstance(failure, EnvironmentFailed)
        assert (failure.reason, gone(int(seen.content[0]))) == ("timeout", True)


@pytest.mark.slow
def test_the_clock_of_a_process_stops_in_a_pause():
    """Only the host judges the time: half a second of it is left, and the call takes a second of a pause."""
    with hosting(Slow, seconds=60.0, memory_gib=1.0) as host:
        host.reset("0", {}, 0)
        host.poll(None)
        host._running["0"].seconds = 0.5
        host.step("0", "")
        host.pause()
        answer = host._answers.get(timeout=60)
        host._answers.put(answer)
        host.resume()
        ((_, seen),) = host.poll(None)
        assert seen.done


@pytest.mark.slow
def test_an_environment_of_a_users_file_is_sent(tmp_path):
    (tmp_path / "own.py").write_text(
        "from rollout.environments import Observation\nTEXT = 'hello'\n"
        "class Own:\n    def reset(self, row, seed):\n        return Observation([TEXT, row['word']])\n"
    )
    make = load_named_function(f"{tmp_path}/own.py:Own", "environment", InvalidConfig)
    environment = in_process(make, 1.0)()
    assert environment.reset({"word": "you"}, 0).content == ["hello", "you"]
    environment.close()


def test_what_cannot_be_sent_is_refused():
    lock = threading.Lock()
    with pytest.raises(
        InvalidConfig, match=r"memory_gib=1\.0 needs an environment that can be sent to another process"
    ):
        in_process(lambda: lock, 1.0)
    with pytest.raises(InvalidConfig, match="memory_gib=0"):
        EpisodeLimits(turns=1, memory_gib=0)


def test_a_memory_error_has_its_reason_in_a_thread_too():
    renderer = renderer_of("qwen2_5_vl")
    (found,) = play_episodes(RandomEngine(renderer), renderer, starts_of(1), Greedy, SAMPLING, EpisodeLimits(turns=4))
    assert (found.ended, found.message) == ("memory", "step raised MemoryError: array")


def test_the_limits_of_turns_and_tokens_end_an_episode():
    renderer, limits = renderer_of("qwen2_5_vl"), EpisodeLimits(turns=50, tokens=40)
    found = play_episodes(RandomEngine(renderer), renderer, starts_of(20), Drawing, SAMPLING, limits)
    full = [episode for episode in found if episode.ended == "tokens"]
    assert full
    assert all(episode.length <= 40 for episode in found)
    assert {episode.ended for episode in found} <= {"tokens", "done"}
    found = play_episodes(RandomEngine(renderer), renderer, starts_of(20), Drawing, SAMPLING, EpisodeLimits(turns=2))
    assert {(episode.ended, len(episode.turns)) for episode in found if episode.ended != "done"} == {("turns", 2)}


@pytest.mark.slow
def test_how_a_process_ended_is_told_while_others_look_for_ended_ones():
    """The start of a process asks all others whether they have ended, and of each only one thread learns how."""
    ended = threading.Event()

    def look():
        while not ended.is_set():
            with environment_process.starting:
                multiprocessing.active_children()

    looking = threading.Thread(target=look)
    looking.start()
    make = in_process(Leaving, 1.0)
    try:
        for _ in range(8):
            with pytest.raises(EnvironmentFailed, match="exit status 4"):
                make().reset({}, 0)
    finally:
        ended.set()
        looking.join()
