"""Bytes that a role takes on its fullest device, from sizes alone.

A float32 parameter that is trained takes 4 bytes, and as many for its gradient and each of AdamW's two moments; computation in
bfloat16 takes a copy of 2 bytes. Weights that are never trained are kept in the numbers of the computation, or in 4 bits.
Activations are the tensors that the backward pass reads, which is what autograd keeps.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from dataproto.vlm import family_of
from dataproto.vlm.costs import attention_width, head_dim, mlp_width, of_layers
from recipes.plan.model_size import ModelSize
from recipes.plan.rows import BatchSizes
from recipes.plan.setting import GIB, Role, Setting
from workers.model.model_config import ModelConfig, Unsharded
from workers.training.micro_batches import EARLY

HALF, WHOLE = 2, 4  # bytes of a number in bfloat16 and in float32
ASLEEP = GIB  # of a sleeping vLLM engine, measured with 3B on an H200
ENGINE_RESERVE = 4 * GIB  # of an awake one next to weights and cache: activations, graphs
MOMENT_BYTES = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256), "muon": 8.0}  # of a trained parameter; of Muon at most
FOUR_BIT_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # of each number: with its share of the scales, and of their scales
EXPANDED_BYTES = 14  # of each number of a weight of 4 bits while it is expanded: indices, halves and the result
CHUNK = 2**28  # logits in memory at a time
LOGIT_BYTES, SCORED_LOGIT_BYTES = 13, 8  # of each of them and what is computed from it, with its gradient and without


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on its fullest device in one phase."""

    role: str
    weights: int = 0  # float32 masters; an engine's own weights
    copies: int = 0  # bfloat16 copies, or what FSDP has gathered
    gradients: int = 0
    moments: int = 0
    activations: int = 0  # of the decoder
    tower: int = 0  # activations of the vision tower
    logits: int = 0  # one chunk, with the float32 gradient of the head
    kv_cache: int = 0
    other: int = 0  # of an engine
    host: int = 0  # in host memory, not on the device

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name not in ("role", "host"))


def held(setting: Setting, role: Role) -> RoleMemory:
    """What a role holds between passes: weights, moments and copies, on the device or, with offload, in host memory."""
    size, layout, compute = setting.size_of(role), setting.layout, setting.compute
    mine = size.on_rank(layout)
    trained = trained_on_rank(setting, role)
    autocast = layout.shards == 1 and layout.tp > 1
    four_bit = size.four_bit / layout.pp  # whole on every rank
    frozen = mine - trained - four_bit / layout.shards
    half = HALF if setting.half and not autocast else WHOLE
    weights = round(WHOLE * trained + half * frozen + FOUR_BIT_BYTES * four_bit)
    copies = HALF * trained if setting.half and layout.shards == 1 and not autocast else 0
    optimizer = setting.critic_optimizer if role == "critic" else setting.optimizer
    moments = round(MOMENT_BYTES[optimizer] * trained)
    if compute.offload and layout.shards > 1:
        return RoleMemory(role, host=weights + WHOLE * trained + moments)
    return RoleMemory(role, weights=weights, copies=copies, moments=moments)


def idle(memory: RoleMemory, moments_only: bool = False) -> RoleMemory:
    """What a role holds while no call uses it with ``offload_idle``, or in a pass without moments: the rest is on the host."""
    if moments_only:
        return replace(memory, moments=0, host=memory.host + memory.moments)
    return RoleMemory(memory.role, host=memory.host + memory.weights + memory.moments)


def trained_on_rank(setting: Setting, role: Role) -> int:
    """Trained parameters of the fullest rank."""
    size = setting.size_of(role)
    return round(size.on_rank(setting.layout) * size.trained / size.total) if role != "reference" else 0


def updating(setting: Setting, memory: RoleMemory, role: Role) -> RoleMemory:
    """What a role that learns takes at the height of a backward pass, where all activations and a chunk of logits exist.

    From the second micro-batch on, all gradients exist then too. With a single one they are made while activations are freed,
    so the larger of both counts. So it is with the whole gradients that FSDP scatters as the pass ends.

    Args:
        memory: what the role holds.
    """
    size, config, compute, layout = setting.size_of(role), setting.config, setting.compute, setting.layout
    whole = setting.micro_batches(learns=True, fullest=True)
    per_token, per_patch = decoder_bytes(setting), tower_bytes(config, compute, size.tower_trained)
    parts = [part.times(1 / layout.sp) for part in whole]
    fullest = max(parts, key=lambda part: part.tokens * per_token.kept + part.patches * per_patch.kept)
    layers = 1 / layout.pp * min(len(parts), layout.pp)  # a stage keeps as many micro-batches as stages follow it
    activations = fullest.tokens * (per_token.kept * layers / layout.tp + per_token.again)
    activations += exchanged(setting, max(part.tokens for part in parts), learns=True)
    early = len(parts) > 1 and layout.pp == 1 and fullest.patches <= EARLY  # also those of the next micro-batch
    tower = fullest.patches * (per_patch.kept * (1 + early) + per_patch.again) / (layout.tp * layout.sp)
    text, logits = config.get_text_config(), 0.0
    if role != "critic":  # a chunk of them, and the gradient of the head in float32 while its chunks are summed
        chunk = LOGIT_BYTES * min(fullest.logits * int(text.vocab_size), CHUNK)
        logits = (chunk + WHOLE * int(text.hidden_size) * int(text.vocab_size)) / layout.tp
    gradients = own_gradients(setting, role)
    if compute.leaves_unsharded("gradients") and len(parts) > 1:
        gradients = round(WHOLE * size.gathered(layout) * size.trained / size.total)
    if len(parts) == 1 and gradients:  # of the two heights, before and after the decoder's backward pass
        after = gradients * size.layers / size.total
        activations, logits, gradients = (
            (0.0, 0.0, gradients) if after > activations + logits else (activations, logits, 0)
        )
    copies = memory.copies + gathered(setting, size, "weights") + EXPANDED_BYTES * size.largest_four_bit
    if (scattered := whole_gradients(setting, size)) > activations + logits:
        activations, logits, copies = 0.0, 0.0, copies + scattered
    work = {"activations": round(activations), "tower": round(tower), "logits": round(logits)}
    return RoleMemory(**vars(memory) | work | {"copies": round(copies), "gradients": gradients})


def own_gradients(setting: Setting, role: Role) -> int:
    """Bytes of the gradients of the fullest rank."""
    on_host = setting.compute.offload and setting.layout.shards > 1
    return 0 if on_host else WHOLE * trained_on_rank(setting, role)


def scoring(setting: Setting, memory: RoleMemory, role: Role) -> RoleMemory:
    """What a role takes in a pass without gradients, at the highest of three places: a layer of the tower, one of the decoder,
    and a chunk of logits with the states that it is computed from. Each frees what the one before it took, and sp divides tokens.
    """
    size, compute, layout = setting.size_of(role), setting.compute, setting.layout
    text = setting.config.get_text_config()
    parts = [part.times(1 / layout.sp) for part in setting.micro_batches(learns=False, fullest=True)]
    tokens = max(part.tokens for part in parts)
    per_patch = tower_bytes(setting.config, compute, True).passing / (layout.tp * layout.sp)
    logit = SCORED_LOGIT_BYTES / (2 if compute.compile else 1)
    chunk = min(max(part.logits for part in parts) * int(text.vocab_size), CHUNK)
    heights = {
        "activations": tokens * decoder_bytes(setting).passing / layout.tp + exchanged(setting, tokens, learns=False),
        "tower": max(part.patches for part in parts) * per_patch,
        "logits": (tokens * HALF * int(text.hidden_size) + chunk * logit) / layout.tp,
    }
    highest = max(heights, key=lambda place: heights[place])
    copies = memory.copies + gathered(setting, size, "scoring") + EXPANDED_BYTES * size.largest_four_bit
    return RoleMemory(**vars(memory) | {"copies": round(copies), highest: round(heights[highest])})


def gathered(setting: Setting, size: ModelSize, kept: Unsharded) -> float:
    """Bytes of weights that FSDP has gathered at a time, in the passes that ``kept`` names.

    The root's weights (embedding, head, norm) stay from the first to the last use; of the layers, the one that runs and the next.
    """
    layout = setting.layout
    if layout.shards == 1:
        return 0
    layers = 2 * size.computed_layer(layout)
    if setting.compute.leaves_unsharded(kept):
        dense = (size.layers - size.experts - size.four_bit) / layout.pp / layout.tp
        layers = dense + size.experts_here(layout) + size.vision
    return (HALF if setting.half else WHOLE) * (_root(size, layout.tp) + layers)


def whole_gradients(setting: Setting, size: ModelSize) -> float:
    """Bytes of gradients of the root and of one layer as FSDP scatters them, in the numbers of the pass and in float32.

    They exist as a backward pass ends: the embedding's gradient comes last, and the root's are scattered together.
    """
    if setting.layout.shards == 1:
        return 0
    number = (HALF if setting.half else WHOLE) + WHOLE
    return number * (_root(size, setting.layout.tp) + size.computed_layer(setting.layout))


def _root(size: ModelSize, tp: int) -> float:
    """Parameters outside the layers on a rank of tensor parallelism."""
    return (size.embedding + size.head + size.rest) / tp


def exchanged(setting: Setting, tokens: float, learns: bool) -> float:
    """Bytes of the tokens that a rank computes for others with ep, in as many layers as keep them."""
    layout, text = setting.layout, setting.config.get_text_config()
    group = layout.ep * layout.tp
    if not setting.size.experts or group == 1:
        return 0.0
    once = not learns or setting.compute.activation_checkpointing == "full"
    layers = 1 if once else int(text.num_hidden_layers) // layout.pp
    width = int(text.hidden_size) + 3 * int(text.moe_intermediate_size)
    chosen = family_of(setting.config).experts_per_token(text)
    return (group - 1) * tokens / layout.tp * chosen * width * HALF * layers


@dataclass(frozen=True)
class TokenBytes:
    """Bytes for each token, or patch, of all layers on all ranks together."""

    kept: float  # by autograd, of all layers
    again: float  # of the one layer that is computed again
    passing: float  # of one layer in a pass without gradients, which frees what it has read


def decoder_bytes(setting: Setting) -> TokenBytes:
    """Activations of the decoder for a token, by checkpointing mode.

    A layer keeps the input and the output of each norm and product, queries, keys, values and the result of attention, and in
    the gated MLP the gate, its activation, the other factor and their product. Compiled layers compute norms and the activation
    again. Without gradients the height is in the MLP, with the residual, its norm, and two of these factors with their product,
    which a compiled layer writes into one of them, or in attention, with queries and keys before and after they are rotated.
    """
    text, compute = setting.config.get_text_config(), setting.compute
    hidden, heads, wide = int(text.hidden_size), attention_width(text), mlp_width(text)
    keys = 2 * int(of_layers(text, "num_key_value_heads")) * head_dim(text)
    of_hidden, of_wide = (2, 3) if compute.compile else (6, 4)
    layer = of_hidden * hidden + 2 * heads + keys + of_wide * wide
    selective = 3 * hidden + 2 * heads + keys + 2 * wide
    passing = 2 * hidden + max((2 if compute.compile else 3) * wide, 3 * heads + 2 * keys)
    return _by_mode(compute, int(text.num_hidden_layers), layer, selective, hidden, passing)


def tower_bytes(config: Any, compute: ModelConfig, trained: bool) -> TokenBytes:
    """Activations of the vision tower for a patch: none without a tower, and none are kept of one that is not trained.

    FlashAttention's heads are a multiple of 32 wide, so queries, keys and values are kept padded.
    """
    if family_of(config).vision_tower is None:
        return TokenBytes(0, 0, 0)
    vision, gated = config.vision_config, family_of(config).gated_tower
    width = int(getattr(vision, "embed_dim", None) or vision.hidden_size)
    heads = int(getattr(vision, "num_heads", None) or vision.num_attention_heads)
    inner_size = None if getattr(vision, "embed_dim", None) else vars(vision).get("intermediate_size")
    wide = int(inner_size or width * vision.mlp_ratio)
    padded = -(-width // heads // 32) * 32 * heads
    attention = 4 * width if padded == width else 3 * width + 4 * padded
    inner = 4 * wide if gated else 2 * wide
    layer = 2 * width + attention + inner * 3 // 4 if compute.compile else 6 * width + attention + inner
    selective = 6 * width + padded + inner // 2
    passing = 2 * width + max(((3 if gated else 2) - compute.compile) * wide, 5 * width)
    if not trained or compute.freeze_vision:
        return TokenBytes(0, 0, passing * HALF)
    return _by_mode(compute, tower_layers(config), layer, selective, width, passing)


def tower_layers(config: Any) -> int:
    """Layers of the vision tower; 0 without one."""
    if family_of(config).vision_tower is None:
        return 0
    return int(getattr(config.vision_config, "depth", None) or config.vision_config.num_hidden_layers)


def _by_mode(compute: ModelConfig, layers: int, layer: int, selective: int, hidden: int, passing: int) -> TokenBytes:
    mode = compute.activation_checkpointing
    kept = {"none": layer, "selective": selective, "full": hidden}[mode]
    again = {"none": 0, "selective": max(layer - selective, 0), "full": layer}[mode]
    return TokenBytes(HALF * layers * kept, HALF * again, HALF * passing)


def kv_bytes(text: Any) -> int:
    """Bytes of keys and values for a token."""
    if latent := getattr(text, "kv_lora_rank", None):  # what keys and values are expanded from
        return int(text.num_hidden_layers) * int(latent + text.qk_rope_head_dim) * HALF
    return 2 * int(text.num_hidden_layers) * int(of_layers(text, "num_key_value_heads")) * head_dim(text) * HALF


def awake(setting: Setting, share: BatchSizes, rows: int) -> RoleMemory:
    """An engine that generates ``rows`` rows of its ``share`` at a time. vLLM takes ``memory_share`` of the device."""
    weights = setting.size.total * HALF // setting.engine_parallel
    if setting.engine == "vllm":
        whole = round(float(setting.engine_options.get("memory_share", 0.5)) * setting.device.memory)
        return RoleMemory("engine", weights, kv_cache=max(whole - weights - ENGINE_RESERVE, 0), other=ENGINE_RESERVE)
    text = setting.config.get_text_config()
    cache = int(share.lengths.topk(rows).values.sum()) * kv_bytes(text)
    return RoleMemory("engine", weights, kv_cache=cache, logits=2 * WHOLE * rows * int(text.vocab_size))


def asleep(setting: Setting) -> RoleMemory:
    """The engine while another role works; the Hugging Face engine keeps its weights, and vLLM where its ``sleep_level`` is 0."""
    if setting.engine == "vllm":
        stays = setting.engine_options.get("sleep_level") == 0
        weights = setting.size.total * HALF // setting.engine_parallel
        return RoleMemory("engine", weights if stays else 0, other=ASLEEP)
    return RoleMemory("engine", setting.size.total * HALF)
