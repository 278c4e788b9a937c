"""Episodes on vLLM: the tokens of the Hugging Face engine, in float32, with images in several turns."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS
from helpers.engines import start
from helpers.episodes import DrawnEnvironment, play_episodes, prompts_of, starts_of
from rollout.continuation import Tokens, WholeGroups, decode_groups
from rollout.engine import SamplingParams
from rollout.environments import Episode, EpisodeLimits, TurnRenderer
from rollout.environments.episode_loop import EnvironmentRun
from rollout.environments.episode_rows import episode_columns
from rollout.environments.held_episodes import Decoding
from rollout.hf import HFEngine

pytestmark = pytest.mark.vllm

SAMPLING = SamplingParams(temperature=0.8, max_tokens=6, stop_token_ids=tuple(range(0, 250, 3)))
LIMITS = EpisodeLimits(turns=3, tokens=300)


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)])
def setup(request, tmp_path_factory):
    return start(request.param, tmp_path_factory.mktemp("engines"), max_images=16, max_model_len=640)


@pytest.mark.parametrize("last_pictures", [None, 1])
def test_episodes_have_the_same_tokens_on_both_engines(setup, last_pictures):
    renderer = TurnRenderer(setup.builder)
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


def test_pictures_of_episodes_are_not_digested_again_for_vllm(setup, monkeypatch):
    def digested(image):
        raise AssertionError("a picture whose key is known")

    monkeypatch.setattr("rollout.vllm.prompt_rendering.image_key", digested)
    played = play_episodes(setup.vllm, TurnRenderer(setup.builder), starts_of(6), DrawnEnvironment, SAMPLING, LIMITS)
    assert {episode.ended for episode in played} <= {"done", "turns", "tokens", "length"}
    keys = [episode.request.image_keys for episode in played]
    assert [len(each) for each in keys] == [len(each.request.multi_modal_data["image"]) for each in played]
    assert len({key for each in keys for key in each}) > 1


def test_episodes_that_are_stopped_go_on_with_the_same_tokens(setup):
    """One group at a time, with the environments that are there and with new ones that repeat the actions."""
    renderer = TurnRenderer(setup.builder)
    expected = play_episodes(setup.vllm, renderer, starts_of(6), DrawnEnvironment, SAMPLING, LIMITS)
    names = [str(number) for number in range(6)]
    for repeat in (False, True):
        episodes = [Episode(start, name) for start, name in zip(starts_of(6), names, strict=True)]
        with ExitStack() as stack:
            run = EnvironmentRun(DrawnEnvironment, LIMITS)
            stack.callback(run.close)
            for wanted in range(1, 7):
                left = [number for number in range(6) if not episodes[number].ended]
                if repeat:
                    run = EnvironmentRun(DrawnEnvironment, LIMITS)
                    stack.callback(run.close)
                    for number in left:
                        before = episodes[number]
                        episodes[number] = Episode(before.start, before.name, repeated=before.begun)
                groups = WholeGroups([names[number] for number in left], wanted - (6 - len(left)))
                playing = [episodes[number] for number in left]
                run.advance(playing, Decoding(setup.vllm, renderer, SAMPLING, groups, wanted))
        for one, other in zip(episodes, expected, strict=True):
            assert one.ended == other.ended
            assert [turn.token_ids for turn in one.turns] == [turn.token_ids for turn in other.turns]
            assert [turn.reward for turn in one.turns] == [turn.reward for turn in other.turns]
        assert any(len(set(turn.weight_versions)) > 1 for each in episodes for turn in each.turns)


@pytest.mark.long
def test_experts_of_episodes_are_those_of_the_hf_engine(tmp_path):
    """Over turns, most of whose tokens vLLM finds in its cache, and over interruptions."""
    setup = start("qwen3_vl_moe", tmp_path, max_images=16, max_model_len=640, routed_experts=True)
    hf = HFEngine(str(tmp_path / "actor"), device=torch.device("cpu"), routed_experts=True)
    assert torch.equal(hf.no_experts, setup.vllm.no_experts)
    renderer = TurnRenderer(setup.builder)
    ours, theirs = (
        play_episodes(engine, renderer, starts_of(6), DrawnEnvironment, SAMPLING, LIMITS) for engine in (setup.vllm, hf)
    )
    assert any(len(episode.turns) > 1 for episode in theirs)
    prompts = prompts_of(setup.builder, 6)
    found, expected = (episode_columns(prompts, each, renderer, 300, hf.no_experts) for each in (ours, theirs))
    assert torch.equal(found["responses"], expected["responses"])
    for name in (PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS):
        assert torch.equal(found[name].lengths, expected[name].lengths)
        assert torch.equal(found[name].values.sort(-1).values, expected[name].values.sort(-1).values), name

    sampling = replace(SAMPLING, stop_token_ids=(), ignore_eos=True)
    requests = [episode.rows[0].begins for episode in theirs]
    numbers = [setup.vllm.submit(request, sampling) for request in requests]
    for _ in range(4):
        setup.vllm.poll()
    begun = [Tokens.of(setup.vllm.abort(number), 1) for number in numbers]
    assert all(0 < len(tokens) < 6 and tokens.experts is not None for tokens in begun)
    setup.vllm.load_weights(setup.actor.named_weights())  # the same ones; all caches are cleared
    everyone = WholeGroups([str(number) for number in range(6)], 6)
    rest = decode_groups(setup.vllm, requests, begun, sampling, everyone, setup.builder.family, 2)
    for number, completion in enumerate(sorted(hf.generate(requests, sampling), key=lambda each: each.request)):
        tokens, _ = rest[number]
        assert tokens.token_ids == completion.token_ids
        assert torch.equal(tokens.experts.sort(-1).values, completion.routed_experts.sort(-1).values)
