"""The experts that the Hugging Face engine records, against those that its model chooses when it reads a whole row at once."""

from dataclasses import replace

import pytest
import torch

from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS
from dataproto.errors import InvalidConfig, InvalidRow
from helpers.batches import prompt_batch
from helpers.checkpoints import write_checkpoint
from helpers.engines import ROWS
from helpers.routes import routes_in_one_pass, routes_of
from helpers.tiny_models import MOE_TYPES, tiny_model
from rollout.engine import Completion, SamplingParams, has_option
from rollout.hf import HFEngine
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses, build_requests, expert_columns
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker

CPU = torch.device("cpu")
SAMPLED = SamplingParams(n=2, max_tokens=6, seed=1, ignore_eos=True)


@pytest.fixture(scope="module", params=MOE_TYPES)
def engine(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(path)
    return HFEngine(str(path), max_num_seqs=4, device=CPU, routed_experts=True)


def prompts_for(engine):
    return prompt_batch(engine.model.config, [[(4, 6), (8, 4)], [(6, 6)], []], texts=[4, 7, 3])


def check_experts(engine, data):
    model = tiny_model(engine.family.model_type)
    for row in range(len(data)):
        found, expected = routes_of(data, row), routes_in_one_pass(model, engine.family, data[row : row + 1])
        assert found.dtype == torch.uint8
        assert torch.equal(found[:-1].long().sort(-1).values, expected[:-1].sort(-1).values)
        assert torch.equal(found[-1], found[-2])  # the last token was not read


def test_experts_are_those_of_one_pass_over_the_row(engine):
    prompts = prompts_for(engine)
    completions = list(engine.generate(build_requests(prompts, SAMPLED), SAMPLED))
    data = attach_responses(prompts, completions, SAMPLED, engine.family, pad_token_id=0)
    check_experts(engine, data)
    assert len(data[PROMPT_ROUTED_EXPERTS].storage) == int(prompts["attention_mask"].sum())  # once for both samples
    assert data[ROUTED_EXPERTS].lengths.tolist() == [6] * 6


def test_an_interrupted_response_keeps_its_experts(engine):
    prompts = prompts_for(engine)
    requests = build_requests(prompts, SAMPLED)
    numbers = {engine.submit(request, SAMPLED): place for place, request in enumerate(requests)}
    done = [each for _ in range(3) for each in engine.poll()]
    engine.load_weights(list(engine.model.named_parameters()))  # the same ones; all prompts and tokens are read again
    while engine.unfinished:
        done += engine.poll()
    completions = [
        Completion(numbers[e.request], e.token_ids, e.log_probs, e.finish_reason, routed_experts=e.routed_experts)
        for e in done
    ]
    check_experts(engine, attach_responses(prompts, completions, SAMPLED, engine.family, pad_token_id=0))


@pytest.mark.parametrize("passes", [1, 3])
def test_a_pass_that_was_interrupted_leaves_no_experts(engine, passes):
    """In the pass that reads prompts, or in a later one, as by Ctrl-C or where there is no memory."""
    prompts, seen = prompts_for(engine), 0

    def interrupt(*_):
        nonlocal seen
        seen += 1
        if seen == passes:
            raise KeyboardInterrupt

    layer = engine.family.routers(engine.model)[-1]
    handle = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(build_requests(prompts, SAMPLED), SAMPLED))
    handle.remove()
    completions = list(engine.generate(build_requests(prompts, SAMPLED), SAMPLED))
    check_experts(engine, attach_responses(prompts, completions, SAMPLED, engine.family, pad_token_id=0))


def test_a_request_that_continues_another_has_the_experts_of_both(engine):
    request = build_requests(prompts_for(engine), SAMPLED)[4]
    whole = engine.submit(request, SAMPLED, keep=True)
    (first,) = drain(engine)
    tokens = torch.tensor(first.token_ids)
    positions = engine.family.extend_positions(
        request.position_ids[None], torch.ones(1, len(request.input_ids)).long(), 6
    )
    later = type(request)(
        [],
        torch.cat([request.input_ids, tokens]),
        torch.cat([request.token_types, torch.zeros(6, dtype=torch.int8)]),
        torch.cat([request.position_ids, positions[0]], -1),
        seed=5,
    )
    engine.fork(whole, later, SAMPLED)
    (second,) = drain(engine)
    engine.submit(later, SAMPLED)
    (alone,) = drain(engine)
    assert second.token_ids == alone.token_ids
    assert len(second.routed_experts) == len(request.input_ids) + 6 + 5
    if engine.family.recurrent_mixers is None:
        assert second.cached_tokens  # a part was not read again
    assert torch.equal(second.routed_experts, alone.routed_experts)
    engine.abort(whole)


def drain(engine):
    done = []
    while engine.unfinished:
        done += engine.poll()
    return done


def test_experts_of_other_tokens_are_refused():
    for named in (2, 5):
        with pytest.raises(InvalidRow, match=f"row 0: the engine named the experts of {named} of 4 tokens"):
            expert_columns([torch.zeros(named, 1, 1)], [2], [2], [0])


def test_responses_of_which_some_have_no_experts_are_refused(engine):
    prompts = prompts_for(engine)
    done = list(engine.generate(build_requests(prompts, SAMPLED), SAMPLED))
    mixed = [replace(each, routed_experts=None) if each.request in (2, 5) else each for each in done]
    with pytest.raises(InvalidRow, match=r"row 2: .* the experts of 0 of \d+ tokens: turn routing replay off"):
        attach_responses(prompts, mixed, SAMPLED, engine.family, pad_token_id=0)


def test_an_engine_that_names_no_experts_is_refused(tmp_path):
    """Else replay would be off, and nobody would know."""
    path = write_checkpoint("qwen3_vl_moe", tmp_path)
    prompts = PromptBuilder.from_pretrained(path, max_prompt_length=300)(ROWS[:1])
    worker = RolloutWorker(RolloutConfig(path, "hf"), lambda dtype: weights)
    weights = list(worker.engine.model.named_parameters())
    generate = worker.engine.generate
    worker.engine.generate = lambda *given: (replace(each, routed_experts=None) for each in generate(*given))
    with pytest.raises(InvalidConfig, match="'hf' has named no experts of its responses, which routing replay needs"):
        worker.generate(prompts, SamplingParams(max_tokens=2))
    worker.replays = False
    assert ROUTED_EXPERTS not in worker.generate(prompts, SamplingParams(max_tokens=2))


def test_engines_say_whether_they_return_experts():
    assert has_option("hf", "routed_experts")
    assert not has_option("rollout.hf.adapter_engine:AdapterEngine", "routed_experts")
