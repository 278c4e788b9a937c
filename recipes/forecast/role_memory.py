"""Bytes that a role takes on its fullest device, from sizes alone.

A float32 parameter that is trained takes 4 bytes, and as many for its gradient and each of AdamW's two moments; computation in
bfloat16 takes a copy of 2 bytes. Weights that are never trained are kept in the numbers of the computation, or in 4 bits.
Activations are the tensors that the backward pass reads, which is what autograd keeps.
"""

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from dataproto.vlm import family_of
from dataproto.vlm.costs import attention_width, head_dim, of_layers
from recipes.forecast.batch_sizes import BatchSizes, MicroBatchSize, PromptSizes, patch_bytes
from recipes.forecast.devices import GIB, Device
from recipes.forecast.model_size import ModelSize, mlp_width
from rollout.engine import expert_dtype
from workers.model.logprobs import CHUNK_ELEMENTS
from workers.model.model_config import ModelConfig, OptimizerKind, Unsharded
from workers.ranks.layout import Layout

ASLEEP = GIB  # of a sleeping vLLM engine, measured with 3B on an H200
ENGINE_RESERVE = 4 * GIB  # of an awake one beside weights and cache: activations, graphs
MOMENT_BYTES = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256), "muon": 4.0}  # of each parameter that the kind steps
MUON_KERNELS = (
    32 * 2**20
)  # that a CPU compiles for Muon's products in bfloat16; 24 of the small model's, by measurement
FOUR_BIT_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # of each number: with its share of the scales, and of their scales
EXPANDED_BYTES = 14  # of each number of a weight of 4 bits while it is expanded: indices, halves and the result
LOGIT_BYTES = {"cuda": 13, "cpu": 12}  # of each logit in a chunk and what is computed from it, with its gradient
SCORED_LOGIT_BYTES = 8  # without gradients: the logit and one more number; a compiled sum reads the logit alone


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
    features: int = 0  # of a tower that is not trained, kept for the passes of a step
    routes: int = 0  # experts that the engine has recorded, for routing replay
    other: int = 0  # of an engine
    host: int = 0  # in host memory, not on the device

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name not in ("role", "host"))


def sharded(layout: Layout) -> int:
    """The number of ranks that FSDP spreads weights over; 1 without FSDP."""
    return layout.shards


def held(
    role: str,
    size: ModelSize,
    compute: ModelConfig,
    layout: Layout,
    device: Device,
    trains: bool,
    optimizer: OptimizerKind = "adamw",
) -> RoleMemory:
    """What a role holds between passes: weights, moments and copies, on the device or, with offload, in host memory.

    >>> size = ModelSize(0, 900, embedding=50, head=50, rest=0, largest_layer=90, trained=1000, tower_trained=True)
    >>> from recipes.forecast.devices import DEVICES
    >>> held("actor", size, ModelConfig(), Layout(), DEVICES["h200"], trains=True)
    RoleMemory(role='actor', weights=4000, copies=2000, gradients=0, moments=8000, activations=0, tower=0, logits=0, \
kv_cache=0, features=0, routes=0, other=0, host=0)
    """
    mine = size.on_rank(layout)
    trained = round(mine * size.trained / size.total) if trains else 0
    half, autocast = _half(compute, device), sharded(layout) == 1 and layout.tp > 1
    four_bit = size.four_bit / layout.pp  # whole on every rank
    frozen = mine - trained - four_bit / sharded(layout)
    weights = round(4 * trained + (2 if half and not autocast else 4) * frozen + FOUR_BIT_BYTES * four_bit)
    copies = 2 * trained if half and sharded(layout) == 1 and not autocast else 0
    moments = moment_bytes(trained, size, optimizer)
    if compute.offload and sharded(layout) > 1:
        return RoleMemory(role, host=weights + 4 * trained + moments)
    return RoleMemory(role, weights=weights, copies=copies, moments=moments)


def idle(memory: RoleMemory, moments_alone: bool = False) -> RoleMemory:
    """What a role holds while no call uses it with ``offload_idle``, or in a pass that needs no moments: the rest is on the host.

    >>> idle(RoleMemory("actor", weights=40, copies=20, moments=80))  # copies are made from weights
    RoleMemory(role='actor', weights=0, copies=0, gradients=0, moments=0, activations=0, tower=0, logits=0, kv_cache=0, \
features=0, routes=0, other=0, host=120)
    """
    if moments_alone:
        return replace(memory, moments=0, host=memory.host + memory.moments)
    return RoleMemory(memory.role, host=memory.host + memory.weights + memory.moments)


def moment_bytes(trained: int, size: ModelSize, optimizer: OptimizerKind) -> int:
    """What the optimizer keeps for so many of the trained parameters.

    >>> size = ModelSize(0, 900, embedding=50, head=50, rest=0, largest_layer=90, trained=1000, tower_trained=True, matrices=900)
    >>> moment_bytes(1000, size, "adamw"), moment_bytes(1000, size, "muon")
    (8000, 4400)
    """
    if optimizer != "muon":
        return round(MOMENT_BYTES[optimizer] * trained)
    matrices = trained * size.matrices / max(size.trained, 1)
    return round(MOMENT_BYTES["muon"] * matrices + MOMENT_BYTES["adamw"] * (trained - matrices))


def updating(
    memory: RoleMemory,
    size: ModelSize,
    config: Any,
    compute: ModelConfig,
    layout: Layout,
    device: Device,
    parts: list[MicroBatchSize],
    makes_logits: bool = True,
) -> RoleMemory:
    """What a role that learns takes at the height of a backward pass, where all activations and a chunk of logits exist. Sp
    divides the tokens.

    From the second micro-batch on, all gradients exist then too. With a single one they are made while activations are freed,
    so the larger of both counts. So it is with the whole gradients that FSDP scatters as the pass ends.
    """
    trained = trained_on_rank(size, layout)
    gradients = 0 if compute.offload and sharded(layout) > 1 else 4 * trained
    if compute.leaves_unsharded("gradients") and len(parts) > 1:
        gradients = 4 * trained * sharded(layout)
    per_token = decoder_bytes(config.get_text_config(), size, compute, device)
    per_patch = tower_bytes(config, compute, device, size.tower_trained)
    parts = [part.times(1 / layout.sp) for part in parts]
    fullest = max(parts, key=lambda part: part.tokens * per_token.kept + part.patches * per_patch.kept)
    layers = 1 / layout.pp * min(len(parts), layout.pp)  # a stage keeps as many micro-batches as stages follow it
    activations = fullest.tokens * (per_token.kept * layers / layout.tp + per_token.again)
    if device.on_cpu and compute.activation_checkpointing == "none":
        activations += gathered_bytes(config.get_text_config(), device, fullest) * layers / layout.tp
    tower = fullest.patches * (per_patch.kept + per_patch.again) / (layout.tp * layout.sp)
    tower += joined_pixels(config, device, fullest)
    logits = head_bytes(config.get_text_config(), fullest.logits, size, device, layout) if makes_logits else 0
    if len(parts) == 1 and gradients:  # of the two heights, before and after the decoder's backward pass
        before, after = activations + logits, gradients * size.layers / size.total
        if after > before:
            activations, logits = 0.0, 0
        else:
            gradients = 0
    copies = memory.copies + gathered(size, compute, layout, device, "weights") + EXPANDED_BYTES * size.largest_four_bit
    if (scattered := whole_gradients(size, layout, device, compute)) > activations + logits:
        activations, logits, copies = 0.0, 0, copies + scattered
    return RoleMemory(
        memory.role,
        memory.weights,
        copies,
        gradients,
        memory.moments,
        round(activations),
        round(tower),
        logits,
        host=memory.host,
    )


def stepping(memory: RoleMemory, size: ModelSize, compute: ModelConfig, layout: Layout) -> RoleMemory:
    """What a role that learns takes in an optimizer step: what it holds, and all gradients."""
    gradients = 0 if compute.offload and sharded(layout) > 1 else 4 * trained_on_rank(size, layout)
    return replace(memory, gradients=gradients)


def trained_on_rank(size: ModelSize, layout: Layout) -> int:
    """Trained parameters of the fullest rank."""
    return round(size.on_rank(layout) * size.trained / size.total)


def scoring(
    memory: RoleMemory,
    size: ModelSize,
    config: Any,
    compute: ModelConfig,
    layout: Layout,
    device: Device,
    parts: list[MicroBatchSize],
) -> RoleMemory:
    """What a role takes in a pass without gradients, at the highest of three places: a layer of the tower, one of the decoder,
    and a chunk of logits with the states that it is computed from. Each frees what the one before it took, and sp divides tokens.
    """
    text, number = config.get_text_config(), device.bytes_of_number
    parts = [part.times(1 / layout.sp) for part in parts]
    per_token = decoder_bytes(text, size, compute, device).passing / layout.tp
    per_patch = tower_bytes(config, compute, device, True).passing / (layout.tp * layout.sp)
    states = max(part.tokens for part in parts) * number * int(text.hidden_size) / layout.tp
    logit = SCORED_LOGIT_BYTES / (2 if compute.compile else 1)
    heights = {
        "activations": max(part.tokens for part in parts) * per_token,
        "tower": max(part.patches * per_patch + joined_pixels(config, device, part) for part in parts),
        "logits": states + max(chunk_logits(text, part.logits, device) for part in parts) * logit / layout.tp,
    }
    highest = max(heights, key=lambda place: heights[place])
    copies = memory.copies + gathered(size, compute, layout, device, "scoring") + EXPANDED_BYTES * size.largest_four_bit
    taken = {place: round(height) for place, height in heights.items() if place == highest}
    return RoleMemory(memory.role, memory.weights, copies, moments=memory.moments, host=memory.host, **taken)


def reading(
    config: Any, size: ModelSize, prompts: PromptSizes, token_budget: int, device: Device
) -> tuple[float, float]:
    """What the Hugging Face engine takes to read the prompts of some rows, beside weights and cache: the bytes of a layer of the
    decoder, and those of the tower, which comes first.

    Prompts are padded to the longest one and read under a token budget, longest first. The pixels are joined for one pass.
    """
    order = sorted(range(len(prompts.tokens)), key=prompts.tokens.__getitem__, reverse=True)
    longest = prompts.tokens[order[0]]
    together = order[: max(token_budget // longest, 1)]
    eager = ModelConfig()
    decoder = (
        min(len(together) * longest, token_budget)
        * decoder_bytes(config.get_text_config(), size, eager, device).passing
    )
    patches = sum(prod(grid) for place in together for grid in prompts.grids[place])
    if not patches:
        return decoder, 0.0
    return decoder, patches * (tower_bytes(config, eager, device, True).passing + patch_bytes(config))


def joined_pixels(config: Any, device: Device, part: MicroBatchSize) -> float:
    """The pixels of a micro-batch, which a CPU joins in the memory of the process. On a GPU they are little beside the rest."""
    return part.patches * patch_bytes(config) if device.on_cpu and part.patches else 0.0


def _half(compute: ModelConfig, device: Device) -> bool:
    return compute.dtype == "bfloat16" or (compute.dtype == "auto" and not device.on_cpu)


def exported_bytes(parameters: int, compute: ModelConfig, device: Device) -> int:
    """Bytes of weights in the dtype that a model computes in."""
    return (2 if _half(compute, device) else 4) * parameters


def gathered(size: ModelSize, compute: ModelConfig, layout: Layout, device: Device, kept: Unsharded) -> int:
    """Weights that FSDP has gathered at a time, in the passes that ``kept`` names.

    The root's weights (embedding, head, norm) stay from the first to the last use; of the layers, the one that runs and the next.
    """
    if sharded(layout) == 1:
        return 0
    layers = 2 * size.largest_layer / layout.tp
    if compute.leaves_unsharded(kept):
        layers = (size.layers - size.four_bit) / layout.pp / layout.tp + size.vision
    return round((2 if _half(compute, device) else 4) * (_root(size, layout) + layers))


def whole_gradients(size: ModelSize, layout: Layout, device: Device, compute: ModelConfig) -> int:
    """Gradients of the root and of one layer as FSDP scatters them, in the numbers of the pass and in float32.

    They exist as a backward pass ends: the embedding's gradient comes last, and the root's are scattered together.
    """
    if sharded(layout) == 1:
        return 0
    return round(((2 if _half(compute, device) else 4) + 4) * (_root(size, layout) + size.largest_layer / layout.tp))


def _root(size: ModelSize, layout: Layout) -> float:
    """Parameters outside the layers on a rank of tensor parallelism."""
    return (size.embedding + size.head + size.rest) / layout.tp


@dataclass(frozen=True)
class TokenBytes:
    """Bytes for each token, or patch, of all layers on all ranks together."""

    kept: float  # by autograd, of all layers
    again: float  # of the one layer that is computed again
    passing: float  # of one layer in a pass without gradients, which frees what it has read


def decoder_bytes(text: Any, size: ModelSize, compute: ModelConfig, device: Device) -> TokenBytes:
    """Activations of the decoder for a token, by checkpointing mode.

    A layer keeps the input and the output of each norm and product, queries, keys, values and the result of attention, and in
    the gated MLP the gate, its activation, the other factor and their product. Compiled layers compute norms and the activation
    again. Without gradients the height is in the MLP, with the residual, its norm, and two of these factors with their product,
    which a compiled layer writes into one of them, or in attention, with queries and keys before and after they are rotated.
    """
    number, hidden = device.bytes_of_number, int(text.hidden_size)
    heads, keys = attention_width(text), 2 * int(of_layers(text, "num_key_value_heads")) * head_dim(text)
    wide = mlp_width(text)
    if compute.compile:
        layer = 2 * hidden + 2 * heads + keys + 3 * wide
    else:
        norms = sum(3 * _per_token(width, text) for width in size.norms) or 6 * hidden
        layer = norms + 2 * heads + keys + 4 * wide
    selective = 3 * hidden + 2 * heads + keys + 2 * wide
    passing = 2 * hidden + max((2 if compute.compile else 3) * wide, 3 * heads + 2 * keys)
    return _by_mode(compute, number, int(text.num_hidden_layers), layer, selective, hidden, passing)


def gathered_bytes(text: Any, device: Device, part: MicroBatchSize) -> float:
    """What attention on a CPU keeps beside the activations of each token: keys and values of prompts, gathered for each row that
    shares them, and the results of segments of equal lengths before they are put together.
    """
    number, keys = device.bytes_of_number, 2 * int(text.num_key_value_heads) * head_dim(text)
    further = max(part.keys - part.tokens, 0)
    return number * int(text.num_hidden_layers) * (further * keys + part.tokens * attention_width(text))


def _per_token(width: int, text: Any) -> int:
    """Numbers for each token of a norm: one that is as wide as a head runs for all heads."""
    return width if width >= int(text.hidden_size) else width * int(text.num_attention_heads)


def tower_bytes(config: Any, compute: ModelConfig, device: Device, trained: bool) -> TokenBytes:
    """Activations of the vision tower for a patch: none without a tower, and none are kept of one that is not trained.

    FlashAttention's heads are a multiple of 32 wide, so queries, keys and values are kept padded.
    """
    if family_of(config).vision_tower is None:
        return TokenBytes(0, 0, 0)
    vision, number = config.vision_config, device.bytes_of_number
    width = int(getattr(vision, "embed_dim", None) or vision.hidden_size)
    heads = int(getattr(vision, "num_heads", None) or vision.num_attention_heads)
    depth = int(getattr(vision, "depth", None) or vision.num_hidden_layers)
    wide = int(getattr(vision, "intermediate_size", None) or width * vision.mlp_ratio)
    if "intermediate_size" not in vision.to_dict() or getattr(vision, "embed_dim", None):
        wide = int(width * vision.mlp_ratio)
    padded = width if device.on_cpu else -(-width // heads // 32) * 32 * heads
    attention = 4 * width if padded == width else 3 * width + 4 * padded
    inner = 4 * wide if family_of(config).gated_tower else 2 * wide
    layer = 2 * width + attention + inner * 3 // 4 if compute.compile else 6 * width + attention + inner
    selective = 3 * width + 3 * width + padded + inner // 2
    factors = (3 if family_of(config).gated_tower else 2) - compute.compile
    passing = 2 * width + max(factors * wide, 5 * width)
    if not trained or compute.freeze_vision:
        return TokenBytes(0, 0, passing * number)
    return _by_mode(compute, number, depth, layer, selective, width, passing)


def _by_mode(
    compute: ModelConfig, number: int, layers: int, layer: int, selective: int, hidden: int, passing: int
) -> TokenBytes:
    mode = compute.activation_checkpointing
    kept = {"none": layer, "selective": selective, "full": hidden}[mode]
    again = {"none": 0, "selective": max(layer - selective, 0), "full": layer}[mode]
    return TokenBytes(number * layers * kept, number * again, number * passing)


def head_bytes(text: Any, tokens: int, size: ModelSize, device: Device, layout: Layout) -> int:
    """A chunk of logits, and the gradient of the head in float32 while its chunks are summed."""
    chunk = LOGIT_BYTES["cpu" if device.on_cpu else "cuda"] * chunk_logits(text, tokens, device)
    return (chunk + 4 * int(text.hidden_size) * int(text.vocab_size)) // layout.tp


def chunk_logits(text: Any, tokens: int, device: Device) -> int:
    """Logits in memory at a time."""
    return min(tokens * int(text.vocab_size), CHUNK_ELEMENTS["cpu" if device.on_cpu else "cuda"])


def feature_bytes(batch: BatchSizes, size: ModelSize, compute: ModelConfig, layout: Layout, device: Device) -> int:
    """Features of all media of the rows, as a role keeps them through a step if it does not train its tower; else 0.

    `workers.model.kept_features.MAX_BYTES` of them are kept at most.
    """
    family, config = family_of(batch.config), batch.config
    if family.vision_tower is None or size.tower_trained or layout.pp > 1:
        return 0
    patches = int(batch.patches.sum() + batch.shown_patches.sum())
    features = patches // family.media_layout.merge_size(config) ** 2
    width = (1 + family.deep_layers(config)) * int(config.get_text_config().hidden_size)
    return features * width * (2 if _half(compute, device) else 4)


def route_bytes(config: Any, size: ModelSize) -> int:
    """Bytes of the experts of a token, as an engine records them."""
    if not size.expert_layers:
        return 0
    text, family = config.get_text_config(), family_of(config)
    return size.expert_layers * family.experts_per_token(text) * expert_dtype(family.expert_count(text)).itemsize


def kv_bytes(text: Any, number: int) -> int:
    """Bytes of keys and values for a token.

    >>> from types import SimpleNamespace
    >>> kv_bytes(SimpleNamespace(num_hidden_layers=28, num_key_value_heads=4, head_dim=128), number=2)
    57344
    """
    if latent := getattr(text, "kv_lora_rank", None):  # what keys and values are expanded from
        return int(text.num_hidden_layers) * int(latent + text.qk_rope_head_dim) * number
    return 2 * int(text.num_hidden_layers) * int(of_layers(text, "num_key_value_heads")) * head_dim(text) * number
