"""Seconds of the phases of a step on one device of a layout, from operations, bytes and the device's speeds."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dataproto.vlm import family_of
from dataproto.vlm.costs import logit_flops
from recipes.forecast.batch_sizes import BatchSizes, MicroBatchSize
from recipes.forecast.devices import EAGER, SHARED, Device
from recipes.forecast.host_pace import REQUEST, decoding_step
from recipes.forecast.model_size import ModelSize
from recipes.forecast.role_memory import kv_bytes
from rollout.hf.hf_engine import MIN_RUNNING_SHARE
from workers.model.model_config import ModelConfig
from workers.parallel.pipeline_stages import stage_layers, typical_costs
from workers.ranks.layout import Layout

ALL_REDUCE = 15e-6  # seconds of a sum over an engine's devices, however small; assumed
DECODING = 0.93  # speed of the products of a decoding step beside those of forward and backward pass
DECODED_ROW = 12e-6
"""Seconds of an H200 for a row in a decoding step besides its products and its keys: float32 logits, norms, activations, and the
gaps between some hundred kernels. 320 rows of 7B take 13.3 ms, products and keys 9.0 of them (benchmarks/RESULTS.md).
"""
MOVED = 250
"""Bytes that norms, rotary embeddings, activations and smaller kernels read and write in a forward pass, for each token, layer
and number of its state. They take a fifth of the time of 3B on an H200, and a sixth of 7B (docs/performance.md).
"""
OPTIMIZER_BYTES = 30  # read and written for each trained parameter: weight, gradient, moments, clipping, the copy
GRADIENT_BYTES = 10  # read and written for each trained parameter when a micro-batch's gradient is added
RECOMPUTED = {"none": 0.0, "selective": 0.03, "full": 1 / 3}
"""Further time of a backward pass that computes activations again, as a share of forward and backward pass."""


@dataclass(frozen=True)
class Passes:
    """Operations of the passes over all rows of a step, on all devices together."""

    language: float
    vision: float
    head: float = 0.0  # of ``language``, in the head, which has no layers that compute activations again
    attention: float = 0.0  # of ``language``, between queries and keys
    moved: float = 0.0  # bytes that norms, activations and smaller kernels of decoder layers read and write

    @property
    def total(self) -> float:
        return self.language + self.vision


def update_flops(batch: BatchSizes, size: ModelSize, compute: ModelConfig, tower: float = 1.0) -> Passes:
    """Operations that an update over these rows requires, as `workers.training.accounting.required_work` counts them.

    ``tower`` is the share of the media that the tower reads: features of the others are kept from an earlier pass.
    """
    decoder, vision = 2 if compute.lora_rank else 3, 3 if size.tower_trained else 1
    once = scoring_flops(batch, tower)
    return Passes(
        decoder * once.language,
        vision * once.vision,
        decoder * once.head,
        decoder * once.attention,
        decoder * once.moved,
    )


def scoring_flops(batch: BatchSizes, tower: float = 1.0) -> Passes:
    """Operations of a pass without gradients; for ``tower`` see `update_flops`."""
    text = batch.config.get_text_config()
    head = float(sum(batch.responses) * logit_flops(text))
    moved = MOVED * batch.packed_tokens * int(text.num_hidden_layers) * int(text.hidden_size)
    return Passes(batch.language_flops, tower * batch.tower_flops, head, batch.attention_flops, moved)


def recomputing(passes: Passes, compute: ModelConfig) -> Passes:
    """The passes of an update with the activations that it computes again."""
    again = RECOMPUTED[compute.activation_checkpointing]
    return Passes(
        passes.language + again * (passes.language - passes.head),
        passes.vision * (1 + again),
        passes.head,
        passes.attention * (1 + again),
        passes.moved * (1 + again),
    )


def language_seconds(passes: Passes, device: Device) -> float:
    """Seconds of one device for the language model: products, attention, and what only reads and writes memory.

    A CPU is timed with whole layers: the speed of its products counts all three.
    """
    if not device.attention:
        return passes.language / device.language
    products = (passes.language - passes.attention) / device.language
    return products + passes.attention / device.attention + passes.moved / device.bandwidth


def pass_seconds(
    passes: Passes,
    compute: ModelConfig,
    layout: Layout,
    device: Device,
    config: Any = None,
    parts: Sequence[MicroBatchSize] = (),
) -> float:
    """Seconds of passes that all devices share.

    Args:
        config, parts: for pipelines, the model's, and the micro-batches of a dp rank, see `pipeline_stretch`.

    >>> from recipes.forecast.devices import accelerator
    >>> device = accelerator("one", 0, 1e12, 100e12, 1e12)
    >>> pass_seconds(Passes(74e12, 44e12), ModelConfig(compile=True), Layout(), device)
    2.0
    >>> pass_seconds(Passes(96e12, 44e12, attention=22e12, moved=1e12), ModelConfig(compile=True), Layout(), device)
    4.0
    """
    pace = 1.0 if compute.compile or device.on_cpu else EAGER
    for axis, factor in SHARED.items():
        pace *= factor if getattr(layout, axis) > 1 else 1
    seconds = (language_seconds(passes, device) + passes.vision / device.vision) / (pace * layout.world_size)
    return seconds * pipeline_stretch(passes, compute, layout.pp, device, config, parts) if layout.pp > 1 else seconds


def pipeline_stretch(
    passes: Passes, compute: ModelConfig, stages: int, device: Device, config: Any, parts: Sequence[MicroBatchSize]
) -> float:
    """How many times as long a pipeline takes as ranks that share the same work evenly.

    The stages are those of a run, split by the operations of a typical row. The fullest one takes all micro-batches in turn; the
    others are waited for once. All micro-batches are filled up to the tokens of the longest.
    """
    layers = int(config.get_text_config().num_hidden_layers)
    tower, head = passes.vision / device.vision, passes.head / device.language
    layer = (language_seconds(passes, device) - head) / layers
    filled = len(parts) * max(part.tokens for part in parts) / sum(part.tokens for part in parts)
    taken = [count * layer * filled for count in _stage_counts(config, compute, stages)]
    taken[0], taken[-1] = taken[0] + tower, taken[-1] + head
    whole = ((len(parts) - 1) * max(taken) + sum(taken)) / len(parts)
    return stages * whole / (layers * layer + tower + head)


def _stage_counts(config: Any, compute: ModelConfig, stages: int) -> list[int]:
    """The number of decoder layers of each stage, split as in a run; kept, as a search of layouts asks for it many times."""
    options = compute.activation_checkpointing, compute.freeze_vision, compute.pipeline_layers
    key = (config.to_json_string(), stages, *options)
    if key not in _split:
        costs = typical_costs(family_of(config), config, compute)
        _split[key] = [len(each) for each in stage_layers(costs, stages, compute.pipeline_layers)]
    return _split[key]


_split: dict[tuple[Any, ...], list[int]] = {}


def scoring_seconds(
    batch: BatchSizes,
    compute: ModelConfig,
    layout: Layout,
    device: Device,
    parts: Sequence[MicroBatchSize],
    tower: float = 1.0,
    share: float = 1.0,
) -> float:
    """Seconds of a pass without gradients over a share of the rows, whose micro-batches on a device are ``parts``; for ``tower``
    see `update_flops`.

    The host starts the operations of a micro-batch while the device computes: whichever takes longer counts.
    """
    faster = replace(device, language=device.language * device.overheads.scoring_rate)
    passes = scoring_flops(batch, tower)
    computed = share * pass_seconds(passes, compute, layout, faster, batch.config, parts)
    started = scoring_operations(batch.config, compute, passes.vision > 0) / layout.pp * device.launch
    return max(computed, math.ceil(share * len(parts)) * started) + share * len(parts) * device.overheads.scoring


def update_seconds(
    batch: BatchSizes,
    size: ModelSize,
    compute: ModelConfig,
    layout: Layout,
    device: Device,
    updates: int,
    parts: Sequence[MicroBatchSize],
    tower: float = 1.0,
) -> float:
    """Seconds of ``updates`` optimizer steps over the rows, with these micro-batches in each on a device; for ``tower`` see
    `update_flops`. The host starts operations meanwhile, see `scoring_seconds`.
    """
    passes = recomputing(update_flops(batch, size, compute, tower), compute)
    operations = learning_operations(batch.config, compute, passes.vision > 0, size.tower_trained) / layout.pp
    computed = max(
        pass_seconds(passes, compute, layout, device, batch.config, parts),
        updates * len(parts) * operations * device.launch,
    )
    again = RECOMPUTED[compute.activation_checkpointing]
    started = len(parts) * device.overheads.learning * (1 + again) + device.overheads.optimizer
    gathers, reductions = collectives(compute, len(parts))
    sent = gather_seconds(size, layout, device, gathers + 2 * reductions)  # gradients in float32 count twice
    return computed + updates * (started + optimizer_seconds(size, layout, device, len(parts)) + sent)


def optimizer_seconds(size: ModelSize, layout: Layout, device: Device, micro_batches: int) -> float:
    """Seconds to add up the gradients of so many micro-batches, and of the optimizer's reading and writing."""
    mine = size.on_rank(layout) * size.trained / size.total
    return mine * (OPTIMIZER_BYTES + micro_batches * GRADIENT_BYTES) / device.bandwidth


def collectives(compute: ModelConfig, micro_batches: int) -> tuple[int, int]:
    """How often FSDP gathers the weights and scatters the gradients in an optimizer step.

    >>> collectives(ModelConfig(unsharded="nothing"), 4), collectives(ModelConfig(unsharded="gradients"), 4)
    ((8, 4), (1, 1))
    """
    gathers = 1 if compute.leaves_unsharded("weights") else 2 * micro_batches
    return gathers, 1 if compute.leaves_unsharded("gradients") else micro_batches


def gather_seconds(size: ModelSize, layout: Layout, device: Device, times: int) -> float:
    """Seconds that it adds to gather all weights ``times`` times in bfloat16."""
    ranks = layout.shards
    if ranks == 1 or not device.link:
        return 0.0
    return 2 * times * size.on_rank(layout) * (ranks - 1) / device.link


@dataclass(frozen=True)
class Engine:
    """What decides the speed of an engine, on each of its devices."""

    weight_bytes: float  # that a decoding step reads
    kv_bytes: int  # of a token
    flops: float  # of a token of one row
    rows: int  # that it generates at a time
    continuous: bool  # whether a finished row makes place for the next
    parallel: int = 1  # devices
    sums: int = 0  # over its devices, in a pass
    summed_bytes: float = 0.0  # that a device receives in these sums, of a token
    operations: int = 0  # that the host starts in a decoding step; 0: see `host_pace.decoding_step`


def decoding_steps(responses: Sequence[int], rows: int, continuous: bool) -> list[int]:
    """The number of running rows in each decoding step.

    >>> decoding_steps([3, 1, 2], rows=2, continuous=True)
    [2, 2, 2]
    >>> decoding_steps([3, 1, 2], rows=2, continuous=False)
    [2, 1, 1, 1, 1]
    """
    if not continuous:
        waves = [responses[start : start + rows] for start in range(0, len(responses), rows)]
        return [sum(length > step for length in wave) for wave in waves for step in range(max(wave))]
    free = [0] * min(rows, len(responses))
    changes: dict[int, int] = {}
    for length in responses:
        start = heapq.heappop(free)
        heapq.heappush(free, start + length)
        changes[start] = changes.get(start, 0) + 1
        changes[start + length] = changes.get(start + length, 0) - 1
    running, found = 0, []
    for step in range(max(free, default=0)):
        running += changes.get(step, 0)
        found.append(running)
    return found


def generation_seconds(batch: BatchSizes, engine: Engine, device: Device) -> float:
    """Seconds to answer the prompts: a pass over them, once for all samples, and the decoding steps.

    vLLM's host also takes each request. An engine whose operations the host starts one by one reads the prompts of as many rows
    as it generates at a time.

    Args:
        batch: the rows of one engine.
    """
    steps = decoding_steps(batch.responses, engine.rows, engine.continuous)
    read = prefill_seconds(batch, device) / engine.parallel
    if engine.operations:
        times = -(-len(batch.responses) // engine.rows)
        operations = scoring_operations(batch.config, ModelConfig(), batch.tower_flops > 0)
        read = max(read, times * operations * device.launch)
    elif not device.on_cpu:
        read += len(batch.responses) * REQUEST * _pace(device)
    return read + decoding_seconds(batch, steps, engine, device)


def decoding_seconds(batch: BatchSizes, steps: Sequence[int], engine: Engine, device: Device) -> float:
    """Seconds of decoding steps with so many running rows.

    A step computes the running rows, or reads all weights if that takes longer, reads the rows' keys and values, samples from
    their logits, and sums over the engine's devices. Meanwhile the host prepares the next step (vLLM), or starts the operations
    of this one: whichever takes longer counts.
    """
    lengths = zip(batch.lengths.tolist(), batch.responses, strict=True)
    keys = sum((length - response / 2) * response for length, response in lengths)
    if device.overheads.decoded_row or device.overheads.decoded_key:
        kept, mean_keys = kept_rows(steps), keys / max(sum(batch.responses), 1)
        row = device.overheads.decoded_row + mean_keys * device.overheads.decoded_key
        return len(kept) * device.decode_overhead + sum(kept) * row
    fixed = keys * engine.kv_bytes / device.bandwidth / max(len(steps), 1) + engine.sums * ALL_REDUCE
    reading, computing = engine.weight_bytes / device.bandwidth, engine.flops / (device.language * DECODING)
    each = DECODED_ROW + (engine.summed_bytes / device.link if device.link else 0.0)
    pace = _pace(device)
    started = engine.operations * device.launch
    return sum(
        max(max(reading, rows * computing) + fixed + rows * each, started or decoding_step(rows, pace))
        for rows in steps
    )


def _pace(device: Device) -> float:
    return 1.0 if device.host is None else device.host


def kept_rows(running: Sequence[int]) -> list[int]:
    """The rows that the Hugging Face engine computes in each step: it removes finished ones once too few of a batch run.

    >>> kept_rows([8, 7, 5, 5, 4, 2])
    [8, 8, 5, 5, 5, 2]
    """
    found: list[int] = []
    for rows in running:
        before = found[-1] if found else rows
        found.append(rows if rows > before or rows < MIN_RUNNING_SHARE * before else before)
    return found


def prefill_seconds(batch: BatchSizes, device: Device) -> float:
    """Seconds of an engine's pass over the prompts, once for all samples, and over what is shown behind them."""
    given = replace(batch, responses=(0,) * len(batch.responses))
    if device.overheads.scoring:
        return scoring_seconds(given, ModelConfig(compile=True), Layout(), device, [MicroBatchSize(0, 0, 0)])
    return pass_seconds(scoring_flops(given), ModelConfig(compile=True), Layout(), device)


def engine_of(config: Any, size: ModelSize, name: str, options: Mapping[str, Any], device: Device) -> Engine:
    """The engine that these options describe.

    Several devices sum the states of a token twice in each layer, after attention and after the MLP. In each sum a device
    receives the parts of the others twice: to sum its own, and the sums.
    """
    parallel, number, text = int(options.get("tensor_parallel", 1)), device.bytes_of_number, config.get_text_config()
    token = family_of(config).flops(config, [1], logit_tokens=1)
    sums = 2 * int(text.num_hidden_layers) if parallel > 1 else 0
    return Engine(
        weight_bytes=number * (size.layers + (size.head or size.embedding)) / parallel,
        kv_bytes=max(kv_bytes(text, number) // parallel, 1),
        flops=float(token.language_linear + token.lm_head) / parallel,
        rows=int(options.get("max_num_seqs", 256)),
        continuous=name == "vllm",
        parallel=parallel,
        sums=sums,
        summed_bytes=2 * sums * number * int(text.hidden_size) * (parallel - 1) / parallel,
        operations=0 if name == "vllm" else decoding_operations(config),
    )


# Operations that the host starts in a pass. Where a model is small, starting them takes longer than computing them. An operation
# is one that launches a kernel: products, norms and activations by their parts, copies, gathers; no views. Counts are those of
# PyTorch's dispatcher for the Llama and Qwen decoders and the SigLIP and Qwen towers, float32 on a CPU; other models, and copies
# to bfloat16 and back, have more. Adapters, experts and FSDP are not counted.


class Operations(NamedTuple):
    """Of a forward pass, and of the backward pass after it."""

    forward: int
    backward: int


LAYER = Operations(48, 82)  # of a decoder layer on packed rows
BLOCK = Operations(20, 45)  # of a layer of a vision tower
BESIDES = Operations(150, 30)  # embeddings, positions, head and log-probs, once
DECODED_LAYER, DECODED_BESIDES = 36, 50  # of a decoding step of the Hugging Face engine
COMPILED = 0.3  # of the operations of a layer: products and attention stay, what is between them is joined; assumed


def learning_operations(config: Any, compute: ModelConfig, read_media: bool, tower_trained: bool) -> float:
    """Operations of a forward and a backward pass over one micro-batch.

    >>> from transformers import AutoConfig
    >>> config = AutoConfig.for_model("qwen2_5_vl")
    >>> text, vision = config.get_text_config().num_hidden_layers, config.vision_config.depth
    >>> text, vision, learning_operations(config, ModelConfig(), read_media=True, tower_trained=True)
    (80, 32, 12660.0)
    """
    again = compute.activation_checkpointing == "full"
    layer, block = (sum(each) + again * each.forward for each in (LAYER, BLOCK))
    layers = _layers(config) * layer
    if read_media:
        layers += _blocks(config) * (block if tower_trained else BLOCK.forward)
    return _joined(compute) * layers + sum(BESIDES)


def scoring_operations(config: Any, compute: ModelConfig, read_media: bool) -> float:
    """Operations of a pass without gradients over one micro-batch."""
    layers = _layers(config) * LAYER.forward + (_blocks(config) * BLOCK.forward if read_media else 0)
    return _joined(compute) * layers + BESIDES.forward


def decoding_operations(config: Any) -> int:
    """Operations of a decoding step of the Hugging Face engine, whatever the number of rows. vLLM's are replayed as a graph."""
    return _layers(config) * DECODED_LAYER + DECODED_BESIDES


def _joined(compute: ModelConfig) -> float:
    return COMPILED if compute.compile else 1.0


def _layers(config: Any) -> int:
    return int(config.get_text_config().num_hidden_layers)


def _blocks(config: Any) -> int:
    if family_of(config).vision_tower is None:
        return 0
    vision = config.vision_config
    return int(getattr(vision, "depth", None) or vision.num_hidden_layers)
