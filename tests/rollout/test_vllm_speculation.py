"""Exact-match speculation in vLLM: the tokens of the Hugging Face engine without drafts, in fewer steps."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.engines import GREEDY, RESTRICTED, SAMPLED, generate, start
from rollout.drafts import Drafts
from rollout.engine import SamplingParams, create_engine
from rollout.responses import build_requests

pytestmark = [pytest.mark.vllm, pytest.mark.long]
COPIED = SamplingParams(n=4, temperature=0.1, max_tokens=24, seed=3, ignore_eos=True)


def sharpened(setup):
    """Gives both engines weights that prefer few tokens, so that drafts are found and kept."""
    weights = {name: weight.clone() for name, weight in setup.hf.model.named_parameters()}
    weights["lm_head.weight"] *= 6
    for engine in (setup.hf, setup.vllm):
        engine.load_weights(weights.items())
    return setup


@pytest.fixture(scope="module", params=["qwen2_5_vl"])
def setup(request, tmp_path_factory):
    return sharpened(start(request.param, tmp_path_factory.mktemp(request.param), speculate=3, max_num_seqs=4))


def assert_same(ours, theirs):
    assert torch.equal(ours["responses"], theirs["responses"])
    assert torch.equal(ours["response_mask"], theirs["response_mask"])
    torch.testing.assert_close(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SAMPLED, RESTRICTED, COPIED, replace(COPIED, stop_token_ids=tuple(range(0, 240, 7)), seed=9)],
    ids=["greedy", "sampled", "restricted", "copied", "stopped"],
)
def test_tokens_are_those_of_the_other_engine_without_drafts(setup, sampling):
    ours = generate(setup, setup.vllm, sampling)
    assert_same(ours, generate(setup, setup.hf, sampling))
    assert (ours["drafted_tokens"] >= ours["accepted_tokens"]).all()
    assert not setup.vllm.sampler.drafts._groups


def test_steps_without_drafts_between_others_have_the_same_tokens(setup, monkeypatch):
    sampling, steps = replace(COPIED, temperature=0.3), itertools.count()
    always = generate(setup, setup.vllm, sampling)["drafted_tokens"].sum()
    monkeypatch.setattr(Drafts, "pay", lambda self, rows: next(steps) % 3 == 0)
    ours = generate(setup, setup.vllm, sampling)
    assert_same(ours, generate(setup, setup.hf, sampling))
    assert 0 < ours["drafted_tokens"].sum() < always


def test_a_stop_text_among_drafted_tokens_ends_a_response_with_it(setup):
    whole, decode = generate(setup, setup.hf, COPIED), setup.builder.tokenizer.decode
    lengths = whole["response_mask"].sum(1).tolist()
    texts = [decode(whole["responses"][row][length // 2 :][:2]) for row, length in enumerate(lengths)]
    sampling = replace(COPIED, stop=tuple({text for text in texts if text.strip() and "\ufffd" not in text}))
    ours, theirs = (generate(setup, engine, sampling) for engine in (setup.vllm, setup.hf))
    assert theirs["response_mask"].sum() < whole["response_mask"].sum()
    assert_same(ours, theirs)
    assert torch.equal(ours["truncated"], theirs["truncated"])


def test_steps_fall_by_the_accepted_tokens(setup, monkeypatch):
    scheduler, calls = setup.vllm.llm.llm_engine.engine_core.engine_core.scheduler, Counter()
    own = scheduler.update_from_output

    def counted(plan, output):
        calls["steps"] += 1
        calls["rows"] += sum(map(bool, output.sampled_token_ids))
        return own(plan, output)

    monkeypatch.setattr(scheduler, "update_from_output", counted)
    data = generate(setup, setup.vllm, COPIED)
    tokens, accepted = int(data["response_mask"].sum()), int(data["accepted_tokens"].sum())
    assert accepted > tokens / 12
    assert calls["rows"] == pytest.approx(tokens - accepted, abs=len(data))
    assert calls["steps"] < 4 * 24  # of 16 samples, 4 at a time


def test_requests_with_different_settings_run_together(setup):
    (first, second), singles = (COPIED, replace(COPIED, temperature=0.3, top_k=5, top_log_probs=2)), {}
    requests = build_requests(setup.prompts, COPIED)[:8]
    numbers = {}
    for place, request in enumerate(requests):
        numbers[setup.vllm.submit(request, (first, second)[place % 2])] = place
    done = {}
    while setup.vllm.unfinished:
        done |= {numbers[each.request]: each for each in setup.vllm.poll()}
    for place, request in enumerate(requests):
        singles[place] = next(iter(setup.hf.generate([request], replace((first, second)[place % 2], n=1))))
        assert done[place].token_ids == singles[place].token_ids
        if place % 2:
            tops = [[token for token, _ in each] for each in done[place].top_log_probs]
            assert tops == [[token for token, _ in each] for each in singles[place].top_log_probs]


def test_interrupted_responses_go_on_and_count_their_drafts(setup):
    requests = build_requests(setup.prompts, COPIED)
    numbers = [setup.vllm.submit(request, COPIED) for request in requests]
    done = [each for _ in range(8) for each in setup.vllm.poll()]
    setup.vllm.load_weights(list(setup.hf.model.named_parameters()))
    while setup.vllm.unfinished:
        done += setup.vllm.poll()
    found = {each.request: each for each in done}
    expected = {each.request: each for each in setup.hf.generate(requests, COPIED)}
    for place, number in enumerate(numbers):
        assert found[number].token_ids == expected[place].token_ids
        assert found[number].accepted_tokens <= min(found[number].drafted_tokens, 24)


def test_what_cannot_be_exact_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    path = write_checkpoint("qwen3_5", tmp_path)
    with pytest.raises(InvalidConfig, match="qwen3_5 have recurrent layers, and vLLM's first model runner"):
        create_engine("vllm", path, speculate=2)
    with pytest.raises(InvalidConfig, match="use speculate=N"):
        create_engine("vllm", path, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
