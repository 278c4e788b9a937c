"""Exact-match speculation in the Hugging Face engine: the tokens without it, in fewer forward passes."""

import itertools
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.batches import prompt_batch
from helpers.examples import at_most
from helpers.prediction_heads import add_head
from helpers.tiny_models import MODEL_TYPES, tiny_model
from helpers.turns import finish, next_turn
from rollout.drafts import AGAIN, TRIAL, Drafts, Payoff
from rollout.engine import SamplingParams
from rollout.hf import HFEngine
from rollout.responses import build_requests

CPU = torch.device("cpu")


def engines_of(model_type, path, **options):
    """An engine, and one that drafts, whose model prefers few tokens, so that drafts are found and kept; ``+head``: by its own
    head too.
    """
    model_type, _, head_of = model_type.partition("+")
    model = tiny_model(model_type)
    head = model.get_output_embeddings().weight.data
    head *= 6
    if family_of(model).recurrent_mixers is not None:  # these repeat nothing unless there are few tokens
        head[:100], head[104:] = 0, 0
    model.save_pretrained(path)
    if head_of:
        add_head(model, path)
    return [HFEngine(str(path), device=CPU, speculate=tokens, **options) for tokens in (0, 3)]


@pytest.fixture(
    scope="module",
    params=[
        each if each in ("qwen3_vl", "qwen3_5+head") else pytest.param(each, marks=pytest.mark.long)
        for each in (*MODEL_TYPES, "qwen3_5+head")
    ],
)
def engines(request, tmp_path_factory):
    """In float64: a pass over several tokens rounds otherwise than one over a single token, and in float32 a random number falls
    between the two results now and then.
    """
    return engines_of(request.param, tmp_path_factory.mktemp(request.param), dtype="float64")


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5+head"])
def one_family(request, tmp_path_factory):
    return engines_of(request.param, tmp_path_factory.mktemp(request.param))


def requests_of(engine, sampling):
    prompts = prompt_batch(engine.model.config, [[(4, 6), (8, 4)], [(6, 6)], []], texts=[4, 7, 3])
    return build_requests(prompts, sampling)


def answers(engine, sampling, requests=None):
    done = engine.generate(requests or requests_of(engine, sampling), sampling)
    return sorted(done, key=lambda each: each.request)


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4)


@contextmanager
def forward_passes(engine):
    calls = []
    language_model = engine.model.get_submodule(engine.family.language_model)
    hook = language_model.register_forward_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


@settings(max_examples=at_most(6), deadline=None)
@given(
    temperature=st.sampled_from([0.2, 0.6, 1.0]),
    top_k=st.sampled_from([0, 4]),
    max_tokens=st.integers(1, 14),
    seed=st.integers(0, 1000),
    stop=st.sampled_from([(), tuple(range(0, 240, 9))]),
)
def test_tokens_are_those_without_drafts(engines, temperature, top_k, max_tokens, seed, stop):
    plain, drafting = engines
    sampling = SamplingParams(4, temperature, top_k=top_k, max_tokens=max_tokens, stop_token_ids=stop, seed=seed)
    assert_same(answers(drafting, sampling), answers(plain, sampling))
    assert not drafting._speculation._samples
    assert not drafting._speculation._groups


class Device:
    """A pass without drafts lasts a second and gives each row one token. The first pass reads prompts too, and lasts longer."""

    def __init__(self, lasts, kept, monkeypatch):
        self.lasts, self.kept = lasts, kept  # seconds of a pass with drafts, and tokens that a row keeps of them
        self.now, self.drafts = 0.0, Drafts(device=torch.device("cuda"))
        monkeypatch.setattr("rollout.drafts.perf_counter", lambda: self.now)

    def passes(self, count, rows=1):
        """Which of the next passes have drafts."""
        found = []
        for number in range(rows):
            self.drafts.open(number, "", torch.tensor([1]))
        for number in range(count):
            found.append(self.drafts.pay(rows))
            self.now += 50.0 if not number else self.lasts if found[-1] else 1.0
            for number in range(rows):
                self.drafts.add(number, [5] * (1 + self.kept * found[-1]))
        for number in range(rows):
            self.drafts.close(number)
        return found


@pytest.mark.parametrize(("kept", "faster"), [(0, False), (1, False), (2, True)])
def test_an_engine_goes_on_in_the_way_that_gives_more_tokens_a_second(kept, faster, monkeypatch):
    """Three passes with drafts and three without are compared after that with prompts, and after 64, 256 and each 1024. The first
    pass in another way than the one before is not compared.
    """
    assert (TRIAL, *AGAIN) == (3, 64, 256, 1024)
    expected = [faster] * 3100
    for first in (1, 65, 257, 1025, 2049, 3073):
        changes = not faster and first > 1
        expected[first : first + 7 + changes] = [True] * (3 + changes) + [False] * 4
    expected[0] = True
    found = Device(2.0, kept, monkeypatch).passes(3100)
    assert [at for at in range(3100) if found[at] != expected[at]] == []


def test_a_way_that_has_become_faster_is_taken(monkeypatch):
    device = Device(2.0, 0, monkeypatch)
    assert device.passes(64)[8:] == [False] * 56
    device.kept = 3
    assert device.passes(100)[11:] == [True] * 89


def test_drafts_end_where_a_device_gets_slower_by_them(monkeypatch):
    """By a third, after twenty passes with drafts, as one does that reaches the limit of its power."""
    device = Device(1.5, 1, monkeypatch)
    assert device.passes(28)[8:] == [True] * 20
    device.lasts = 2.1
    found = device.passes(100)
    assert not any(found[12:30])
    assert sum(found) < 20  # with those of the next comparison


def test_refused_drafts_do_not_pay_where_passes_with_them_seem_shorter(monkeypatch):
    """A pass that drafts computes more than one without, so a host that was busy made the others longer."""
    assert Device(0.9, 0, monkeypatch).passes(60)[8:] == [False] * 52
    assert Device(0.9, 1, monkeypatch).passes(60)[8:] == [True] * 52


def test_few_rows_may_have_drafts_where_many_have_none(monkeypatch):
    device = Device(1.5, 0, monkeypatch)
    assert not any(device.passes(60, rows=8)[8:])
    device.kept = 1
    assert all(device.passes(60, rows=2)[8:])
    device.kept = 0
    assert not any(device.passes(3, rows=8))


def test_drafts_that_pay_for_many_rows_are_not_compared_again_for_fewer_at_once(monkeypatch):
    device = Device(1.5, 1, monkeypatch)
    assert device.passes(60, rows=8)[8:] == [True] * 52
    assert device.passes(60, rows=4) == [True] * 60
    assert device.passes(60, rows=1) == [True] * 60
    assert False in device.passes(20, rows=16)


def test_no_draft_is_tried_while_prompts_are_read(monkeypatch):
    payoff, now = Payoff(), 0.0
    monkeypatch.setattr("rollout.drafts.perf_counter", lambda: now)
    assert not payoff.drafts(8, reads=True)
    assert payoff.drafts(8)
    drafted = True
    for _ in range(8):
        payoff.passed(8, 8 * (1 + drafted), drafted)
        drafted = payoff.drafts(8)
        now += 1.5 if drafted else 1.0
    assert payoff.drafts(8, reads=True)


@pytest.mark.parametrize(("kept", "faster"), [(1, False), (2, True)])
def test_passes_are_compared_where_the_next_two_are_planned_already(kept, faster, monkeypatch):
    """As vLLM plans them: what a pass had is told when it has ended, and by then it is settled what the next two have.

    A pass in another way than the one before lasts longer.
    """
    payoff, now, found = Payoff(), [0.0], [True, True]
    monkeypatch.setattr("rollout.drafts.perf_counter", lambda: now[0])
    payoff.passed(4, 4, found[0])
    for number in range(60):
        found.append(payoff.drafts(4))
        now[0] += (2.0 if found[number] else 1.0) + 4.0 * (found[number] != found[max(number - 1, 0)])
        payoff.passed(4, 4 * (1 + kept * found[number]), found[number])
    assert found[2:3] == [True]
    assert found[12:] == [faster] * 50


def test_on_a_cpu_each_pass_has_drafts():
    assert all(Drafts(device=CPU).pay(4) for _ in range(100))


def alternating(monkeypatch):
    """Every other pass has drafts."""
    turns = itertools.count()
    monkeypatch.setattr(Drafts, "pay", lambda self, rows: next(turns) % 2 == 0)


def test_tokens_are_those_without_drafts_next_to_passes_without(one_family, monkeypatch):
    plain, drafting = one_family
    sampling = SamplingParams(4, 0.6, max_tokens=24, seed=5, ignore_eos=True)
    always = sum(each.drafted_tokens for each in answers(drafting, sampling))
    alternating(monkeypatch)
    found = answers(drafting, sampling)
    assert_same(found, answers(plain, sampling))
    assert 0 < sum(each.drafted_tokens for each in found) < always


@pytest.mark.slow
def test_samples_that_copy_their_siblings_take_fewer_forward_passes(one_family):
    """One request runs at a time, so later samples copy earlier ones, also where these ended."""
    plain, drafting = one_family
    sampling, passes = SamplingParams(4, 0.15, max_tokens=24, seed=3, ignore_eos=True), []
    found = []
    for engine in (plain, drafting):
        engine.max_num_seqs = 1
        with forward_passes(engine) as calls:
            found.append(answers(engine, sampling))
        engine.max_num_seqs = 256
        passes.append(len(calls))
    assert_same(found[1], found[0])
    assert passes[0] == 12 * 24  # none for the last token of a response, one for its prompt
    accepted = sum(each.accepted_tokens for each in found[1])
    assert accepted > 12 * 24 / 4
    assert passes[1] < passes[0] * 4 / 5
    assert passes[0] - accepted <= passes[1] <= passes[0] - accepted + 12
    assert all(each.drafted_tokens >= each.accepted_tokens for each in found[1])


@pytest.mark.slow
def test_a_kept_response_that_ends_with_a_draft_is_continued(one_family):
    found = []
    for engine in one_family:
        sampling = SamplingParams(temperature=0.15, max_tokens=9, seed=5, ignore_eos=True)
        turns = []
        for request in requests_of(engine, sampling):
            for _ in range(2):  # the second one copies
                number = engine.submit(request, sampling, keep=True)
                (done,) = finish(engine, number)
                later = next_turn(engine.model.config, request, done, [5, 6], (4, 4))
                turns += [done, *finish(engine, engine.fork(number, later, sampling))]
        assert all(each.cached_tokens > 0 for each in turns[1::2])
        found.append(turns)
    assert_same(found[1], found[0])
    assert sum(each.accepted_tokens for each in found[1]) > 0


def test_requests_join_leave_and_meet_new_weights(one_family):
    plain, drafting = one_family
    sampling = SamplingParams(3, 0.4, max_tokens=12, seed=8)
    requests = requests_of(plain, sampling)
    expected = answers(plain, sampling, requests)
    numbers = [drafting.submit(request, sampling) for request in requests[:5]]
    done = [each for _ in range(2) for each in drafting.poll()]
    numbers += [drafting.submit(request, sampling) for request in requests[5:]]
    done += drafting.poll()
    drafting.load_weights(list(plain.model.named_parameters()))
    while drafting.unfinished:
        done += drafting.poll()
    assert_same([{each.request: each for each in done}[number] for number in numbers], expected)
    assert not drafting._speculation._samples


def test_likeliest_tokens_come_with_accepted_ones(one_family):
    plain, drafting = one_family
    sampling = SamplingParams(2, 0.15, max_tokens=16, seed=2, top_log_probs=2, ignore_eos=True)
    expected, found = answers(plain, sampling), answers(drafting, sampling)
    assert sum(each.accepted_tokens for each in found)
    for ours, theirs in zip(found, expected, strict=True):
        assert [[token for token, _ in place] for place in ours.top_log_probs] == [
            [token for token, _ in place] for place in theirs.top_log_probs
        ]


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe+head"])
def test_experts_of_accepted_tokens_are_recorded(model_type, tmp_path):
    plain, drafting = engines_of(model_type, tmp_path, routed_experts=True)
    sampling = SamplingParams(2, 0.15, max_tokens=12, seed=2, ignore_eos=True)
    expected, found = answers(plain, sampling), answers(drafting, sampling)
    assert_same(found, expected)
    assert sum(each.accepted_tokens for each in found)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.routed_experts, theirs.routed_experts)


def test_fewer_than_no_drafts_are_refused(tmp_path):
    tiny_model("qwen3_5").save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match="speculate=-1"):
        HFEngine(str(tmp_path), device=CPU, speculate=-1)


def test_streams_continue_behind_drafts(one_family):
    """A request that was aborted goes on with the number of its tokens as ``drawn``."""
    plain, drafting = one_family
    sampling = SamplingParams(temperature=0.3, max_tokens=10, seed=4, ignore_eos=True)
    request = requests_of(plain, sampling)[2]
    (expected,) = answers(plain, sampling, [request])
    number = drafting.submit(request, sampling)
    for _ in range(2):
        drafting.poll()
    begun = drafting.abort(number).token_ids
    assert begun == expected.token_ids[: len(begun)]
    ids = torch.cat([request.input_ids, torch.tensor(begun)])
    attended = torch.ones(1, len(request.input_ids), dtype=torch.int64)
    positions = drafting.family.extend_positions(request.position_ids[None], attended, len(begun))[0]
    rest = replace(
        request,
        prompt_ids=(),
        input_ids=ids,
        token_types=torch.cat([request.token_types, request.token_types.new_zeros(len(begun))]),
        position_ids=torch.cat([request.position_ids, positions], dim=-1),
        drawn=len(begun),
    )
    (found,) = answers(drafting, replace(sampling, max_tokens=10 - len(begun)), [rest])
    assert begun + found.token_ids == expected.token_ids
