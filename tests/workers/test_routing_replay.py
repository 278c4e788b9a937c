"""Recorded experts in the actor: its own routes change no bit; other ones give what a loop over tokens gives, in float32 within
1e-5, gradients within `gradient_tolerance` of their norms. Rows share prompts and have images of unequal size.
"""

import pickle

import pytest
import torch
from torch.nn.functional import linear

from dataproto import DataProto, RaggedTensor
from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS
from dataproto.errors import InvalidColumn, MissingColumn
from dataproto.vlm import family_of
from helpers.batches import padded_log_probs
from helpers.engines import ROWS
from helpers.forward_rows import forward_rows
from helpers.layouts import CPU, mixed_rows
from helpers.routes import (
    differences_with_and_without,
    expert_shares,
    router_matrix,
    routes_of,
    with_routes,
    write_like_a3b,
)
from helpers.tiny_models import MOE_TYPES, gradient_tolerance, tiny_model
from rollout.engine import SamplingParams
from rollout.hf import HFEngine
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses, build_requests
from workers.model.packed_model import PackedVLM
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.reference import reference_worker
from workers.training.forward_pass import pack, sharing
from workers.training.row_checks import check_rows


def packed(model_type, replays=True):
    module = PackedVLM(tiny_model(model_type), family_of(model_type), 1.0)
    module.replays_routing = replays
    return module


def learn(module, data):
    """Log-probs, and gradients of a weighted sum."""
    module.zero_grad()
    log_probs = forward_rows(module, data, CPU).log_probs
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(2)) * data["response_mask"]
    (log_probs * weights).sum().backward()
    return log_probs.detach(), {name: p.grad for name, p in module.model.named_parameters() if p.grad is not None}


def own_routes(module, data):
    """The rows with the experts that the module's routers choose."""
    chosen = []
    hooks = [
        router.register_forward_hook(lambda router, args, output: chosen.append(output[2].to(torch.uint8)))
        for router in module.family.routers(module.model)
    ]
    with torch.no_grad():
        forward_rows(module, data, CPU)
    for hook in hooks:
        hook.remove()
    shared = sharing(module, data)
    attended, width = data["attention_mask"], data["response_mask"].shape[1]
    counts = attended[:, : attended.shape[1] - width].sum(1), attended[:, attended.shape[1] - width :].sum(1)
    sizes = [
        size for behind, *pair in zip(shared, *counts, strict=True) for size in (pair[behind:] if behind else pair)
    ]
    parts = iter(torch.stack(chosen, 1).split([int(size) for size in sizes]))
    prompts, responses = [], []
    for behind in shared.tolist():
        prompts.append(prompts[-1] if behind else next(parts))
        responses.append(next(parts))
    recorded = data[:]
    recorded[PROMPT_ROUTED_EXPERTS], recorded[ROUTED_EXPERTS] = map(RaggedTensor.from_list, (prompts, responses))
    return recorded


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_own_routes_change_no_bit(model_type):
    module = packed(model_type)
    data = mixed_rows(module.model.config)
    recorded = own_routes(module, data)
    assert sharing(module, data).sum() == 2
    (plain, gradients), (replayed, others) = learn(module, data), learn(module, recorded)
    assert torch.equal(plain, replayed)
    assert gradients.keys() == others.keys()
    assert all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())


def by_token(block, routes, args):
    """The output of a sparse layer whose tokens ``(1, S, H)`` go to these experts ``(S, k)``, one after the other."""
    (hidden,) = args
    rows = []
    for state, chosen in zip(hidden[0], routes.tolist(), strict=True):
        made, logits = 0.0, linear(state, block.gate.weight)
        for expert, share in zip(chosen, expert_shares(block.gate, logits, chosen), strict=True):
            gate, up = linear(state, block.experts.gate_up_proj[expert]).chunk(2)
            out = linear(block.experts.act_fn(gate) * up, block.experts.down_proj[expert])
            made = made + share * out
        if hasattr(block, "shared_expert"):
            made = made + block.shared_expert_gate(state).sigmoid() * block.shared_expert(state)
        if hasattr(block, "shared_experts"):
            made = made + block.shared_experts(state)
        rows.append(made)
    return torch.stack(rows)[None]


def routed(router, routes, output):
    """The output of a router that sends tokens to these experts ``(S, k)``, one after the other."""
    shares = [torch.stack(expert_shares(router, each, chosen)) for each, chosen in zip(output[0], routes.tolist())]
    return output[0], torch.stack(shares), routes.long()


def one_after_the_other(model, data):
    """Log-probs ``(B, R)`` by Hugging Face's model, row by row, with the recorded experts."""
    found, family = [], family_of(model)
    blocks = [model.get_submodule(name.removesuffix(".experts")) for name in family.expert_layers(model)]
    if family.model_type == "gemma4+moe":  # whose experts lie in the decoder layer itself
        blocks = family.routers(model)
    for row in range(len(data)):
        routes = routes_of(data, row)
        hooks = [
            block.register_forward_hook(
                lambda block, args, output, number=number, routes=routes: (
                    routed(block, routes[:, number], output)
                    if hasattr(block, "per_expert_scale")
                    else by_token(block, routes[:, number], args)
                )
            )
            for number, block in enumerate(blocks)
        ]
        found.append(padded_log_probs(model, data[row : row + 1]))
        for hook in hooks:
            hook.remove()
    return torch.cat(found)


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_other_routes_give_what_a_loop_over_tokens_gives(model_type):
    module, model = packed(model_type), tiny_model(model_type)
    data = with_routes(model.config, mixed_rows(model.config)[[0, 1, 3, 4]])
    found, gradients = learn(module, data)
    expected = one_after_the_other(model, data)
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) * data["response_mask"]
    (expected * weights).sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in theirs.items():
        error = (gradients[name] - gradient).norm()
        assert error <= gradient_tolerance(model_type) * gradient.norm() + 1e-6, name
    matrix = router_matrix(family_of(model).routers(model)[0])
    (name,) = (name for name, weight in model.named_parameters() if weight is matrix)
    assert gradients[name].norm() > 1e-3
    assert (forward_rows(packed(model_type, replays=False), data, CPU).log_probs - found).abs().max() > 1e-3


def test_a_shared_prompt_has_its_experts_once():
    module = packed("qwen3_vl_moe")
    data = with_routes(module.model.config, mixed_rows(module.model.config))
    shared = sharing(module, data)
    rows = pack(module, data, shared)
    assert rows.routed_experts.shape == (rows.input_ids.shape[1], 2, 2)
    expected = [
        routes_of(data, row) if not behind else data[ROUTED_EXPERTS][row] for row, behind in enumerate(shared.tolist())
    ]
    assert torch.equal(rows.routed_experts, torch.cat(expected))


def test_experts_of_a_shared_prompt_travel_once(tmp_path):
    prompt = torch.randint(256, (1000, 48, 8), dtype=torch.uint8)  # of Qwen3-VL-30B-A3B
    responses = [torch.randint(256, (10, 48, 8), dtype=torch.uint8) for _ in range(8)]
    columns = RaggedTensor.from_list([prompt] * 8), RaggedTensor.from_list(responses)
    data = DataProto.from_dict(non_tensors=dict(zip((PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS), columns, strict=True)))
    wire, file = pickle.dumps(data, protocol=5), tmp_path / "rows"
    data.save_to_disk(file)
    for size in (len(wire), file.stat().st_size):
        assert size < 1.05 * (1000 + 8 * 10) * 48 * 8  # a byte for each layer, token and choice
    for received in (pickle.loads(wire), DataProto.load_from_disk(file), DataProto.concat(data[[3, 1]].chunk(2))):
        for row in (0, 1):
            assert torch.equal(received[PROMPT_ROUTED_EXPERTS][row], prompt)
        assert received[ROUTED_EXPERTS].dtype == torch.uint8
    assert torch.equal(pickle.loads(wire)[ROUTED_EXPERTS][5], responses[5])


def test_columns_that_do_not_fit_are_named():
    module = packed("qwen3_vl_moe")
    data = with_routes(module.model.config, mixed_rows(module.model.config))
    check_rows(data, module)
    alone = data[:]
    alone.pop(non_tensor_batch_keys=[PROMPT_ROUTED_EXPERTS])
    with pytest.raises(MissingColumn, match="prompt_routed_experts"):
        check_rows(alone, module)
    short = data[:]
    short[ROUTED_EXPERTS] = data[PROMPT_ROUTED_EXPERTS]
    with pytest.raises(InvalidColumn, match=r"'routed_experts', row 0: \d+ tokens, of 5 attended"):
        check_rows(short, module)
    deep = data[:]
    deep[ROUTED_EXPERTS] = RaggedTensor(data[ROUTED_EXPERTS].values[:, :1], data[ROUTED_EXPERTS].lengths)
    with pytest.raises(InvalidColumn, match=r"has \(1, 2\) layers and choices a token, the model \(2, 2\)"):
        check_rows(deep, module)
    odd = data[:]
    odd[ROUTED_EXPERTS] = RaggedTensor(data[ROUTED_EXPERTS].values + 9, data[ROUTED_EXPERTS].lengths)
    with pytest.raises(InvalidColumn, match="experts outside of the model's 4"):
        check_rows(odd, module)


@pytest.mark.slow
def test_the_difference_of_engine_and_actor_halves(tmp_path):
    """In bfloat16, of a model with the mixture of Qwen3-VL-30B-A3B."""
    path = write_like_a3b(tmp_path)
    engine = HFEngine(path, dtype="bfloat16", device=CPU, routed_experts=True)
    prompts = PromptBuilder.from_pretrained(path, max_prompt_length=300)(ROWS)
    sampling = SamplingParams(n=4, max_tokens=24, ignore_eos=True)
    completions = list(engine.generate(build_requests(prompts, sampling), sampling))
    data = attach_responses(prompts, completions, sampling, engine.family, pad_token_id=0)
    actor = ActorWorker(ActorConfig(path, dtype="bfloat16"), CPU)
    replayed, plain = differences_with_and_without(actor, data)
    assert replayed <= plain / 2, f"mean difference {replayed:.2e} with replay, {plain:.2e} without"


def test_the_actor_without_its_adapters_chooses_for_itself(tmp_path):
    """As a reference with a model of its own; the actor goes on replaying, also after an error."""
    tiny_model("qwen3_vl_moe").save_pretrained(tmp_path)
    config = ActorConfig(str(tmp_path), lora_rank=2)
    actor = ActorWorker(config, CPU)
    reference = reference_worker(config.frozen(), actor)
    plain = mixed_rows(actor.module.model.config)
    data = with_routes(actor.module.model.config, plain)
    replayed, chosen = (actor.log_probs(rows)["old_log_probs"] for rows in (data, plain))
    assert (replayed - chosen).abs().max() > 1e-3
    assert torch.equal(reference.log_probs(data)["ref_log_prob"], chosen)
    with pytest.raises(MissingColumn):
        reference.log_probs(data.select(["input_ids"]))
    assert torch.equal(actor.log_probs(data)["old_log_probs"], replayed)
