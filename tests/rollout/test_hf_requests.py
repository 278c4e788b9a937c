"""Requests that join, leave and continue each other in the Hugging Face engine."""

import pickle
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dataproto.columns import media_parts
from dataproto.errors import InvalidConfig, InvalidPrompt, MediaMismatch, NonFiniteLogits
from helpers.batches import prompt_batch
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import EACH_TYPE, MODEL_TYPES, forward_inputs, tiny_model
from helpers.turns import finish, next_turn
from rollout.engine import Request, SamplingParams
from rollout.hf import HFEngine
from rollout.hf.batch import Batch
from rollout.hf.requests import OpenRequest
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses, build_requests

CPU = torch.device("cpu")
SAMPLED = SamplingParams(temperature=0.8, max_tokens=6, seed=1)


def engine_of(model_type, tmp_path_factory):
    path = tmp_path_factory.mktemp(model_type)
    tiny_model(model_type).save_pretrained(path)
    return HFEngine(str(path), device=CPU)


@pytest.fixture(scope="module", params=EACH_TYPE)
def any_engine(request, tmp_path_factory):
    return engine_of(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return engine_of("qwen2_5_vl", tmp_path_factory)


def requests_of(engine, sampling=SAMPLED):
    prompts = prompt_batch(engine.model.config, [[(4, 6), (8, 4)], [(6, 6)], []], texts=[4, 7, 3])
    return build_requests(prompts, sampling)


def run(engine, request, sampling=SAMPLED, keep=False):
    number = engine.submit(request, sampling, keep)
    return number, *finish(engine, number)


def assert_same(found, expected):
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=2e-5)


def test_requests_that_join_between_tokens_sample_what_they_would_alone(any_engine):
    requests = requests_of(any_engine)
    alone = [run(any_engine, request)[1] for request in requests]
    numbers, done = [], {}
    for request in requests:
        numbers.append(any_engine.submit(request, SAMPLED))
        for _ in range(2):
            done |= {each.request: each for each in any_engine.poll()}
    assert len(any_engine._batches) == 1
    while any_engine.unfinished:
        done |= {each.request: each for each in any_engine.poll()}
    for number, expected in zip(numbers, alone, strict=True):
        assert_same(done[number], expected)
    assert any_engine.poll() == []


@contextmanager
def read_sizes(engine):
    """Tokens, with padding, of each forward of the language model that reads more than the next token of its rows."""
    sizes = []

    def note(module, args, kwargs):
        rows, length = kwargs["inputs_embeds"].shape[:2]
        if length > 1 or rows == 1:
            sizes.append(rows * length)

    hook = engine.model.get_submodule(engine.family.language_model).register_forward_pre_hook(note, with_kwargs=True)
    yield sizes
    hook.remove()


def test_requests_of_one_tensor_with_other_pictures_are_read_apart(engine):
    request, *_ = requests_of(engine)
    (part,) = media_parts(request.multi_modal_inputs)
    other = replace(request, multi_modal_inputs=part | {"pixel_values": part["pixel_values"].flip(0)})
    expected = [run(engine, each)[1] for each in (request, other)]
    assert expected[0].log_probs != expected[1].log_probs
    numbers, done = [engine.submit(each, SAMPLED) for each in (request, other)], {}
    while engine.unfinished:
        done |= {each.request: each for each in engine.poll()}
    for number, alone in zip(numbers, expected, strict=True):
        assert_same(done[number], alone)


@pytest.mark.parametrize(
    "any_engine",
    [
        each if each in ("qwen3_vl", "qwen3_5") else pytest.param(each, marks=pytest.mark.long)  # deep features, states
        for each in MODEL_TYPES
    ],
    indirect=True,
)
def test_prompts_are_read_under_the_token_budget(any_engine, monkeypatch):
    sampling, budget = replace(SAMPLED, n=2, max_tokens=3), 7
    requests = requests_of(any_engine, sampling)
    longest = max(len(request.input_ids) for request in requests)
    with read_sizes(any_engine) as sizes:
        whole = {each.request: each for each in any_engine.generate(requests, sampling)}
    assert sizes[0] == 3 * longest > budget  # three distinct prompts with padding
    monkeypatch.setattr(any_engine, "_decoder", replace(any_engine._decoder, token_budget=budget))
    with read_sizes(any_engine) as sizes:
        found = {each.request: each for each in any_engine.generate(requests, sampling)}
    pieces = [min(7, longest - start) for start in range(0, longest, 7)]
    largest = budget
    if any_engine.model.config.model_type == "gemma4":  # images of 6, 8 and 9 tokens, which see each other, are not cut
        pieces, largest = [3, 7, 1, 8, 3], 9
    assert max(sizes) == largest
    assert sizes[: len(pieces)] == pieces
    for number, expected in whole.items():
        assert_same(found[number], expected)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (80, [[5, 5, 9, 20, 7]]),  # four distinct prompts, padded to 20 tokens
        (79, [[20, 9, 7], [5, 5]]),
        (40, [[20, 9], [7, 5, 5]]),
        (20, [[20], [9, 7], [5, 5]]),
        (8, [[20], [9], [7], [5, 5]]),
    ],
)
def test_prompts_of_about_the_same_length_are_read_together(engine, budget, expected):
    prompts = {length: torch.zeros(length, dtype=torch.int64) for length in (5, 9, 20, 7)}
    rows = [
        OpenRequest(0, "", Request((), prompts[length], prompts[length], prompts[length]), SAMPLED, False)
        for length in (5, 5, 9, 20, 7)
    ]
    groups = replace(engine._decoder, token_budget=budget).groups(rows)
    assert [[row.unread_tokens for row in group] for group in groups] == expected


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)])
def test_a_long_video_is_read_in_parts(model_type, tmp_path):
    checkpoint = write_checkpoint(model_type, tmp_path)
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=1000)
    frames = np.random.default_rng(0).integers(0, 256, (60, 16, 24, 3), dtype=np.uint8)
    rows = [{"prompt": "What <video> moves?", "videos": [frames]}, {"prompt": "no video"}, {"prompt": "none"}]
    requests, sizes, completions = build_requests(builder(rows), SAMPLED), {}, {}
    for budget in (1 << 14, 64):
        engine = HFEngine(checkpoint, device=CPU, token_budget=budget)
        with read_sizes(engine) as sizes[budget]:
            completions[budget] = {each.request: each for each in engine.generate(requests, SAMPLED)}
    assert max(sizes[1 << 14]) == 3 * len(requests[0].input_ids) > 600
    assert max(sizes[64]) == 64
    for number, expected in completions[1 << 14].items():
        assert_same(completions[64][number], expected)
    with pytest.raises(InvalidConfig, match="token_budget=0: must be at least 1"):
        HFEngine(checkpoint, device=CPU, token_budget=0)


def test_a_turn_reads_only_what_is_new_and_samples_what_a_whole_prompt_would(any_engine):
    """Two turns with images in some rows; rows of unequal length continue together."""
    engine, requests = any_engine, requests_of(any_engine)
    before = [run(engine, request, keep=True) for request in requests]
    words, grids = [[5, 6, 7], [8], [9, 10]], [[(4, 4)], [], [(6, 4), (4, 4)]]
    for turn in (1, 2):
        requests = [
            next_turn(engine.model.config, request, done, words[row], *grids[row - turn], turn=turn)
            for row, (request, (_, done)) in enumerate(zip(requests, before, strict=True))
        ]
        read = engine.prefilled_tokens
        pairs = list(zip(before, requests, strict=True))
        numbers = [engine.fork(number, request, SAMPLED, keep=True) for (number, _), request in pairs]
        found = finish(engine, *numbers)
        lengths = [len(request.input_ids) for request in requests]
        assert engine.prefilled_tokens - read == sum(lengths) - sum(each.cached_tokens for each in found)
        for (number, _), request, completion in zip(before, requests, found, strict=True):
            engine.abort(number)
            read = engine.prefilled_tokens
            _, expected = run(engine, request)
            assert expected.cached_tokens == 0
            assert completion.cached_tokens > len(request.input_ids) // 3
            assert engine.prefilled_tokens - read == len(request.input_ids)
            assert_same(completion, expected)
        before = list(zip(numbers, found, strict=True))
    for number, _ in before:
        engine.abort(number)
    assert engine._kept.bytes == 0


def test_cached_tokens_by_hand(engine):
    request = requests_of(engine)[2]  # three tokens of text
    number, first = run(engine, request, keep=True)
    later = next_turn(engine.model.config, request, first, [5, 6])
    read = engine.prefilled_tokens
    (done,) = finish(engine, engine.fork(number, later, SAMPLED))
    assert done.cached_tokens == 3 + len(first.token_ids) - 1  # the last sampled token was never read
    assert engine.prefilled_tokens - read == 1 + 2
    engine.abort(number)


def test_a_finished_request_can_be_continued_in_several_ways(engine):
    request = requests_of(engine)[1]
    number, first = run(engine, request, keep=True)
    ways = [next_turn(engine.model.config, request, first, [word, 6]) for word in (5, 7)]
    numbers = [engine.fork(number, way, SAMPLED) for way in ways]
    engine.abort(number)  # what waits has what it needs
    for found, way in zip(finish(engine, *numbers), ways, strict=True):
        assert found.cached_tokens
        assert_same(found, run(engine, way)[1])
    with pytest.raises(InvalidConfig, match=f"request {number} cannot be continued"):
        engine.fork(number, ways[0], SAMPLED)


def test_a_prompt_that_does_not_begin_with_the_turn_before_is_refused(engine):
    request = requests_of(engine)[1]
    number, first = run(engine, request, keep=True)
    later = next_turn(engine.model.config, request, first, [5, 6], (4, 4))
    ids = later.input_ids.clone()
    ids[2] += 1
    with pytest.raises(InvalidPrompt, match="differs from token 2 on"):
        engine.fork(number, replace(later, input_ids=ids), SAMPLED)
    with pytest.raises(InvalidPrompt, match="media do not begin"):
        engine.fork(number, replace(later, multi_modal_inputs=later.multi_modal_inputs[1:]), SAMPLED)
    engine.abort(number)
    assert engine.unfinished == 0


def test_a_cache_that_was_dropped_is_computed_again(engine, monkeypatch):
    request = requests_of(engine)[0]
    number, first = run(engine, request, keep=True)
    later = next_turn(engine.model.config, request, first, [5, 6], (4, 4))
    (expected,) = finish(engine, engine.fork(number, later, SAMPLED))
    engine.load_weights([(name, weight.clone()) for name, weight in engine.model.named_parameters()])
    (after_weights,) = finish(engine, engine.fork(number, later, SAMPLED))
    engine.abort(number)
    monkeypatch.setattr(engine._kept, "max_bytes", 1)
    number, _ = run(engine, request, keep=True)
    (without_room,) = finish(engine, engine.fork(number, later, SAMPLED))
    engine.abort(number)
    assert expected.cached_tokens
    for found in (after_weights, without_room):
        assert found.cached_tokens == 0
        assert_same(found, expected)


def test_caches_that_cannot_grow_run_beside_each_other(engine, monkeypatch):
    requests = requests_of(engine)
    alone = [run(engine, request)[1] for request in requests]
    monkeypatch.setattr(Batch, "can_grow", property(lambda batch: False))
    numbers = []
    for request in requests:
        numbers.append(engine.submit(request, SAMPLED, keep=True))
        engine.poll()
    assert len(engine._batches) == 3
    for found, expected in zip(finish(engine, *numbers), alone, strict=True):
        assert_same(found, expected)
    later = next_turn(engine.model.config, requests[0], alone[0], [5])
    (found,) = finish(engine, engine.fork(numbers[0], later, SAMPLED))
    assert found.cached_tokens == 0
    for number in numbers:
        engine.abort(number)


def test_an_aborted_request_goes_on_where_it_was(engine):
    request = requests_of(engine)[0]
    sampling = replace(SAMPLED, max_tokens=6, stop_token_ids=())
    _, whole = run(engine, request, sampling)
    number = engine.submit(request, sampling)
    other = engine.submit(requests_of(engine)[1], sampling)
    for _ in range(2):
        engine.poll()
    partial = engine.abort(number)
    assert partial.finish_reason == "abort"
    assert partial.token_ids == whole.token_ids[:2]
    rest = replace(next_turn(engine.model.config, request, partial, [], turn=0), drawn=2)
    _, found = run(engine, rest, replace(sampling, max_tokens=4))
    assert partial.token_ids + found.token_ids == whole.token_ids
    waiting = engine.submit(request, sampling)
    assert engine.abort(waiting).token_ids == []
    assert engine.abort(waiting) is None
    engine.abort(other)
    assert engine.unfinished == 0


def test_running_requests_go_on_after_new_weights(engine):
    requests = requests_of(engine)
    alone = [run(engine, request)[1] for request in requests]
    numbers = [engine.submit(request, SAMPLED) for request in requests]
    engine.poll()
    engine.poll()
    engine.load_weights([(name, weight.clone()) for name, weight in engine.model.named_parameters()])
    for found, expected in zip(finish(engine, *numbers), alone, strict=True):
        assert_same(found, expected)


def test_each_request_has_its_own_settings(engine):
    settings = [
        SamplingParams(temperature=0, max_tokens=5),
        SamplingParams(temperature=0.7, top_p=0.8, max_tokens=3),
        SamplingParams(temperature=1.3, top_k=9, max_tokens=7),
    ]
    pairs = list(zip(requests_of(engine), settings, strict=True))
    alone = [run(engine, *pair)[1] for pair in pairs]
    together = finish(engine, *(engine.submit(*pair) for pair in pairs))
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected)


def test_a_request_that_fails_leaves_the_others_alone(engine):
    good, broken, _ = requests_of(engine)
    expected = run(engine, good)[1]
    pixels = {
        name: value * torch.nan if "pixel" in name else value for name, value in broken.multi_modal_inputs.items()
    }
    numbers = [
        engine.submit(each, SAMPLED)
        for each in (
            good,
            replace(broken, multi_modal_inputs=pixels),
            replace(broken, input_ids=broken.input_ids.clone(), multi_modal_inputs={}),
        )
    ]
    found, not_finite, without = finish(engine, *numbers)
    assert_same(found, expected)
    assert not_finite.finish_reason == without.finish_reason == "error"
    assert isinstance(not_finite.error, NonFiniteLogits)
    assert f"request {numbers[1]} (uid prompt-1)" in str(not_finite.error)
    assert isinstance(without.error, MediaMismatch)


def test_two_callers_share_an_engine(engine):
    requests = requests_of(engine)
    expected = [each.token_ids for each in engine.generate(requests, SAMPLED)]
    own = engine.submit(requests[0], SAMPLED)
    one, other = engine.generate(requests, SAMPLED), engine.generate(requests, SAMPLED)
    found = [], []
    for _ in requests:
        found[0].append(next(one).token_ids)
        found[1].append(next(other).token_ids)
    assert sorted(found[0]) == sorted(found[1]) == sorted(expected)
    assert finish(engine, own)[0].token_ids in expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls_samples_what_each_request_would_alone(engine, seed, monkeypatch):
    rng, config, base = np.random.default_rng(seed), engine.model.config, requests_of(engine)
    settings = [
        SAMPLED,
        replace(SAMPLED, temperature=0),
        replace(SAMPLED, top_p=0.8, max_tokens=3),
    ]
    running, kept, done, asked = {}, {}, [], 0
    for step in range(80):
        monkeypatch.setattr(engine, "max_num_seqs", int(rng.choice([2, 5, 256])))
        asked, sampling, call = asked + 1, settings[rng.integers(3)], rng.random()
        if call < 0.2:
            request = replace(base[rng.integers(3)], seed=asked)
            running[engine.submit(request, sampling, keep=True)] = request, sampling
        elif call < 0.4 and kept:
            number = rng.choice(list(kept))
            grids = [(4, 4)] * int(rng.integers(3))
            request = replace(next_turn(config, *kept[number], [5, 6], *grids, turn=step), seed=asked)
            running[engine.fork(number, request, sampling, keep=True)] = request, sampling
        elif call < 0.45 and running:
            engine.abort(number := rng.choice(list(running)))
            del running[number]
        elif call < 0.47:
            engine.load_weights([(name, weight.clone()) for name, weight in engine.model.named_parameters()])
        else:
            for found in engine.poll():
                done.append((*running.pop(found.request), found))
                kept[found.request] = done[-1][0], found
                if len(kept) > 4:
                    engine.abort(next(iter(kept)))
                    del kept[next(iter(kept))]
    for number in [*running, *kept]:
        engine.abort(number)
    assert engine.unfinished == engine._kept.bytes == 0
    assert len(done) > 8
    assert any(found.cached_tokens for _, _, found in done)
    for request, sampling, found in done:
        assert_same(found, run(engine, request, sampling)[1])


# What is returned and what ends a response


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """An engine with a tokenizer."""
    return HFEngine(write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model")), device=CPU)


def test_end_tokens_can_be_ignored(engine, monkeypatch):
    request = requests_of(engine)[0]
    whole = run(engine, request)[1].token_ids
    monkeypatch.setattr(engine, "end_ids", (whole[1],))
    assert run(engine, request)[1].finish_reason == "stop"
    ignoring = replace(SAMPLED, ignore_eos=True)
    assert run(engine, request, ignoring)[1].token_ids == whole
    assert run(engine, request, replace(ignoring, stop_token_ids=(whole[2],)))[1].token_ids == whole[:3]


def test_a_stop_text_over_several_tokens_ends_a_response(reader):
    (request,) = build_requests(prompt_batch(reader.model.config, [[]], texts=[5]), SAMPLED)
    long = SamplingParams(temperature=1.5, max_tokens=24, seed=1)
    whole = run(reader, request, long)[1].token_ids
    decode = AutoTokenizer.from_pretrained(reader.model.name_or_path).decode
    text = next(text for place in range(8, 22) if "\ufffd" not in (text := decode(whole[place : place + 2])))
    _, found = run(reader, request, replace(long, stop=("no such text", text)))
    assert found.finish_reason == "stop"
    assert text in decode(found.token_ids)
    assert text not in decode(found.token_ids[:-1])
    assert found.token_ids == whole[: len(found.token_ids)]
    first = SamplingParams(temperature=1.5, max_tokens=len(found.token_ids) - 1, seed=1)
    _, partial = run(reader, request, first)  # the text begins in one part of the response and ends in the next
    rest = replace(next_turn(reader.model.config, request, partial, [], turn=0), drawn=len(partial.token_ids))
    _, end = run(reader, rest, replace(long, stop=(text,)))
    assert partial.token_ids + end.token_ids == found.token_ids


def test_log_probs_and_likeliest_tokens_are_those_of_a_whole_forward(any_engine):
    engine, sampling = any_engine, replace(SAMPLED, top_log_probs=2, max_tokens=4)
    for request in requests_of(engine):
        _, found = run(engine, request, sampling)
        length = len(request.input_ids)
        ids = torch.cat([request.input_ids, torch.tensor(found.token_ids)])[None]
        types = torch.cat([request.token_types, request.token_types.new_zeros(len(found.token_ids))])[None]
        with torch.no_grad():
            logits = engine.model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                **forward_inputs(engine.model, types, request.multi_modal_inputs),
            ).logits[0]
        banned = torch.tensor(engine.banned_ids, dtype=torch.int64)
        expected = (logits / 0.8).index_fill(-1, banned, -1e30).log_softmax(-1)[length - 1 : -1]
        chosen = expected.gather(1, ids[0, length:, None]).squeeze(1)
        np.testing.assert_allclose(found.log_probs, chosen, atol=2e-5)
        values, tokens = expected.topk(2)
        assert [[token for token, _ in each] for each in found.top_log_probs] == tokens.tolist()
        np.testing.assert_allclose([[value for _, value in each] for each in found.top_log_probs], values, atol=2e-5)


def test_what_was_asked_for_besides_tokens_is_in_columns(engine):
    prompts = prompt_batch(engine.model.config, [[(4, 6)], []], texts=[4, 7])
    sampling = SamplingParams(n=2, max_tokens=3, top_log_probs=2)
    done = list(engine.generate(build_requests(prompts, sampling), sampling))
    data = attach_responses(prompts, done, sampling, engine.family, pad_token_id=0)
    data = pickle.loads(pickle.dumps(data, protocol=5))
    for completion in done:
        row = data[completion.request : completion.request + 1]
        assert [list(map(tuple, top)) for top in row["top_log_probs"][0]] == completion.top_log_probs
    plain = attach_responses(prompts, done, SamplingParams(n=2, max_tokens=3), engine.family, pad_token_id=0)
    assert "top_log_probs" not in plain
