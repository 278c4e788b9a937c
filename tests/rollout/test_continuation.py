"""Decoding in slices: requests that are stopped go on with the tokens that they would have sampled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.errors import InvalidPrompt, NonFiniteLogits
from dataproto.vlm import family_of
from helpers.batches import prompt_batch
from helpers.carried_runs import failing, refusing
from helpers.engines import start
from helpers.tiny_models import tiny_model
from rollout import continuation
from rollout.continuation import BegunTurn, Tokens, WholeGroups, decode_groups, submitted_together
from rollout.engine import Completion, SamplingParams
from rollout.hf import HFEngine
from rollout.responses import build_requests

SAMPLED = SamplingParams(n=3, temperature=0.8, max_tokens=9, seed=1, stop_token_ids=tuple(range(0, 250, 9)))


def in_slices(engine, family, requests, labels, wanted=1):
    """All samples, decoded until ``wanted`` further groups are whole each time; each slice has a weight version."""
    begun, reasons = [Tokens() for _ in requests], ["abort"] * len(requests)
    slices = 0
    while "abort" in reasons:
        slices += 1
        left = [place for place, reason in enumerate(reasons) if reason == "abort"]
        groups = WholeGroups([labels[place] for place in left], wanted)
        some = [requests[place] for place in left], [begun[place] for place in left]
        found = decode_groups(engine, *some, SAMPLED, groups, family, weight_version=slices)
        for place, (tokens, reason) in zip(left, found, strict=True):
            begun[place], reasons[place] = tokens, reason
    return begun, reasons, slices


def assert_same(engine, family, requests, uids):
    labels = [uid for uid in uids for _ in range(SAMPLED.n)]
    found, reasons, slices = in_slices(engine, family, requests, labels)
    whole = {each.request: each for each in engine.generate(requests, SAMPLED)}
    assert slices > 1
    assert engine.unfinished == 0
    assert any(len(set(tokens.weight_versions)) > 1 for tokens in found)
    for place, tokens in enumerate(found):
        assert tokens.token_ids == whole[place].token_ids
        assert reasons[place] == whole[place].finish_reason
        assert len(tokens.weight_versions) == len(tokens)
        np.testing.assert_allclose(tokens.log_probs, whole[place].log_probs, atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5"])  # the second has states that cannot be cut back
def test_slices_give_the_tokens_of_one_run(model_type, tmp_path, monkeypatch):
    monkeypatch.setattr(continuation, "SUBMITTED_AT_A_TIME", 4)
    tiny_model(model_type).save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path), device=torch.device("cpu"), max_num_seqs=7)  # some wait when decoding ends
    prompts = prompt_batch(engine.model.config, [[(4, 6), (8, 4)], [(6, 6)], []], texts=[4, 7, 3])
    assert_same(engine, engine.family, build_requests(prompts, SAMPLED), "abc")


class Recorded:
    """An engine that is asked for a sample each, and ends a sample at the poll after it was submitted."""

    def __init__(self):
        self.calls, self.open = [], []

    def submit(self, request, sampling):
        self.calls.append("submit")
        self.open.append(len(self.calls))
        return self.open[-1]

    def poll(self):
        self.calls.append("poll")
        done, self.open = self.open, []
        return [Completion(number, [7], [-0.5], "stop") for number in done]

    def abort(self, number):
        raise AssertionError("nothing runs when the groups are whole")


def test_the_engine_steps_before_all_requests_are_submitted(monkeypatch):
    """In a batch of 5 requests 2 are submitted at a time, and none after enough groups are whole."""
    monkeypatch.setattr(continuation, "SUBMITTED_AT_A_TIME", 2)
    model = tiny_model("qwen2_5_vl")
    requests = build_requests(prompt_batch(model.config, [[]] * 5, texts=[3] * 5), replace(SAMPLED, n=1))
    arguments = requests, [Tokens() for _ in requests], SAMPLED

    def calls_of(wanted):
        engine = Recorded()
        found = decode_groups(engine, *arguments, WholeGroups("abcde", wanted), family_of(model.config), 1)
        return engine.calls, [reason for _, reason in found]

    everything = ["submit", "submit", "poll", "submit", "submit", "poll", "submit", "poll"]
    assert calls_of(wanted=5) == (everything, ["stop"] * 5)
    assert calls_of(wanted=3) == (everything[:6], ["stop"] * 4 + ["abort"])


def test_the_samples_of_a_group_are_submitted_together(monkeypatch):
    monkeypatch.setattr(continuation, "SUBMITTED_AT_A_TIME", 3)
    assert list(submitted_together("aabbacbd")) == [[0, 1, 4], [2, 3, 6], [5, 7]]
    model = tiny_model("qwen2_5_vl")
    requests = build_requests(prompt_batch(model.config, [[]] * 2, texts=[3] * 2), replace(SAMPLED, n=2))
    engine, begun = Recorded(), [Tokens() for _ in requests]
    decode_groups(engine, requests, begun, SAMPLED, WholeGroups("aabb", 2), family_of(model.config), 1)
    assert engine.calls == ["submit"] * 4 + ["poll"]


def test_a_mistake_in_a_later_request_is_found_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(continuation, "SUBMITTED_AT_A_TIME", 1)
    model = tiny_model("qwen2_5_vl")
    requests = build_requests(prompt_batch(model.config, [[]] * 2, texts=[3] * 2), replace(SAMPLED, n=1))
    engine, whole = Recorded(), Tokens([7] * 9, [-0.5] * 9, [1] * 9)  # of 9 tokens none is left
    with pytest.raises(ValueError, match="max_tokens"):
        decode_groups(engine, requests, [Tokens(), whole], SAMPLED, WholeGroups("ab", 2), family_of(model.config), 1)
    assert engine.calls == []


@pytest.mark.parametrize("error", [InvalidPrompt, NonFiniteLogits])
def test_tokens_are_kept_where_the_engine_fails_at_a_sample(error, tmp_path, monkeypatch):
    """Of five samples the fourth is refused when the others have a few tokens, or fails; then all go on."""
    monkeypatch.setattr(continuation, "SUBMITTED_AT_A_TIME", 1)
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path), device=torch.device("cpu"))
    sampling = replace(SAMPLED, n=1, max_tokens=12, ignore_eos=True, stop_token_ids=())
    prompts = prompt_batch(engine.model.config, [[]] * 5, texts=[3, 4, 5, 6, 7])
    requests = [replace(each, uid=str(place)) for place, each in enumerate(build_requests(prompts, sampling))]
    begun = [Tokens()] * 5

    def decoded(version):
        groups = WholeGroups("abcde", wanted=5)
        found = decode_groups(engine, requests, begun, sampling, groups, engine.family, version)
        assert engine.unfinished == 0
        return groups.failure, [tokens for tokens, _ in found], [reason for _, reason in found]

    with monkeypatch.context() as patch:
        if error is InvalidPrompt:
            refusing(engine, patch, "3", submissions=4)
        else:
            failing(engine, patch, "3", polls=6)
        (place, raised), begun, reasons = decoded(version=1)
    assert (place, type(raised), reasons[3], len(begun[3])) == (3, error, "abort", 0)
    assert all(len(begun[place]) for place in range(3))
    assert {version for tokens in begun for version in tokens.weight_versions} == {1}
    failure, found, reasons = decoded(version=2)
    assert failure is None
    whole = {each.request: each for each in engine.generate(requests, sampling)}
    for place, tokens in enumerate(found):
        assert tokens.token_ids == whole[place].token_ids
        assert tokens.weight_versions == [1] * len(begun[place]) + [2] * (12 - len(begun[place]))


@pytest.mark.vllm
def test_slices_give_the_tokens_of_one_run_of_vllm(tmp_path, monkeypatch):
    setup = start("qwen2_5_vl", tmp_path, max_images=6)
    requests = build_requests(setup.prompts, SAMPLED)
    assert_same(setup.vllm, setup.builder.family, requests, "abcd")
    rendered, render = [], setup.vllm.llm.renderer.render_cmpl
    monkeypatch.setattr(setup.vllm.llm.renderer, "render_cmpl", lambda prompts: rendered.append(1) or render(prompts))
    numbers = [setup.vllm.submit(request, SAMPLED) for request in requests]
    assert len(rendered) == 4  # once for the samples of a prompt
    for number in numbers:
        setup.vllm.abort(number)


@pytest.mark.vllm
def test_tokens_are_kept_where_vllm_refuses_a_prompt(tmp_path, monkeypatch):
    """The second prompt is too long with what it has sampled, which vLLM finds when the first one is being decoded."""
    monkeypatch.setattr(continuation, "SUBMITTED_AT_A_TIME", 1)
    setup = start("qwen2_5_vl", tmp_path, max_images=6)
    sampling = replace(SAMPLED, n=1, max_tokens=300, ignore_eos=True, stop_token_ids=())
    requests = build_requests(setup.prompts, sampling)[:3]
    long = replace(requests[1], input_ids=requests[1].input_ids.repeat(20)[:150], prompt_ids=[])
    long = replace(long, token_types=torch.zeros(150, dtype=torch.int8), position_ids=torch.arange(150).expand(4, -1))
    groups = WholeGroups("abc", wanted=3)
    tried = [requests[0], long, requests[2]]
    found = decode_groups(setup.vllm, tried, [Tokens()] * 3, sampling, groups, setup.builder.family, 1)
    place, error = groups.failure
    assert (place, type(error)) == (1, InvalidPrompt)
    assert "max_model_len=400" in str(error)
    (begun, _), *others = found
    assert len(begun) > 0
    assert [len(tokens) for tokens, _ in others] == [0, 0]
    assert setup.vllm.unfinished == 0
    (whole,) = setup.vllm.generate(requests[:1], sampling)
    assert whole.token_ids[: len(begun)] == begun.token_ids


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.integers(0, 3), st.sets(st.sampled_from("abcd")))
def test_decoding_ends_with_the_first_sample_that_makes_enough_groups_whole(labels, wanted, due):
    groups = WholeGroups(labels, wanted, due)
    for sample in range(len(labels) + 1):
        left = labels[sample:]
        whole = set(labels) - set(left)
        assert groups.enough == (len(whole) >= wanted and not due & set(left))
        if left:
            groups.finish(sample)


def test_what_has_begun_survives_a_file(tmp_path):
    turn = BegunTurn(Tokens([5, 7], [-0.1, -2.5], [1, 3]), True, [4, 4], "a1")
    torch.save([turn.plain()], tmp_path / "turns")
    (plain,) = torch.load(tmp_path / "turns", weights_only=True)
    assert BegunTurn.of(plain) == turn
