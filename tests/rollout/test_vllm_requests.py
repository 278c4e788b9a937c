"""Requests that join, leave and continue each other in vLLM, against the Hugging Face engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dataproto.errors import InvalidConfig, InvalidPrompt, NonFiniteLogits
from helpers.engines import picture, start
from helpers.turns import finish, observed_turn
from rollout.engine import SamplingParams
from rollout.responses import build_requests

pytestmark = pytest.mark.vllm

BLOCK = 32
SAMPLED = SamplingParams(temperature=0.8, max_tokens=8, seed=1)
SEEN = [
    {"prompt": "then <image>", "images": [picture(40, 24, 5)]},
    {"prompt": "words alone", "images": []},
    {"prompt": "<image>", "images": [picture(24, 40, 0)]},  # seen before
    {"prompt": "<image> and <image>", "images": [picture(30, 30, 6), picture(16, 60, 7)]},
]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return start("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"), max_images=6, block_size=BLOCK)


def requests_of(setup):
    return build_requests(setup.prompts, SAMPLED)


def run(engine, request, sampling=SAMPLED):
    return finish(engine, engine.submit(request, sampling))[0]


def assert_same(found, expected):
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=3e-5)


def test_requests_that_join_between_tokens_sample_what_hf_samples(setup):
    requests = requests_of(setup)
    settings = [
        SAMPLED,
        replace(SAMPLED, temperature=0, ignore_eos=True),
        replace(SAMPLED, top_p=0.8, top_k=20, max_tokens=5),
        replace(SAMPLED, min_p=0.3, temperature=1.2),
    ]
    numbers, done = [], {}
    for request, sampling in zip(requests, settings, strict=True):
        numbers.append(setup.vllm.submit(request, sampling))
        for _ in range(2):
            done |= {each.request: each for each in setup.vllm.poll()}
    while setup.vllm.unfinished:
        done |= {each.request: each for each in setup.vllm.poll()}
    for number, request, sampling in zip(numbers, requests, settings, strict=True):
        assert_same(done[number], run(setup.hf, request, sampling))
    assert setup.vllm.sampler.slots == {}


def test_a_turn_goes_on_from_the_cache_of_the_one_before(setup):
    """Of the turn before, all blocks that it filled are taken from the cache."""
    requests = requests_of(setup)
    numbers = [setup.vllm.submit(request, SAMPLED, keep=True) for request in requests]
    done = finish(setup.vllm, *numbers)
    for turn in (1, 2):
        known = [len(request.input_ids) + len(each.token_ids) for request, each in zip(requests, done, strict=True)]
        requests = [
            observed_turn(setup.builder, request, each, SEEN[row - turn], turn)
            for row, (request, each) in enumerate(zip(requests, done, strict=True))
        ]
        later = [setup.vllm.fork(*pair, SAMPLED, keep=True) for pair in zip(numbers, requests, strict=True)]
        done = finish(setup.vllm, *later)
        assert [each.cached_tokens for each in done] == [(length - 1) // BLOCK * BLOCK for length in known]
        for number, request, found in zip(numbers, requests, done, strict=True):
            assert setup.vllm.abort(number) is None
            assert_same(found, run(setup.hf, request))
        numbers = later
    for number in numbers:
        setup.vllm.abort(number)
    with pytest.raises(InvalidConfig, match="cannot be continued"):
        setup.vllm.fork(numbers[0], requests[0], SAMPLED)


def test_a_prompt_that_does_not_begin_with_the_turn_before_is_refused(setup):
    request = requests_of(setup)[0]
    number = setup.vllm.submit(request, SAMPLED, keep=True)
    (done,) = finish(setup.vllm, number)
    later = observed_turn(setup.builder, request, done, SEEN[0])
    ids = later.input_ids.clone()
    ids[len(request.input_ids)] += 1
    with pytest.raises(InvalidPrompt, match=f"differs from token {len(request.input_ids)} on"):
        setup.vllm.fork(number, replace(later, input_ids=ids), SAMPLED)
    setup.vllm.abort(number)
    with pytest.raises(InvalidPrompt, match=r"request \d+ \(uid .*exceed max_model_len"):
        setup.vllm.submit(request, replace(SAMPLED, max_tokens=400))
    assert setup.vllm.unfinished == 0


def test_requests_go_on_after_an_abort_and_after_new_weights(setup):
    requests = requests_of(setup)
    expected = [run(setup.vllm, request) for request in requests]
    numbers = [setup.vllm.submit(request, SAMPLED) for request in requests]
    done = {each.request: each for _ in range(2) for each in setup.vllm.poll()}
    partial = setup.vllm.abort(numbers[0])
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) < 8
    running = [number for number in numbers[1:] if number not in done]
    assert running
    setup.vllm.load_weights(setup.hf.model.named_parameters())
    done |= dict(zip(running, finish(setup.vllm, *running), strict=True))
    for number, whole in zip(numbers[1:], expected[1:], strict=True):
        assert_same(done[number], whole)
    count = len(partial.token_ids)
    ids = torch.cat([requests[0].input_ids, torch.tensor(partial.token_ids)])
    rest = replace(requests[0], prompt_ids=[*requests[0].prompt_ids, *partial.token_ids], input_ids=ids, drawn=count)
    found = run(setup.vllm, rest, replace(SAMPLED, max_tokens=8 - count))
    assert partial.token_ids + found.token_ids == expected[0].token_ids
    np.testing.assert_allclose(partial.log_probs + found.log_probs, expected[0].log_probs, atol=2e-5)


def test_stop_texts_end_responses_as_in_hf(setup):
    request, decode = requests_of(setup)[1], setup.builder.tokenizer.decode
    long = replace(SAMPLED, max_tokens=30, temperature=1.5)
    tokens = [run(setup.hf, replace(request, seed=seed), long).token_ids for seed in range(9)]
    seed, text = next(
        (seed, text)
        for seed, whole in enumerate(tokens)
        for place in range(3, len(whole) - 1)
        if "\ufffd" not in (text := decode(whole[place : place + 2]))
    )
    request, whole = replace(request, seed=seed), tokens[seed]
    sampling = replace(long, stop=("no such text", text))
    found = run(setup.vllm, request, sampling)
    assert_same(found, run(setup.hf, request, sampling))
    assert found.finish_reason == "stop"
    assert found.token_ids == whole[: len(found.token_ids)]
    at_the_end = replace(sampling, max_tokens=len(found.token_ids))
    assert run(setup.vllm, request, at_the_end).finish_reason == "stop"


def test_likeliest_tokens_are_those_of_hf(setup):
    common = replace(SAMPLED, top_log_probs=2)
    requests = requests_of(setup)
    settings = [common, SAMPLED, replace(common, temperature=1.0), replace(common, temperature=0)]
    numbers = [setup.vllm.submit(*pair) for pair in zip(requests, settings, strict=True)]
    for found, request, sampling in zip(finish(setup.vllm, *numbers), requests, settings, strict=True):
        expected = run(setup.hf, request, sampling)
        assert_same(found, expected)
        assert (found.top_log_probs is None) == (expected.top_log_probs is None)
        for one, two in zip(found.top_log_probs or [], expected.top_log_probs or [], strict=True):
            assert [token for token, _ in one] == [token for token, _ in two]
            np.testing.assert_allclose([value for _, value in one], [value for _, value in two], atol=3e-5)


def test_a_request_that_fails_leaves_the_others_alone(setup):
    good = requests_of(setup)[1]  # without an image
    weights = dict(setup.hf.model.named_parameters())
    setup.vllm.load_weights((name, weight * (torch.nan if "visual" in name else 1)) for name, weight in weights.items())
    numbers = [setup.vllm.submit(request, SAMPLED) for request in (requests_of(setup)[0], good)]
    broken, found = finish(setup.vllm, *numbers)
    setup.vllm.load_weights(weights.items())
    assert broken.finish_reason == "error"
    assert isinstance(broken.error, NonFiniteLogits)
    assert f"request {numbers[0]} (uid" in str(broken.error)
    assert_same(found, run(setup.hf, good))
