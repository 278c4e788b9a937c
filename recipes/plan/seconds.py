"""Seconds and traffic of the phases of a step, from operations, bytes, and speeds that were measured on H200.

Each constant belongs to one measurement, or to the mean of several (benchmarks/RESULTS.md); none was fitted to a whole step.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from dataproto.vlm import family_of
from dataproto.vlm.costs import attention_width, head_dim, logit_flops, of_layers
from recipes.plan.memory import HALF, WHOLE, kv_bytes, tower_layers
from recipes.plan.model_size import ModelSize
from recipes.plan.rows import BatchSizes, MicroBatchSize
from recipes.plan.setting import Setting, Traffic
from workers.model.model_config import ModelConfig
from workers.parallel.pipeline import stage_layers, typical_costs

PRODUCTS, ATTENTION, TOWER = 0.74, 0.22, 0.44
"""What an H200 reaches of its peak in products of compiled layers, in torch's attention, and in the tower as a whole; forward and
backward pass together (docs/performance.md, "Time by kind of kernel").
"""
EAGER = 0.85  # speed of layers that are not compiled, compared with compiled ones
PAIRED = {"tp": 0.67, "sp": 0.64}
"""Speed with two ranks compared with data parallelism on as many devices, their traffic counted: 7B with dp 2 x tp 2, and with
sp 2. Higher degrees have not been measured.
"""
MOVED = 250
"""Bytes that norms, rotary embeddings, activations and smaller kernels read and write in a forward pass, for each token, layer
and number of its state. They take a fifth of the time of 3B, and a sixth of 7B (docs/performance.md).
"""
OPTIMIZER_BYTES = 30  # read and written for each trained parameter: weight, gradient, moments, clipping, the copy
GRADIENT_BYTES = 10  # read and written for each trained parameter when a micro-batch's gradient is added
RECOMPUTED = {"none": 0.0, "selective": 0.03, "full": 1 / 3}
"""Further time of a backward pass that computes activations again, as a share of forward and backward pass."""
EXPERT_LAYER = 36e-3  # seconds that ep adds to forward and backward pass of a mixture's layer, in each micro-batch

DECODING = 0.93  # speed of the products of a decoding step compared with those of forward and backward pass
DECODED_ROW = 12e-6
"""Seconds of a row in a decoding step in addition to products and keys: float32 logits, norms, gaps between kernels."""
ALL_REDUCE = 15e-6  # seconds of a sum over an engine's devices, however small; assumed
STEP, ROW, REQUEST = 8.5e-3, 33.5e-6, 4e-3
"""Seconds of the reference host for vLLM's Python: for a decoding step at least, for each row that runs (the larger one counts),
and to take a request. Hosts of the same GPU take 0.75 to 1.8 of it (``python benchmarks/host_speed.py``).
"""
WAKING, WEIGHT, HAND_OVER_LINK = 0.28, 50e-6, 160e9
"""Of handing weights to engines: seconds of waking and sleep, seconds of each tensor, bytes per second within a node."""

LAUNCH = 47e-6  # seconds of the host to start an operation: Python, autograd and the driver
LAYER, BLOCK, BESIDES = (48, 82), (20, 45), (150, 30)
"""Operations of a forward and of a backward pass: of a decoder layer, of one of the tower, and of all else together."""
DECODED_LAYER, DECODED_BESIDES = 36, 50  # of a decoding step of the Hugging Face engine
COMPILED = 0.3  # of the operations of a layer; assumed


@dataclass(frozen=True)
class Passes:
    """Operations of passes over all rows of a step, on all devices together."""

    language: float
    vision: float
    head: float = 0.0  # of ``language``, in the head, which has no layers that compute activations again
    attention: float = 0.0  # of ``language``, between queries and keys
    moved: float = 0.0  # bytes that norms, activations and smaller kernels of decoder layers read and write

    @property
    def total(self) -> float:
        return self.language + self.vision


def scoring_flops(batch: BatchSizes) -> Passes:
    """Operations of a pass without gradients."""
    text = batch.config.get_text_config()
    head = float(sum(batch.responses) * logit_flops(text))
    moved = MOVED * batch.packed_tokens * int(text.num_hidden_layers) * int(text.hidden_size)
    whole, shared = batch.flops
    attention = whole.language_attention - shared.language_attention
    return Passes(whole.language - shared.language, float(batch.vision_flops.sum()), head, attention, moved)


def update_flops(batch: BatchSizes, size: ModelSize, compute: ModelConfig) -> Passes:
    """Operations that an update over these rows requires, as `workers.training.accounting.required_work` counts them."""
    decoder, vision, once = 2 if compute.lora_rank else 3, 3 if size.tower_trained else 1, scoring_flops(batch)
    others = (decoder * each for each in (once.head, once.attention, once.moved))
    return Passes(decoder * once.language, vision * once.vision, *others)


def recomputing(passes: Passes, compute: ModelConfig) -> Passes:
    """The passes of an update with the activations that it computes again."""
    again = RECOMPUTED[compute.activation_checkpointing]
    language, more = passes.language + again * (passes.language - passes.head), 1 + again
    return Passes(language, more * passes.vision, passes.head, more * passes.attention, more * passes.moved)


def pass_seconds(setting: Setting, passes: Passes, parts: Sequence[MicroBatchSize]) -> float:
    """Seconds of passes that all devices share, with these micro-batches on a dp rank."""
    layout, device = setting.layout, setting.device
    pace = (1.0 if setting.compute.compile else EAGER) * layout.world_size
    for axis, factor in PAIRED.items():
        pace *= factor if getattr(layout, axis) > 1 else 1
    seconds = (_language_seconds(setting, passes) + passes.vision / (TOWER * device.peak)) / pace
    return seconds * _pipeline_stretch(setting, passes, parts) if layout.pp > 1 else seconds


def _language_seconds(setting: Setting, passes: Passes) -> float:
    """Seconds of one device for the language model: products, attention, and what only reads and writes memory."""
    device = setting.device
    products = (passes.language - passes.attention) / (PRODUCTS * device.peak)
    return products + passes.attention / (ATTENTION * device.peak) + passes.moved / device.bandwidth


def _pipeline_stretch(setting: Setting, passes: Passes, parts: Sequence[MicroBatchSize]) -> float:
    """How many times as long a pipeline takes as ranks that share the same work evenly. The fullest of a run's stages takes all
    micro-batches in turn, filled up to the tokens of the longest; the others are waited for once.
    """
    config, compute, stages = setting.config, setting.compute, setting.layout.pp
    tower, head = passes.vision / (TOWER * setting.device.peak), passes.head / (PRODUCTS * setting.device.peak)
    key = ("stages", stages, compute.activation_checkpointing, compute.freeze_vision, compute.pipeline_layers)
    split = setting.batch.once(
        key, lambda: stage_layers(typical_costs(family_of(config), config, compute), stages, compute.pipeline_layers)
    )
    counts = [len(each) for each in split]
    layer = (_language_seconds(setting, passes) - head) / sum(counts)
    filled = len(parts) * max(part.tokens for part in parts) / sum(part.tokens for part in parts)
    taken = [count * layer * filled for count in counts]
    taken[0], taken[-1] = taken[0] + tower, taken[-1] + head
    whole = ((len(parts) - 1) * max(taken) + sum(taken)) / len(parts)
    return stages * whole / (sum(counts) * layer + tower + head)


def _started(setting: Setting, media: bool, learns: bool) -> float:
    """Seconds in which the host starts the operations of a micro-batch, which count where a model is small."""
    again = learns and setting.compute.activation_checkpointing == "full"
    layer, block = (forward + learns * (backward + again * forward) for forward, backward in (LAYER, BLOCK))
    if not setting.size.tower_trained:
        block = BLOCK[0]
    layers = (
        int(setting.config.get_text_config().num_hidden_layers) * layer + media * tower_layers(setting.config) * block
    )
    joined = COMPILED if setting.compute.compile else 1.0
    return (joined * layers + BESIDES[0] + learns * BESIDES[1]) / setting.layout.pp * LAUNCH


def scoring_seconds(setting: Setting, share: float = 1.0) -> tuple[float, Traffic]:
    """Seconds and traffic of a pass without gradients over a share of the rows of a step."""
    parts, passes = setting.micro_batches(learns=False), scoring_flops(setting.batch)
    computed = pass_seconds(setting, passes, parts) + len(parts) * _expert_seconds(setting) / 3
    started = math.ceil(share * len(parts)) * _started(setting, passes.vision > 0, learns=False)
    gathers = 1 if setting.compute.leaves_unsharded("scoring") else len(parts)
    weights = gathers * _gathered_weights(setting)
    states, beyond = _state_traffic(setting, learns=False)
    seconds = share * (computed + beyond + _exposed(setting, weights, computed))
    return max(seconds, started), share * (weights + states)


def update_seconds(setting: Setting, size: ModelSize) -> tuple[float, Traffic]:
    """Seconds and traffic of the optimizer steps of an epoch over the rows of a step."""
    layout, compute, updates = setting.layout, setting.compute, setting.updates
    parts, required = setting.micro_batches(learns=True), update_flops(setting.batch, size, compute)
    balance = setting.batch.share(setting.updated_prompts).imbalance(layout.dp)
    computed = pass_seconds(setting, recomputing(required, compute), parts) * balance
    computed += updates * len(parts) * _expert_seconds(setting)
    computed = max(computed, updates * len(parts) * _started(setting, required.vision > 0, learns=True))
    moved = size.on_rank(layout) * size.trained / size.total * (OPTIMIZER_BYTES + len(parts) * GRADIENT_BYTES)
    gathers = 1 if compute.leaves_unsharded("weights") else 2 * len(parts)
    reductions = 1 if compute.leaves_unsharded("gradients") else len(parts)
    sums = reductions if layout.pp > 1 else 1  # in a pipeline each pass that reduces gradients sums them over replicas
    weights = (gathers + reductions * WHOLE / HALF) * _gathered_weights(setting)
    shard = WHOLE * size.on_rank(layout)
    weights += sums * 2 * setting.nodes.gather(shard, layout.replicas, layout.shards * layout.tp)
    states, beyond = _state_traffic(setting, learns=True)
    seconds = computed + updates * moved / setting.device.bandwidth + beyond
    return seconds + _exposed(setting, updates * weights, computed), updates * weights + states


def _expert_seconds(setting: Setting) -> float:
    """What ep adds to a micro-batch, forward and backward."""
    return EXPERT_LAYER * setting.size.expert_layers / setting.layout.pp if setting.layout.ep > 1 else 0.0


def _exposed(setting: Setting, weights: Traffic, computed: float) -> float:
    """Seconds that FSDP's traffic adds: within nodes as measured, between them what computation is too short to hide."""
    between = setting.nodes.between_seconds(weights)
    return weights.inside / setting.device.link + max(between - computed, 0.0)


def _gathered_weights(setting: Setting) -> Traffic:
    """Of gathering all weights of a rank's part of the model once; scattering their gradients in as many bytes is the same."""
    layout, size = setting.layout, setting.size
    dense = size.gathered(layout) - size.experts_here(layout)
    found = setting.nodes.gather(HALF * dense, layout.shards, layout.tp)
    if size.experts:
        stride = layout.tp * layout.ep
        found += setting.nodes.gather(HALF * size.experts_here(layout), layout.shards // layout.ep, stride)
    return found


def _state_traffic(setting: Setting, learns: bool) -> tuple[Traffic, float]:
    """Traffic of the states of a step's tokens between ranks that share them, and its seconds; nothing of it is hidden.

    - tp gathers tokens before attention and MLP, and sums and splits their results. sp exchanges queries, keys, values and
      results of attention (Ulysses). What two ranks of each exchange is contained in their measured speed (`PAIRED`).
    - ep gathers the tokens of all its ranks, and sums and splits their results (`workers.parallel.expert`).
    - pp sends the states to the next stage, and the inputs that some families have for each later layer.
    """
    layout, nodes, text = setting.layout, setting.nodes, setting.config.get_text_config()
    tokens = setting.batch.packed_tokens / layout.dp
    times, layers, hidden = 2 if learns else 1, int(text.num_hidden_layers) / layout.pp, HALF * int(text.hidden_size)
    split = 2 if setting.size.experts else 4  # a mixture's experts are in the group of ep x tp
    heads = attention_width(text) + int(of_layers(text, "num_key_value_heads")) * head_dim(text)

    def shared(tp: int, sp: int) -> Traffic:
        found = split * layers * times * nodes.gather(tokens / sp * hidden, tp)
        return found + layers * times * nodes.exchange(tokens / sp * 2 * HALF * heads / tp, sp, tp)

    found = shared(layout.tp, layout.sp)
    tp, sp = min(layout.tp, 2), min(layout.sp, 2)
    contained = shared(tp, sp).inside / setting.device.link * tp * sp / (layout.tp * layout.sp)
    if setting.size.experts:
        group = layout.ep * layout.tp
        found += 2 * layers * times * nodes.gather(layout.ep * tokens / layout.sp * hidden, group)
    if layout.pp > 1:
        later = layers * (layout.pp - 1) * HALF * family_of(setting.config).layer_input_size(text)
        size = tokens / layout.sp * (hidden + later) / layout.tp
        found += times * nodes.send(size, layout.pp, layout.dp * layout.sp * layout.tp)
    seconds = found.inside / setting.device.link + nodes.between_seconds(found)
    return found, max(seconds - contained, 0.0)


def hand_over_seconds(setting: Setting) -> tuple[float, Traffic]:
    """Of waking vLLM's engines and giving every rank all weights: a stage gathers its own, and sends them to the other stages."""
    layout, whole = setting.layout, HALF * setting.size.total
    traffic = setting.nodes.gather(whole / layout.pp, layout.shards * layout.tp)
    if layout.pp > 1:
        traffic += setting.nodes.exchange(whole, layout.pp, layout.dp * layout.sp * layout.tp)
    seconds = WAKING + setting.size.tensors * WEIGHT + traffic.inside / HAND_OVER_LINK
    return seconds + setting.nodes.between_seconds(traffic), traffic


def decoding_steps(responses: Sequence[int], rows: int) -> list[int]:
    """The number of running rows in each decoding step."""
    free = [0] * min(rows, len(responses))
    changes: dict[int, int] = {}
    for length in responses:
        start = heapq.heappop(free)
        heapq.heappush(free, start + length)
        changes[start] = changes.get(start, 0) + 1
        changes[start + length] = changes.get(start + length, 0) - 1
    return list(accumulate(changes.get(step, 0) for step in range(max(free, default=0))))


def generation_seconds(setting: Setting, share: BatchSizes, rows: int) -> float:
    """Seconds of an engine that answers its share of the prompts, ``rows`` rows at a time.

    A decoding step computes the running rows, or reads all weights if that takes longer, reads the rows' keys and values, samples
    from their logits, and sums the states of a token over the engine's devices twice in each layer. Meanwhile the host prepares
    the next step (vLLM), or starts the operations of this one: whichever takes longer counts.
    """
    config, device, parallel, vllm = setting.config, setting.device, setting.engine_parallel, setting.engine == "vllm"
    text = config.get_text_config()
    steps = decoding_steps(share.responses, rows)
    sums = 2 * int(text.num_hidden_layers) if parallel > 1 else 0
    state = HALF * int(text.hidden_size) * (parallel - 1) / parallel
    received = 2 * sums * state / device.link  # parts to sum, and sums
    reading = HALF * (setting.size.layers + (setting.size.head or setting.size.embedding)) / parallel / device.bandwidth
    token = family_of(config).flops(config, [1], logit_tokens=1)
    computing = (token.language_linear + token.lm_head) / parallel / (PRODUCTS * device.peak * DECODING)
    keys = sum((length - own / 2) * own for length, own in zip(share.lengths.tolist(), share.responses, strict=True))
    cache = keys * max(kv_bytes(text) // parallel, 1) / device.bandwidth / max(len(steps), 1)
    started = (int(text.num_hidden_layers) * DECODED_LAYER + DECODED_BESIDES) * LAUNCH
    seconds = prefill_seconds(setting, share, rows)
    for running in steps:
        computed = max(reading, running * computing) + cache + sums * ALL_REDUCE + running * (DECODED_ROW + received)
        seconds += max(computed, device.host * max(STEP, running * ROW) if vllm else started)
    return seconds


def prefill_seconds(setting: Setting, share: BatchSizes, rows: int) -> float:
    """Seconds of an engine's pass over the prompts of its share, for which vLLM's host takes each request."""
    prompts: Any = scoring_flops(replace(share, responses=(0,) * len(share.responses), known={}))
    whole = replace(setting, compute=ModelConfig(compile=True), layout=type(setting.layout)())
    read = pass_seconds(whole, prompts, ()) / setting.engine_parallel
    if setting.engine == "vllm":
        return read + len(share.responses) * REQUEST * setting.device.host
    eager = replace(whole, compute=ModelConfig())
    return max(read, -(-len(share.responses) // rows) * _started(eager, prompts.vision > 0, learns=False))
