"""Episodes on vLLM: the tokens of the Hugging Face engine, in float32, with images in several turns."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from helpers.engines import start
from helpers.episodes import DrawnEnvironment, starts_of
from rollout.carried_samples import WholeGroups
from rollout.engine import SamplingParams
from rollout.environments import Episode, EpisodeLimits, TurnRenderer, play_episodes
from rollout.environments.environment_host import EnvironmentHost
from rollout.environments.episodes import go_on

pytestmark = pytest.mark.vllm

SAMPLING = SamplingParams(temperature=0.8, max_tokens=6, stop_token_ids=tuple(range(0, 250, 3)))
LIMITS = EpisodeLimits(turns=3, tokens=300)


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)])
def setup(request, tmp_path_factory):
    return start(request.param, tmp_path_factory.mktemp("engines"), max_images=16, max_model_len=640)


@pytest.mark.parametrize("last_pictures", [None, 1])
def test_episodes_have_the_same_tokens_on_both_engines(setup, last_pictures):
    renderer = TurnRenderer(setup.builder, [setup.builder.tokenizer.eos_token_id])
    setup.hf.load_weights(setup.actor.named_weights())
    hf, vllm = (
        play_episodes(
            engine, renderer, starts_of(6), DrawnEnvironment, SAMPLING, replace(LIMITS, last_pictures=last_pictures)
        )
        for engine in (setup.hf, setup.vllm)
    )
    assert sum(len(episode.turns) for episode in hf) > 8
    if last_pictures is None:
        assert any(len(episode.request.multi_modal_inputs) > 1 for episode in hf)
    else:
        assert any(len(episode.rows) > 1 for episode in hf)
    for one, other in zip(hf, vllm, strict=True):
        assert one.ended == other.ended
        assert [turn.token_ids for turn in one.turns] == [turn.token_ids for turn in other.turns]
        for a, b in zip(one.turns, other.turns, strict=True):
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)


def test_episodes_that_are_stopped_go_on_with_the_same_tokens(setup):
    """One group at a time, with the environments that are there and with new ones that repeat the actions."""
    renderer = TurnRenderer(setup.builder, [setup.builder.tokenizer.eos_token_id])
    expected = play_episodes(setup.vllm, renderer, starts_of(6), DrawnEnvironment, SAMPLING, LIMITS)
    names = [str(number) for number in range(6)]
    for repeat in (False, True):
        episodes = [Episode(start) for start in starts_of(6)]
        with ExitStack() as stack:
            host = stack.enter_context(EnvironmentHost(DrawnEnvironment, 60.0))
            for wanted in range(1, 7):
                left = [number for number in range(6) if not episodes[number].ended]
                if repeat:
                    host = stack.enter_context(EnvironmentHost(DrawnEnvironment, 60.0))
                    for number in left:
                        episodes[number] = Episode(episodes[number].start, repeated=episodes[number].begun)
                groups = WholeGroups([names[number] for number in left], wanted - (6 - len(left)))
                some = [replace(episodes[number].start, trajectory=names[number]) for number in left]
                for number, start in zip(left, some, strict=True):
                    episodes[number].start = start
                playing = [episodes[number] for number in left]
                go_on(setup.vllm, renderer, playing, host, SAMPLING, LIMITS, groups, wanted)
        for one, other in zip(episodes, expected, strict=True):
            assert one.ended == other.ended
            assert [turn.token_ids for turn in one.turns] == [turn.token_ids for turn in other.turns]
            assert [turn.reward for turn in one.turns] == [turn.reward for turn in other.turns]
        assert any(len(set(turn.weight_versions)) > 1 for each in episodes for turn in each.turns)
