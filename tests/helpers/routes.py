"""Recorded experts for rows of tests."""

import torch
from transformers import AutoConfig

from dataproto import RaggedTensor
from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS
from dataproto.vlm import family_of
from helpers.batches import padded_log_probs
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import tiny_model


def with_routes(config, data, seed=0):
    """The rows with other experts than a router would choose, drawn at random; rows of equal prompts share theirs."""
    text, generator = config.get_text_config(), torch.Generator().manual_seed(seed)
    family = family_of(config)
    layers = text.num_hidden_layers - getattr(text, "first_k_dense_replace", 0)
    experts, choices = family.expert_count(text), family.experts_per_token(text)

    def draw(tokens):
        shares = torch.rand(int(tokens), layers, experts, generator=generator)
        return shares.topk(choices, dim=-1).indices.to(torch.uint8)

    attended, width = data["attention_mask"], data["response_mask"].shape[1]
    prompts: dict[tuple[int, ...], torch.Tensor] = {}
    rows = []
    for ids, mask in zip(data["input_ids"], attended[:, : attended.shape[1] - width], strict=True):
        key = tuple(ids[: len(mask)][mask.bool()].tolist())
        if key not in prompts:
            prompts[key] = draw(len(key))
        rows.append(prompts[key])
    recorded = data[:]
    recorded[PROMPT_ROUTED_EXPERTS] = RaggedTensor.from_list(rows)
    responses = attended[:, attended.shape[1] - width :].sum(1)
    recorded[ROUTED_EXPERTS] = RaggedTensor.from_list([draw(count) for count in responses])
    return recorded


def expert_shares(router, logits, experts):
    """The weights of a token's chosen experts by its ``logits (E,)``: by sigmoids for GLM's routers, else by a softmax; Gemma's
    router returns probabilities instead of logits, and has a factor for each expert.
    """
    if hasattr(router, "per_expert_scale"):
        total = sum(logits[expert] for expert in experts)
        return [logits[expert] / total * router.per_expert_scale[expert] for expert in experts]
    if hasattr(router, "routed_scaling_factor"):
        scores, scale = [logits[expert].sigmoid() for expert in experts], router.routed_scaling_factor
    else:
        scores, scale = [logits[expert].exp() for expert in experts], 1.0
    return [scale * score / sum(scores) for score in scores]


def router_matrix(router):
    """The weight ``(E, H)`` that makes a router's logits."""
    return router.weight if hasattr(router, "weight") else router.proj.weight


def routes_of(data, row):
    """The experts ``(n, M, k)`` of all tokens of a row."""
    return torch.cat([data[PROMPT_ROUTED_EXPERTS][row], data[ROUTED_EXPERTS][row]])


def routes_in_one_pass(model, family, row):
    """The experts ``(n, M, k)`` int64 of a row that is read in one forward pass."""
    chosen = []
    hooks = [
        router.register_forward_hook(lambda gate, args, output: chosen.append(output[2]))
        for router in family.routers(model)
    ]
    with torch.no_grad():
        padded_log_probs(model, row)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)


def write_like_a3b(path, width=32):
    """A checkpoint with 128 experts of a ``width``, 8 of a token, tiny layers, and experts that weigh as much as attention."""
    checkpoint = write_checkpoint("qwen3_vl_moe", path)
    config = AutoConfig.from_pretrained(checkpoint)
    text = config.text_config
    text.num_experts, text.num_experts_per_tok, text.num_hidden_layers, text.moe_intermediate_size = 128, 8, 4, width
    model = tiny_model("qwen3_vl_moe", config=config)
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.mlp.experts.down_proj.mul_(8.0)
    model.save_pretrained(checkpoint)
    return checkpoint


def differences_with_and_without(actor, data):
    """Mean differences of the engine's log-probs to the actor's: with the recorded experts, and with the actor's own."""
    plain = data[:]
    plain.pop(non_tensor_batch_keys=[PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS])
    mask = data["response_mask"].bool()
    return [
        float((actor.log_probs(rows)["old_log_probs"] - data["rollout_log_probs"])[mask].abs().mean())
        for rows in (data, plain)
    ]
