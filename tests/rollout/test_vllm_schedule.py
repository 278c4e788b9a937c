"""vLLM decides what is computed when and how precisely; that must not change what is sampled."""

import math
from collections import defaultdict, deque

import pytest
import torch

from helpers.engines import GREEDY, generate, picture, start
from rollout.engine import SamplingParams

pytestmark = pytest.mark.vllm


def test_prompts_read_in_parts_and_requests_put_off_sample_the_same(tmp_path, monkeypatch):
    """Steps shorter than a prompt, and a KV cache too small for all: vLLM throws tokens away and computes some again."""
    setup = start("qwen2_5_vl", tmp_path, kv_cache_bytes=1 << 19, max_num_batched_tokens=48)
    scheduler = setup.vllm.engine.engine_core.engine_core.scheduler
    put_off, put_one_off = [], scheduler._preempt_request

    def record(request, *rest, **options):
        put_off.append(request.num_tokens - request.num_prompt_tokens)
        return put_one_off(request, *rest, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", record)
    sampling = SamplingParams(n=8, temperature=0.8, max_tokens=60, seed=1)
    ours, theirs = (generate(setup, engine, sampling) for engine in (setup.vllm, setup.hf))
    assert int(setup.prompts["attention_mask"].sum(1).max()) > 48
    assert max(put_off) > 0
    assert torch.equal(ours["responses"], theirs["responses"])
    torch.testing.assert_close(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=2e-5, rtol=0)


def test_half_precision_leaves_logits_whole(tmp_path):
    """Logits of about 1,000 that differ by less than 4, which is where bfloat16 would make them equal."""
    setup = start("qwen2_5_vl", tmp_path, dtype="bfloat16")
    weights = dict(setup.actor.named_weights())
    head = torch.randn(weights["lm_head.weight"].shape, generator=torch.Generator().manual_seed(0)) * 0.05
    head[:, 0] = 1000.0
    setup.vllm.load_weights((weights | {"lm_head.weight": head}).items())
    data = generate(setup, setup.vllm, GREEDY)
    equal = -math.log(len(head) - len(setup.vllm.banned_ids))
    assert float((data["rollout_log_probs"][data["response_mask"].bool()] - equal).min()) > 0.1


def test_rows_that_decode_ask_for_a_block_when_theirs_is_full_and_for_no_images(tmp_path):
    setup = start("qwen2_5_vl", tmp_path, block_size=32, max_num_batched_tokens=2048)
    slots = setup.vllm.engine.engine_core.engine_core.scheduler.kv_cache_manager.allocate_slots
    asked, own = [], slots._own
    slots._own = lambda request, *rest, **options: asked.append(request) or own(request, *rest, **options)
    sampling = SamplingParams(temperature=0.8, max_tokens=70, seed=1, ignore_eos=True)
    ours, theirs = (generate(setup, engine, sampling) for engine in (setup.vllm, setup.hf))
    assert torch.equal(ours["responses"], theirs["responses"])
    rows = len(setup.prompts)
    lengths = setup.prompts["attention_mask"].sum(1)
    borders = int(((lengths + 69 - 1) // 32 - (lengths - 1) // 32).sum())
    assert borders >= 2 * rows
    assert len(asked) == rows + borders  # a prompt asks once, a response at each border of a block


@pytest.mark.parametrize(
    ("model_type", "sampling", "options"),
    [
        ("qwen2_5_vl", SamplingParams(n=4, max_tokens=60, seed=1), {"block_size": 32, "kv_cache_bytes": 1 << 19}),
        # states and blocks of 640 tokens
        ("qwen3_5", SamplingParams(max_tokens=600, ignore_eos=True), {"dtype": "bfloat16", "max_model_len": 800}),
    ],
)
def test_a_plan_used_again_is_the_one_that_vllm_makes(tmp_path, monkeypatch, model_type, sampling, options):
    """Rows that end one after the other, and more of them than run at a time."""
    from vllm.v1.core.sched.scheduler import Scheduler

    setup = start(model_type, tmp_path, max_num_seqs=5, **options)
    scheduler = setup.vllm.engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    made, own = [], Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda *given: made.append(given) or own(*given))

    def plans():
        found, made_before, schedule = [], len(made), type(scheduler).schedule

        def noted(*given):
            plan = schedule(scheduler, *given)
            rows, scheduled = plan.scheduled_cached_reqs, list(plan.num_scheduled_tokens.values())
            new = [None if each is None else [len(group) for group in each] for each in rows.new_block_ids]
            zeroed, free = len(plan.new_block_ids_to_zero or ()), manager.block_pool.get_num_free_blocks()
            found.append(
                (
                    scheduled,
                    len(plan.scheduled_new_reqs),
                    new,
                    rows.num_computed_tokens,
                    rows.num_output_tokens,
                    zeroed,
                    free,
                )
            )
            return plan

        monkeypatch.setattr(scheduler, "schedule", noted)
        data = generate(setup, setup.vllm, sampling)
        return data["responses"], found, len(made) - made_before

    tokens, used_again, few = plans()
    setup.vllm.llm.reset_prefix_cache()
    monkeypatch.setattr(scheduler, "_same_rows", lambda: None)
    monkeypatch.setattr(manager, "allocate_slots", manager.allocate_slots._own)
    vllm_tokens, vllm_plans, all_of_them = plans()
    assert torch.equal(tokens, vllm_tokens)
    assert used_again == vllm_plans
    assert any(any(new) for _, begun, new, *_ in used_again if not begun)  # a row that decodes gets a block
    assert all_of_them == len(vllm_plans) > 60
    assert few < 0.8 * all_of_them
    if setup.vllm.dtype == torch.float32:
        assert torch.equal(tokens, generate(setup, setup.hf, sampling)["responses"])


def test_a_request_whose_image_is_in_the_cache_keeps_its_pixels(tmp_path, monkeypatch):
    """If it is put off, and the cache gives its blocks away, vLLM reads the image again."""
    setup = start("qwen2_5_vl", tmp_path, block_size=32)
    scheduler = setup.vllm.engine.engine_core.engine_core.scheduler
    begun, schedule = [], scheduler.schedule

    def noted(*given):
        plan = schedule(*given)
        begun.extend(plan.scheduled_new_reqs)
        return plan

    monkeypatch.setattr(scheduler, "schedule", noted)
    row = setup.builder([{"prompt": "<image>" + "what is it? " * 8, "images": [picture(24, 40, 0)]}])
    first, again = (generate(setup, setup.vllm, GREEDY, row)["responses"] for _ in range(2))
    assert torch.equal(first, again)
    assert [each.num_computed_tokens > 0 for each in begun] == [False, True]
    place = begun[1].mm_features[0].mm_position
    assert place.offset + place.length <= begun[1].num_computed_tokens
    assert "pixel_values" in begun[1].mm_features[0].data


def new_scheduler(core, ahead):
    """Another scheduler of an engine's core, in the form that plans a step ahead or the one that waits."""
    from rollout.vllm.scheduler import DecodingAsyncScheduler, DecodingScheduler

    own = core.scheduler
    return (DecodingAsyncScheduler if ahead else DecodingScheduler)(
        vllm_config=core.vllm_config,
        kv_cache_config=own.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=own.block_size,
        hash_block_size=own.kv_cache_manager.block_pool.hash_block_size,
    )


def text_requests(core, count):
    """Requests by their names, with prompts and limits of different lengths and two stop tokens."""
    from vllm import SamplingParams as Params
    from vllm.v1.request import Request

    def request(row):
        params = Params(max_tokens=90 + 9 * row, stop_token_ids=[7, 11], ignore_eos=True)
        prompt = [row + 20, *range(20, 40 + 5 * row)]
        hasher = core.request_block_hasher
        return Request(str(row), prompt, sampling_params=params, pooling_params=None, block_hasher=hasher)

    return {str(row): request(row) for row in range(count)}


def model_output(plan, lengths):
    """What a model returns for a plan. Tokens follow from their rows and places; ``lengths`` counts those of each row."""
    from vllm.v1.outputs import ModelRunnerOutput

    rows = plan.scheduled_cached_reqs
    read = {each.req_id: each.num_computed_tokens for each in plan.scheduled_new_reqs}
    read |= dict(zip(rows.req_ids, rows.num_computed_tokens, strict=True))
    sampled = []
    for name, count in plan.num_scheduled_tokens.items():
        place = read[name] + count
        if place == lengths[name]:
            sampled.append([(place * 31 + int(name) * 17) % 400])
            lengths[name] += 1
        else:  # the step reads a part of the tokens that are known
            sampled.append([])
    names = list(plan.num_scheduled_tokens)
    places = {name: place for place, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)


def state_of_requests(requests, pool):
    """What vLLM knows of all requests, and of its blocks."""
    rows = [(each.num_computed_tokens, each.num_output_placeholders, each.status) for each in requests.values()]
    tokens = [list(each.output_token_ids) for each in requests.values()]
    return rows, tokens, pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)


ABORTED, ABORTED_AT = "2", 30


def run_to_the_end(scheduler, requests, ahead):
    """The states after each step, the ends of requests, and the tokens that vLLM's outputs have. One request is aborted."""
    from vllm.v1.request import RequestStatus

    lengths = {name: request.num_prompt_tokens for name, request in requests.items()}
    for request in requests.values():
        scheduler.add_request(request)
    under_way, told, states, ended = deque(), defaultdict(list), [], []
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        under_way.append((plan, model_output(plan, lengths)))
        if len(under_way) <= ahead:
            continue
        outputs = scheduler.update_from_output(*under_way.popleft())
        for each in [each for client in outputs.values() for each in client.outputs]:
            told[each.request_id] += each.new_token_ids
            if each.finish_reason is not None:
                ended.append((len(states), each.request_id, each.finish_reason, each.stop_reason))
        if len(states) == ABORTED_AT:
            scheduler.finish_requests(ABORTED, RequestStatus.FINISHED_ABORTED)
        states.append(state_of_requests(requests, scheduler.kv_cache_manager.block_pool))
    return states, ended, {name: told[name] for name in told if name != ABORTED}


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "plans-ahead"])
def test_rows_that_only_become_longer_are_left_as_vllm_leaves_them(tmp_path, monkeypatch, ahead):
    """Eleven rows wait, end by a stop token or by their length, and some are put off by the form that waits."""
    from vllm.v1.core.sched.scheduler import Scheduler

    setup = start("qwen2_5_vl", tmp_path, max_num_seqs=8, kv_cache_bytes=1 << (22 if ahead else 19))
    core = setup.vllm.engine.engine_core.engine_core
    put_off, left_to_vllm = [], []
    put_one_off, update = Scheduler._preempt_request, Scheduler.update_from_output

    def noted(scheduler, plan, output):
        left_to_vllm.append(len(plan.num_scheduled_tokens))
        return update(scheduler, plan, output)

    def noted_put_off(*given, **options):
        put_off.append(given)
        return put_one_off(*given, **options)

    monkeypatch.setattr(Scheduler, "update_from_output", noted)
    monkeypatch.setattr(Scheduler, "_preempt_request", noted_put_off)

    requests = text_requests(core, 11)
    ours = run_to_the_end(new_scheduler(core, ahead), requests, ahead)
    ours_left, put_off_by_ours = list(left_to_vllm), len(put_off)
    left_to_vllm.clear()
    vllms = new_scheduler(core, ahead)
    monkeypatch.setattr(vllms, "_add_tokens", lambda plan, _: plan.num_scheduled_tokens)
    theirs = run_to_the_end(vllms, text_requests(core, 11), ahead)

    assert ours == theirs
    states, ended, told = ours
    assert told == {name: list(requests[name].output_token_ids) for name in told}
    assert len(states) > 100
    assert len(ended) == 10
    assert {reason for *_, reason, _ in ended} == {0, 1}  # stopped, and cut at their lengths
    assert (put_off_by_ours > 0) is not ahead
    assert len(put_off) == 2 * put_off_by_ours
    assert sum(ours_left) < 0.4 * sum(left_to_vllm)
