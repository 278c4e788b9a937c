"""Samples of adapters by vLLM against Hugging Face's forward, and against the Hugging Face engine."""

import logging

import numpy as np
import pytest
import torch

from dataproto.chunks import EncodedTextChunk
from dataproto_server.backend import Datum, Failure, SampleRequest, Sampling, Snapshot
from dataproto_server.config import EngineOptions
from dataproto_server.engine import InProcessEngine
from helpers.checkpoints import write_checkpoint
from helpers.served_models import (
    BASE,
    chunks,
    hugging_face_logprobs,
    length,
    new_model,
    random_inputs,
    sample,
    train,
    until_done,
)

pytestmark = pytest.mark.vllm

OPTIONS = {"max_lora_rank": 16, "max_context_length": 400, "max_num_seqs": 16, "max_samplers": 1}
RANKS = {"small": 4, "large": 16}
SNAPSHOTS: dict[str, Snapshot] = {}
"""By the names of `RANKS`, and "base"; filled by `served`."""


@pytest.fixture(scope="module")
def lines():
    """What the engine writes to the server's log."""
    log, handler, found = logging.getLogger("dataproto.serve.engine"), logging.Handler(), []
    handler.emit = found.append
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    yield found
    log.setLevel(before)
    log.removeHandler(handler)


@pytest.fixture(scope="module")
def served(lines, tmp_path_factory):
    """Engines that sample with vLLM and with Hugging Face, with the same two adapters and the base.

    vLLM has room for one adapter at a time, and so has the engine: the others are read again.
    """
    directory = tmp_path_factory.mktemp("vllm")
    path = write_checkpoint("qwen2_5_vl", directory / "model")
    engines = {
        name: InProcessEngine(
            {"tiny": path}, EngineOptions(sampler=name, vllm_adapters=1, **OPTIONS), torch.device("cpu")
        )
        for name in ("vllm", "hf")
    }
    prompt = chunks(engines["hf"], "Find", (40, 32), " the angle", (16, 24), " x")  # images of unequal size
    for name, rank in RANKS.items():
        new_model(engines["hf"], name, rank, seed=rank)
        data = Datum(prompt, random_inputs(length(engines["hf"], prompt), "cross_entropy", seed=rank))
        train(engines["hf"], name, [data])
        (directory / name).mkdir()
        engines["hf"].export(name, directory / name)
    SNAPSHOTS.update({name: Snapshot("tiny", directory / name) for name in RANKS}, base=BASE)
    return engines["vllm"], engines["hf"], path, prompt, directory


def test_the_log_has_the_seconds_of_the_start(served, lines):
    engine, _, path, *_ = served
    assert engine.base("tiny").sampler is not None  # starts at its first use
    said = [line.getMessage() for line in lines if "vLLM" in line.getMessage()]
    assert len(said) == 2
    assert said[0] == f"vLLM starts on {path}"
    assert said[1].startswith("vLLM has started in ")


def test_sampled_log_probs_are_those_of_a_forward_pass(served):
    """Of two adapters with a head, and of the base, in flight together. Within 1e-4."""
    engine, other, path, prompt, directory = served
    tokens = length(other, prompt)
    for each in (engine, other):
        for name in (*RANKS, "base"):
            each.submit(SampleRequest(name, SNAPSHOTS[name], prompt, 2, Sampling(max_tokens=5, seed=7, stop=[])))
    found, expected = (until_done(each, 3) for each in (engine, other))
    assert found.keys() == {*RANKS, "base"}
    for name, result in found.items():
        for one, theirs in zip(result.samples, expected[name].samples, strict=True):
            assert one.tokens.tolist() == theirs.tokens.tolist()
            whole = [*prompt, EncodedTextChunk(one.tokens.tolist())]
            adapter = directory / name if name in RANKS else None
            after = hugging_face_logprobs(path, whole, other, adapter)[tokens - 1 : -1]
            log_probs = after.gather(1, torch.from_numpy(one.tokens).long()[:, None])[:, 0]
            np.testing.assert_allclose(one.logprobs, log_probs, atol=1e-4, rtol=0)


def test_prompts_are_scored_as_by_the_other_engine(served):
    engine, other, _, prompt, _ = served
    count = length(other, prompt)
    wanted = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
    targets = np.arange(2 * (count - 1)).reshape(-1, 2)
    one, theirs = (
        sample(each, SNAPSHOTS["large"], prompt, sampling={"max_tokens": 1}, target_prompt_logprobs=targets, **wanted)
        for each in (engine, other)
    )
    np.testing.assert_allclose(one.prompt_logprobs, theirs.prompt_logprobs, atol=1e-4, rtol=0)
    np.testing.assert_allclose(one.target_prompt_logprobs, theirs.target_prompt_logprobs, atol=1e-4, rtol=0)
    for found, expected in (
        (one.topk_prompt_logprobs, theirs.topk_prompt_logprobs),
        (one.samples[0].topk, theirs.samples[0].topk),
    ):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], atol=1e-4, rtol=0)


def test_stops_and_greedy_answers_are_those_of_the_other_engine(served):
    engine, other, _, prompt, _ = served
    free = sample(other, SNAPSHOTS["small"], prompt, sampling={"max_tokens": 20, "stop": []}).samples[0].tokens
    text = other.base("tiny").renderer.builder.tokenizer.decode(free[6:8])
    for options in ({"stop": text}, {"stop": [int(free[4])]}, {"stop": []}, {"temperature": 0.0}):
        found, expected = (
            sample(each, SNAPSHOTS["small"], prompt, count=2, sampling={"max_tokens": 20, **options}).samples
            for each in (engine, other)
        )
        assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in expected]
        assert [one.stop_reason for one in found] == [one.stop_reason for one in expected]


def test_a_prefix_that_vllm_keeps_belongs_to_one_adapter(served, monkeypatch):
    """A prompt of several of its blocks, with images, is read once for each adapter and once for the base."""
    engine, other, *_ = served
    vllm = engine.base("tiny").sampler
    block, poll = vllm.engine.vllm_config.cache_config.block_size, vllm.poll
    parts = chunks(other, "a long way to go " * (2 * block // 17 + 1), (40, 32), " x")
    assert 2 * block < length(other, parts) < 390
    kept: list[int] = []

    def noted():
        done = poll()
        kept.extend(each.cached_tokens for each in done)
        return done

    monkeypatch.setattr(vllm, "poll", noted)
    for name in [each for each in (*RANKS, "base") for _ in range(2)]:
        found, expected = (
            sample(each, SNAPSHOTS[name], parts, sampling={"max_tokens": 4, "seed": 3, "stop": []}).samples[0]
            for each in (engine, other)
        )
        assert found.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)
    assert kept[::2] == [0, 0, 0]
    assert min(kept[1::2]) >= 2 * block


def test_requests_are_aborted_and_mistakes_named(served):
    engine, _, _, prompt, _ = served
    for name in ("a", "b"):
        engine.submit(SampleRequest(name, SNAPSHOTS["small"], prompt, 2, Sampling(3, stop=[])))
    engine.abort(["a"])
    assert list(until_done(engine, 1)) == ["b"]
    engine.submit(SampleRequest("long", SNAPSHOTS["small"], prompt, 1, Sampling(500)))
    ((name, failed),) = until_done(engine, 1).items()
    assert name == "long"
    assert isinstance(failed, Failure)
    assert "exceed the model's context of 400 tokens" in failed.message
    assert engine.poll() == {}
