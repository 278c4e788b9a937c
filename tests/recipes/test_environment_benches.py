"""The benchmarks of environments: what they count, and TRL's half of the walk beside ours."""

import argparse

import pytest

from benchmarks import environment_latency, walk_beside_trl
from benchmarks.trl_walk import WalkTools, parser
from helpers.episodes import RandomEngine, renderer_of
from recipes.demo.grid_walk import GridWalk, WalkRows


def test_played_episodes_are_counted_and_the_engine_is_left_as_it_was():
    renderer = renderer_of("qwen2_5_vl")
    engine = RandomEngine(renderer)
    options = argparse.Namespace(episodes=3, turns=2, turn_tokens=4)
    found = environment_latency.play(engine, renderer, options, 0.0)
    assert found.polls == engine.polls >= 2
    assert found.tokens >= 6
    assert found.seconds >= found.idle >= 0
    assert "poll" not in vars(engine)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 1), (1e9, 2)])
def test_rounds_begin_until_the_time_is_over_and_each_play_is_printed(seconds, rounds, capsys):
    renderer = renderer_of("qwen2_5_vl")
    options = argparse.Namespace(episodes=2, turns=2, turn_tokens=4, latency=0.001, rounds=2, seconds=seconds)
    found = environment_latency.measured(RandomEngine(renderer), renderer, options)
    assert [len(played) for played in found.values()] == [rounds, rounds]
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("0 ms a step: 2 episodes, 2 turns, ")  # the short play before
    assert [line.partition(":")[0] for line in lines] == ["0 ms a step", "1 ms a step"] * rounds


def test_the_table_of_latencies_says_whether_the_target_is_met():
    rounds = {0.0: [environment_latency.Played(seconds=each) for each in (1.0, 9.0, 2.0)]}
    assert "1.100 times as long: less than 15% more" in environment_latency.table(
        rounds | {0.1: [environment_latency.Played(seconds=2.2)]}
    )
    assert "NOT less" in environment_latency.table(rounds | {0.1: [environment_latency.Played(seconds=2.4)]})


@pytest.mark.parametrize("place", range(4))
def test_the_tools_of_trl_are_the_walk(place):
    row, moves = WalkRows()[place], ["up", "left", "down", "down", "right", "right", "down", "left", "up"]
    tools, walk, reward, done = WalkTools(), GridWalk(), 0.0, False
    assert tools.reset(**row)[0]["image"].tobytes() == walk.reset(row, 0).content[0].tobytes()
    for move in moves:
        (shown,) = getattr(tools, move)()
        if not done:
            step = walk.step(move)
            reward, done = reward + step.reward, step.done
            assert shown["image"].tobytes() == step.content[0].tobytes()
    assert tools.get_reward() == pytest.approx(reward)


def test_words_are_read_as_calls():
    tokenizer = renderer_of("qwen2_5_vl").builder.tokenizer
    parse = parser(tokenizer)
    (call,) = parse(tokenizer(" Down there")["input_ids"])["tool_calls"]
    assert call["function"] == {"name": "down", "arguments": {}}
    assert parse(tokenizer("Nowhere")["input_ids"]) == {"role": "assistant", "content": "Nowhere"}


def test_the_table_of_runs_has_medians_of_the_seeds_that_reached_the_target():
    def rows(*accuracies):
        return [
            {"step": 5 * n, "seconds": 10.0 * n, "processor": 8.0 * n, "accuracy": each}
            for n, each in enumerate(accuracies)
        ]

    text = walk_beside_trl.table({"walk": [rows(0.1, 0.95), rows(0.1, 0.5, 0.9), rows(0.2, 0.3)]}, 0.9)
    assert text.splitlines()[-1] == "| walk | 2 of 3 | 8 | 15 | 12 | 2.00 |"
