"""The benchmark of carried-over decoding: lengths, groups and decoding steps, with the Hugging Face engine and a tiny model."""

from dataclasses import replace

import pytest

from benchmarks.carried_decoding import DecodedStep, Decoding, rollout_worker, table
from benchmarks.geo3k_step import OF_DRAWN_LENGTHS, drawn_length, hf_of_drawn_lengths, rest_of, vllm_of_drawn_lengths
from helpers.checkpoints import write_checkpoint
from helpers.engines import start
from helpers.turns import finish
from rollout.continuation import continued
from rollout.engine import SamplingParams, create_engine
from rollout.prompts import PromptBuilder
from rollout.responses import build_requests
from workers.model.named_weights import named_weights

SAMPLING = SamplingParams(n=3, max_tokens=48, ignore_eos=True)


def test_lengths_are_log_normal_with_a_fifth_of_the_limit_as_mean():
    lengths = [drawn_length(seed, 2048) for seed in range(4000)]
    assert max(lengths) == 2048
    assert sum(lengths) / len(lengths) == pytest.approx(400, rel=0.05)  # cut at the limit
    assert sorted(lengths)[2000] == pytest.approx(400 * 0.726, rel=0.05)  # exp(-0.8 ** 2 / 2)
    assert [drawn_length(seed, 2048) for seed in range(9)] == lengths[:9]


def test_a_response_that_goes_on_has_the_length_that_it_began_with():
    length = drawn_length(7, 2048)
    assert rest_of(7, 100, 2048 - 100) == length - 100
    assert rest_of(7, length + 5, 2048 - length - 5) == 1


@pytest.mark.parametrize("engine", [vllm_of_drawn_lengths(), hf_of_drawn_lengths()], ids=["vllm", "hf"])
def test_the_engines_override_what_their_base_classes_have(engine):
    changed = [engine, *(value for value in vars(engine).values() if isinstance(value, type))]
    unknown = {
        f"{each.__name__}.{name}"
        for each in changed
        for name in vars(each)
        if not name.startswith("__") and not any(hasattr(base, name) for base in each.__bases__)
    }
    assert unknown == set()


def assert_drawn_lengths(engine, weights, prompts):
    """Responses of a run, and requests that are interrupted or go on as others, have the lengths that are drawn for them."""
    requests = build_requests(prompts, SAMPLING)
    drawn = [drawn_length(request.seed, SAMPLING.max_tokens) for request in requests]
    assert max(drawn) > 8
    assert len(set(drawn)) > 3
    whole = {each.request: each for each in engine.generate(requests, SAMPLING)}
    assert [len(whole[place].token_ids) for place in range(len(requests))] == drawn
    assert {each.finish_reason for each in whole.values()} == {"length"}

    longest = max(range(len(requests)), key=lambda place: drawn[place])
    request = requests[longest]
    number = engine.submit(request, SAMPLING)
    for _ in range(3):  # before the first token, and after the first ones
        engine.load_weights(weights())
        assert not engine.poll()
    assert finish(engine, number)[0].token_ids == whole[longest].token_ids

    number = engine.submit(request, SAMPLING)
    for _ in range(4):
        assert not engine.poll()
    begun = engine.abort(number).token_ids
    assert 0 < len(begun) < drawn[longest]
    rest = replace(SAMPLING, max_tokens=SAMPLING.max_tokens - len(begun))
    (completion,) = finish(engine, engine.submit(continued(request, begun, engine.family), rest))
    assert begun + completion.token_ids == whole[longest].token_ids


@pytest.mark.vllm
def test_responses_of_vllm_have_drawn_lengths(tmp_path):
    setup = start("qwen2_5_vl", tmp_path, engine=OF_DRAWN_LENGTHS["vllm"])
    assert_drawn_lengths(setup.vllm, setup.actor.named_weights, setup.prompts)


def test_responses_of_the_hugging_face_engine_have_drawn_lengths(tmp_path):
    path = write_checkpoint("qwen2_5_vl", tmp_path)
    engine = create_engine(OF_DRAWN_LENGTHS["hf"], path, max_num_seqs=64)
    prompts = PromptBuilder.from_pretrained(path, 300)([{"prompt": f"number {row}"} for row in range(3)])
    assert_drawn_lengths(engine, lambda: named_weights(engine.model), prompts)


@pytest.fixture(scope="module")
def worker_and_prompts(tmp_path_factory):
    path = write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    prompts = PromptBuilder.from_pretrained(path, 300)([{"prompt": f"number {row}"} for row in range(4)])
    return rollout_worker(path, "hf", {"max_num_seqs": 64}), prompts


@pytest.mark.slow
def test_steps_of_carried_samples_have_as_many_groups_in_fewer_decoding_steps(worker_and_prompts):
    worker, prompts = worker_and_prompts
    found = {}
    for staleness in (0, 2):
        decoding = Decoding(worker, prompts, SAMPLING, staleness)
        found[staleness] = [decoding.step() for _ in range(4)]
    assert {step.groups for steps in found.values() for step in steps} == {4}
    assert [step.carried for step in found[0]] == [0] * 4
    assert [step.read_again for step in found[0]] == [0] * 4
    assert all(step.carried == 2 for step in found[2])
    assert all(step.polls > 1 for steps in found.values() for step in steps)
    assert sum(step.polls for step in found[2][1:]) < sum(step.polls for step in found[0][1:])
    assert "poll" not in vars(worker.engine)


@pytest.mark.slow
def test_steps_whose_tokens_are_made_up_leave_the_samples_of_steps_that_are_decoded(worker_and_prompts):
    worker, prompts = worker_and_prompts
    engine, decoded, settled = worker.engine, *(Decoding(worker, prompts, SAMPLING, 2) for _ in range(2))
    steps = [decoded.step() for _ in range(3)]
    settled.settle(3)
    assert worker.engine is engine
    assert settled.done == decoded.done == 3
    assert lengths_begun(settled) == lengths_begun(decoded)
    assert settled.carried.samples.since == decoded.carried.samples.since
    assert steps[0].read_again == 0
    following = settled.step()
    assert following.read_again == sum(length for _, length in lengths_begun(decoded)) > 0
    assert replace(following, seconds=0) == replace(decoded.step(), seconds=0)


def lengths_begun(decoding):
    """Of each sample that has not finished its uid and its tokens so far."""
    samples = decoding.carried.samples.unfinished
    return [
        (uid, sum(len(turn["token_ids"]) for turn in turns)) for uid, turns in zip(samples["uid"], samples["_begun"])
    ]


def test_the_table_says_whether_a_third_is_saved():
    steps = {1.0: [DecodedStep(3.0, 4, 90, 0, 20, 0)]}
    cells = table(steps | {1.25: [DecodedStep(1.5, 4, 90, 1, 9, 7), DecodedStep(2.5, 4, 110, 1, 10, 9)]}).splitlines()
    assert cells[-1] == "| 1.25 | 2.00 (1.5 to 2.5) | 10 | 8 | 20.000 | 1.0 | 0.667, at least a third less |"
    assert "not a third less" in table(steps | {1.25: [DecodedStep(2.1, 4, 90, 1, 9, 7)]})
