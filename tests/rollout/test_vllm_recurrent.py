"""vLLM beside the actor for families with recurrent layers. vLLM's kernel for the CPU computes in bfloat16 alone, so log-probs
agree within 0.05 on average, where those of other weights are further away.
"""

import json
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
import transformers

from benchmarks.engine_weights import differing_weights
from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.engines import ROWS, SAMPLED, generate, publish, start
from helpers.interpreted_triton import interpreted, plain_places, rows_may_read_fewer_tokens, schedule_ahead
from helpers.prediction_heads import add_head
from helpers.shown_models import VLLM_HALF_TYPES
from rollout.drafts import Payoff
from rollout.engine import SamplingParams, create_engine
from rollout.prompts import PromptBuilder
from rollout.responses import build_requests

pytestmark = pytest.mark.vllm


@pytest.fixture(
    scope="module",
    params=[VLLM_HALF_TYPES[0], *(pytest.param(each, marks=pytest.mark.long) for each in VLLM_HALF_TYPES[1:])],
)
def both(request, tmp_path_factory):
    return start(request.param, tmp_path_factory.mktemp(request.param), dtype="bfloat16")


def distance(setup, data):
    scored = setup.actor.log_probs(data)["old_log_probs"]
    mask = data["response_mask"].bool()
    assert mask.any(1).all()
    return float((data["rollout_log_probs"][mask] - scored[mask]).abs().mean())


def test_log_probs_are_the_actors_before_and_after_updates(both):
    data = generate(both, both.vllm, SAMPLED)
    assert distance(both, data) < 0.05
    assert differing_weights(both.vllm, both.actor.named_weights()) == []
    for _ in range(3):
        data["advantages"] = torch.randn(data["responses"].shape, generator=torch.Generator().manual_seed(0))
        both.actor.update(data, lambda outputs, rows: (-outputs.log_probs * rows["advantages"], {}))
    assert differing_weights(both.vllm, both.actor.named_weights())
    assert distance(both, data) > 0.1  # the update has moved the policy
    both.vllm.load_weights(both.actor.named_weights())
    assert differing_weights(both.vllm, both.actor.named_weights()) == []
    assert distance(both, generate(both, both.vllm, SAMPLED)) < 0.05


def test_samples_go_on_from_the_state_of_the_first_one(both):
    both.vllm.load_weights(both.actor.named_weights())  # which clears cached prefixes
    cache = both.vllm.llm.llm_engine.vllm_config.cache_config
    unit = getattr(cache, "prefix_match_unit", None) or cache.block_size  # of earlier versions
    requests = build_requests(both.prompts, SAMPLED)
    cached = {each.request: each.cached_tokens for each in both.vllm.generate(requests, SAMPLED)}
    shared = [(len(request.input_ids) - 1) // unit * unit for request in requests[:: SAMPLED.n]]
    assert [cached[place] for place in range(len(requests))] == [n for each in shared for n in (0, each, each)]
    assert unit > 16 or max(shared) >= 48
    assert distance(both, generate(both, both.vllm, SAMPLED)) < 0.05  # all from cached states


@pytest.mark.parametrize(
    "rows",
    [
        [row for row in ROWS if row["images"]] * 2,
        [{"prompt": each, "images": []} for each in ("one", "two", "three", "four")],  # one unit and a part of the next
    ],
)
def test_prompts_are_read_together(both, monkeypatch, rows):
    """One step reads all prompts up to the states that are kept, one the rest of them, and one the other samples; vLLM's own
    order takes two or more for each prompt.
    """
    both.vllm.load_weights(both.actor.named_weights())
    steps, step = [], both.vllm.engine.step
    monkeypatch.setattr(both.vllm.engine, "step", lambda: [steps.append(1), step()][1])
    prompts, sampling = both.builder(rows), replace(SAMPLED, max_tokens=1)
    requests = build_requests(prompts, sampling)
    assert len(list(both.vllm.generate(requests, sampling))) == len(prompts) * SAMPLED.n
    assert len(prompts) >= 4
    assert len(steps) <= 4


def test_only_prompts_with_several_samples_are_looked_up_in_the_queue(both, monkeypatch):
    scheduler = both.vllm.engine.engine_core.engine_core.scheduler
    looked_up, manager, take = [], scheduler.kv_cache_manager, scheduler._take_waiting_samples
    own = manager.get_computed_blocks

    def noted():
        with monkeypatch.context() as patch:
            patch.setattr(manager, "get_computed_blocks", lambda row: looked_up.append(row) or own(row))
            return take()

    monkeypatch.setattr(scheduler, "_take_waiting_samples", noted)
    for n, prompts in ((1, 0), (3, len(both.prompts))):
        generate(both, both.vllm, replace(SAMPLED, n=n))
        assert len(looked_up) >= prompts
        assert prompts or not looked_up


def checkpoint_with_head(path):
    """A checkpoint whose model prefers few tokens, so that drafts are found and kept, with a head."""
    write_checkpoint("qwen3_5", path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path)
    output = model.get_output_embeddings().weight.data
    output *= 18
    output[:180], output[184:] = 0, 0
    model.save_pretrained(path)
    publish("qwen3_5", path)
    add_head(model, path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def run_steps_of_a_gpus_start(worker):
    """By which vLLM has a GPU's kernels compiled, with drafts and without; on a CPU a start has no such steps.

    The interpreter does not know the mask of the kernel for grammars, which no engine here uses.
    """
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    warmup_kernels(worker.model_runner, worker.execute_model, lambda _: worker.sample_tokens(None))


@pytest.mark.long
def test_whatever_is_drafted_tokens_and_log_probs_are_equal(tmp_path, monkeypatch):
    """On the second runner, by the head, against drafts that are nearly all wrong: states go back exactly, also where a step is
    planned before the tokens of the last one are known, and where steps with drafts and without take turns. The tokens that the
    model prefers cannot be drafts before they have been drawn.
    """
    path = checkpoint_with_head(tmp_path)
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=300)
    options = {"max_model_len": 400, "max_images": 3, "kv_cache_bytes": 1 << 26, "image_options": builder.image_options}
    if not interpreted():
        with pytest.raises(InvalidConfig, match="first model runner does not keep their states"):
            create_engine("vllm", path, speculate=3, dtype="bfloat16", **options)
        return
    plain_places(monkeypatch)
    schedule_ahead(monkeypatch)
    monkeypatch.setattr("rollout.vllm.head_sampler.STEPS_AHEAD", 2)
    monkeypatch.setattr("rollout.vllm.head_sampler.MOST_DRAWN", 180)
    engine = create_engine("vllm", path, speculate=3, dtype="bfloat16", **options)
    assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    engine.llm.collective_rpc(run_steps_of_a_gpus_start)
    setup, sampling = (
        SimpleNamespace(builder=builder, prompts=builder(ROWS)),
        SamplingParams(4, 0.6, max_tokens=16, seed=3),
    )
    first = generate(setup, engine, sampling)
    found = generate(setup, engine, sampling)
    assert found["accepted_tokens"].sum() > max(8, 1.2 * first["accepted_tokens"].sum())
    assert (found["drafted_tokens"] > 0).all()
    own = engine.sampler._own_propose
    monkeypatch.setattr(
        engine.sampler, "_own_propose", lambda batch, *_, **__: torch.full((batch.num_reqs, 3), 200, dtype=torch.int64)
    )
    wrong = generate(setup, engine, sampling)
    assert wrong["accepted_tokens"].sum() < 8
    for name in ("responses", "response_mask", "rollout_log_probs"):
        assert torch.equal(found[name], wrong[name]), name
        assert torch.equal(found[name], first[name]), name
    monkeypatch.setattr(engine.engine.engine_core.engine_core.scheduler, "_payoff", Payoff())
    monkeypatch.setattr(Payoff, "drafts", lambda *_, **__: False)
    plain = generate(setup, engine, sampling)
    assert plain["response_mask"].any(1).all()
    assert plain["drafted_tokens"].sum() == plain["accepted_tokens"].sum() == 0
    rows_may_read_fewer_tokens(monkeypatch)
    monkeypatch.setattr(engine.sampler, "_own_propose", own)
    turns = Random(0)
    monkeypatch.setattr(Payoff, "drafts", lambda *_, **__: turns.random() < 0.5)
    mixed = generate(setup, engine, sampling)
    assert 0 < mixed["accepted_tokens"].sum() < found["accepted_tokens"].sum()
    assert 0 < mixed["drafted_tokens"].sum() < found["drafted_tokens"].sum()
    assert torch.equal(mixed["responses"], found["responses"])
    torch.testing.assert_close(mixed["rollout_log_probs"], found["rollout_log_probs"], atol=1e-5, rtol=0)
    others = [{**row, "prompt": f"Once more: {row['prompt']}"} for row in ROWS]  # of which nothing is cached
    requests = build_requests(builder(others), sampling)
    cached = {each.request: each.cached_tokens for each in engine.generate(requests, sampling)}
    read = [max(len(request.input_ids) // 16 - 1, 0) * 16 for request in requests[::4]]  # by the first sample, and kept
    assert [cached[place] for place in range(len(requests))] == [n for each in read for n in (0, each, each, each)]
    assert max(read) >= 48


@pytest.mark.long
def test_plans_and_rows_with_drafts_are_those_that_vllm_makes(tmp_path, monkeypatch):
    """Rows that end one after the other, and passes with drafts and without in turns. Rows that only become longer, by several
    tokens at once, are left as vLLM leaves them.
    """
    if not interpreted():
        pytest.skip("test_vllm_second_runner.py runs this with Triton's interpreter")
    from vllm.v1.core.sched.scheduler import Scheduler

    path = checkpoint_with_head(tmp_path)
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=300)
    for patch in (plain_places, schedule_ahead, rows_may_read_fewer_tokens):
        patch(monkeypatch)
    options = {"max_num_seqs": 3, "max_model_len": 400, "max_images": 3, "kv_cache_bytes": 1 << 26}
    engine = create_engine("vllm", path, speculate=3, dtype="bfloat16", image_options=builder.image_options, **options)
    scheduler = engine.engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "_payoff", Payoff())
    made, own = [], Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda *given: made.append(given) or own(*given))
    left, update = [], Scheduler.update_from_output

    def noted_rows(self, plan, output):
        left.extend((name, plan.scheduled_spec_decode_tokens.get(name)) for name in plan.num_scheduled_tokens)
        return update(self, plan, output)

    monkeypatch.setattr(Scheduler, "update_from_output", noted_rows)
    setup = SimpleNamespace(builder=builder, prompts=builder(ROWS[:4]))

    def plans():
        turns, found, made_before, schedule = Random(0), [], len(made), type(scheduler).schedule
        asked = iter([drafts for drafts in [turns.random() < 0.5 for _ in range(60)] for _ in range(12)])
        monkeypatch.setattr(Payoff, "drafts", lambda *_, **__: next(asked))

        def noted(*given):
            plan = schedule(scheduler, *given)
            rows, drafts = plan.scheduled_cached_reqs, [*map(len, plan.scheduled_spec_decode_tokens.values())]
            new = [None if each is None else [len(group) for group in each] for each in rows.new_block_ids]
            numbers = rows.num_computed_tokens, rows.num_output_tokens, plan.num_spec_tokens_to_schedule
            rows_held = [(each.num_output_placeholders, each.num_in_flight_tokens) for each in scheduler.running]
            numbers = *numbers, rows_held, scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            found.append((list(plan.num_scheduled_tokens.values()), drafts, new, *numbers))
            return plan

        monkeypatch.setattr(scheduler, "schedule", noted)
        data = generate(setup, engine, SamplingParams(1, 0.6, max_tokens=70, seed=3, ignore_eos=True))
        return data["responses"], data["accepted_tokens"].sum(), found, len(made) - made_before

    tokens, accepted, used_again, few = plans()
    few_left = sum(bool(drafts) for _, drafts in left)
    left.clear()
    engine.llm.reset_prefix_cache()
    monkeypatch.setattr(scheduler, "_same_rows", lambda: None)
    monkeypatch.setattr(scheduler, "_add_tokens", lambda plan, _: plan.num_scheduled_tokens)
    vllm_tokens, _, vllm_plans, all_of_them = plans()
    assert torch.equal(tokens, vllm_tokens)
    assert used_again == vllm_plans
    assert {len(drafts) for _, drafts, *_ in used_again} >= {0, 3}
    assert accepted > 0
    assert few < 0.8 * all_of_them == 0.8 * len(vllm_plans)
    assert 0 < few_left < 0.4 * sum(bool(drafts) for _, drafts in left)
