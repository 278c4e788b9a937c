"""The speed of this CPU, measured within seconds on a model of the config's widths."""

import copy
import os
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.vlm import VLMFamily, family_of
from recipes.forecast.batch_sizes import BatchSizes, PromptSizes
from recipes.forecast.devices import DEVICES, Device, Overheads
from recipes.forecast.host_pace import host_pace
from recipes.forecast.model_size import model_size
from recipes.forecast.role_memory import held, updating
from recipes.forecast.step_time import OPTIMIZER_BYTES
from rollout.engine import Request, SamplingParams
from rollout.hf import HFEngine
from workers.model.model_config import ModelConfig, OptimizerConfig
from workers.model.named_weights import float32_weights
from workers.model.packed_model import PackedVLM
from workers.model.precision import Precision
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks
from workers.training.forward_pass import forward_rows
from workers.training.memory import begin_peak, peak_bytes
from workers.training.optimizer import Optimizer

TOKENS = 32_768  # at most, in a timed pass
FLOPS = 3e10  # about, of a timed pass
LARGEST = 300_000_000  # parameters of a model that is timed whole
LAYERS = 4  # of the timed part of a larger one
DECODED = 8  # timed steps of decoding
LENGTHS = 12  # of rows in bfloat16 that fill the caches of kernels, see `recipes.KERNELS`
CPU = torch.device("cpu")
Clock = Callable[[], float]
Dtype = Literal["auto", "float32", "bfloat16"]


def this_gpu() -> Device:
    """The machine's first GPU, with its own memory and host; one that the table does not have counts as an H100."""
    title = torch.cuda.get_device_name().lower()
    memory = torch.cuda.get_device_properties(0).total_memory
    return replace(DEVICES[_known(title) or "h100"], name=title, memory=memory, host=host_pace())


def with_host(device: Device) -> Device:
    """A device of the table with the pace of this machine's host, if the machine has such a GPU."""
    here = torch.cuda.is_available() and _known(torch.cuda.get_device_name().lower()) == device.name
    return replace(device, host=host_pace()) if here else device


def _known(title: str) -> str | None:
    """The name in the table of a GPU with this title."""
    return next((each for each in DEVICES if each.split("-")[0] in title), None)


def calibrate_cpu(
    batch: BatchSizes, clock: Clock = time.thread_time, tokens: int = TOKENS, dtype: Dtype = "auto"
) -> Device:
    """`timed_cpu`, with the memory that this process took beside what is forecast for the timed passes: that of the interpreter
    and of the libraries that a run uses, of what the allocator keeps, and of results that exist for a moment.
    """
    bandwidth = _bandwidth(clock)  # before memory counts: the 128 MiB that are copied for it are no part of a run
    begin_peak()
    with torch.random.fork_rng(devices=[]):  # a run that is to begin has its own random numbers
        device = timed_cpu(batch, clock, bandwidth, tokens, dtype)
    config, compute = _shortened(batch.config), ModelConfig(dtype=dtype)
    rows, place = timed_rows(replace(batch, config=config), tokens), (compute, Layout(), device)
    size = model_size(config, compute)
    weights = replace(held("actor", size, *place, trains=True), moments=0)
    passes = updating(weights, size, config, *place, rows.micro_batches(2 * TOKENS))
    timed = passes.device - min(
        passes.tower, passes.activations + passes.logits
    )  # tower and decoder run one after the other
    return replace(device, context=max(peak_bytes() - timed, 0))


def timed_cpu(batch: BatchSizes, clock: Clock, bandwidth: float, tokens: int = TOKENS, dtype: Dtype = "auto") -> Device:
    """This CPU, with the operations per second that a model of these widths reaches on rows like these.

    Builds the model with random weights, of a large one the first decoder layers, and times forward and backward passes of text
    rows, of the tower, decoding steps of the engine and optimizer steps. ``clock`` returns seconds; ``bandwidth`` is that of the
    memory in bytes per second; a pass has at most ``tokens``, and computes in ``dtype``, see `ModelConfig.dtype`.
    """
    config = _shortened(batch.config)
    family = family_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.new_model(config)
    decoding = _decoding_speed(model, batch, clock)
    module = PackedVLM(model, family, 1.0)
    exact = float32_weights(model, family)
    precision = Precision(model, Ranks(), ModelConfig(dtype=dtype), "cpu", exact)
    with precision.compute():
        speed = _pass_speed(module, timed_rows(replace(batch, config=config), tokens), clock)
        vision = _vision_rate(module, family, batch, config, clock)
        if precision.half_weights is not None:
            _compile_kernels(module, batch)
    module.zero_grad()
    layers = batch.config.get_text_config().num_hidden_layers / config.get_text_config().num_hidden_layers
    return Device(
        "cpu",
        cpu_memory(),
        bandwidth,
        speed.rate,
        vision,
        decode_overhead=decoding.overhead * layers,
        on_cpu=True,
        overheads=Overheads(
            decoded_row=decoding.row * layers,
            decoded_key=decoding.key * layers,
            learning=speed.overhead * layers,
            scoring=speed.scoring_overhead * layers,
            optimizer=_optimizer_overhead(module, bandwidth, clock) * layers,
            scoring_rate=speed.scoring,
        ),
    )


def cpu_memory() -> int:
    """Bytes of this machine's memory, or of this process's share of it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    return memory


def _shortened(config: Any) -> Any:
    found = copy.deepcopy(config)
    text = found.get_text_config()
    if text.num_hidden_layers > LAYERS and model_size(config, ModelConfig()).total > LARGEST:
        text.num_hidden_layers = LAYERS
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:LAYERS]
    return found


def _compile_kernels(module: PackedVLM, batch: BatchSizes) -> None:
    """Makes passes of `LENGTHS` lengths. A CPU compiles and keeps kernels for each in bfloat16, as it does for steps of a run."""
    for length in range(LENGTHS):
        row = BatchSizes(batch.config, PromptSizes((256 + 8 * length,), ((),)), (64 + length,))
        forward_rows(module, text_rows(module, row), CPU).scores.sum().backward()


def _fastest(call: Callable[[], object], clock: Clock, times: int = 2) -> float:
    call()
    seconds = []
    for _ in range(times):
        start = clock()
        call()
        seconds.append(clock() - start)
    return min(seconds)


@dataclass(frozen=True)
class PassSpeed:
    """Seconds of passes through decoder and head: ``overhead + operations / rate``, with and without gradients."""

    rate: float
    overhead: float  # of a forward and a backward pass
    scoring: float  # rate of a forward pass, as a multiple of ``rate``
    scoring_overhead: float


def timed_rows(batch: BatchSizes, tokens: int = TOKENS) -> BatchSizes:
    """The first prompts of the batch with all their samples, of at most `FLOPS` operations and ``tokens`` (and `TOKENS`).

    If a single prompt has more, equal rows of the batch's mean lengths, each with a prompt of its own.
    """
    tokens = min(tokens, TOKENS)

    def too_large(prompts: int) -> bool:
        part = batch.part(prompts)
        return 3 * part.language_flops > FLOPS or part.packed_tokens > tokens

    if count := bisect_left(range(1, len(batch.prompts.tokens) + 1), True, key=too_large):
        return batch.part(count)
    rows = len(batch.responses)
    length, response = (max(int(total / rows), 2) for total in (batch.lengths.sum(), sum(batch.responses)))
    response = min(response, length - 1)
    one = BatchSizes(batch.config, PromptSizes((length - response,), ((),)), (response,))
    count = max(min(int(FLOPS / (3 * one.language_flops)), tokens // length, rows), 1)
    return replace(one, prompts=one.prompts.repeated(count), responses=one.responses * count)


def _pass_speed(module: PackedVLM, batch: BatchSizes, clock: Clock) -> PassSpeed:
    """Measured on text rows with the lengths and the shared prompts of the batch, and on a row of two tokens."""
    module.train()

    def both(data: DataProto) -> None:
        forward_rows(module, data, CPU).scores.sum().backward()
        module.zero_grad()

    @torch.no_grad()
    def forward(data: DataProto) -> None:
        forward_rows(module, data, CPU)

    rows, least = (
        text_rows(module, each) for each in (batch, BatchSizes(batch.config, PromptSizes((1,), ((),)), (1,)))
    )
    whole, small, score, score_small = (
        _fastest(partial(call, data), clock, 3) for call in (both, forward) for data in (rows, least)
    )
    flops = batch.language_flops
    rate, scoring = 3 * flops / max(whole - small, whole / 2), flops / max(score - score_small, score / 2)
    return PassSpeed(rate, small, scoring / rate, score_small)


def text_rows(module: PackedVLM, batch: BatchSizes) -> DataProto:
    """Rows of random words with the lengths of the batch. Samples of a prompt share it; what is shown behind it is text too."""
    config = module.model.config
    vocabulary, image = int(config.get_text_config().vocab_size), module.family.media_tokens(config).image
    words = vocabulary if image is None else min(image, vocabulary)
    prompts = torch.tensor(batch.prompts.tokens).repeat_interleave(batch.samples)
    own, sampled = batch.lengths - prompts, torch.tensor(batch.responses)
    widths = int(prompts.max()), int(own.max())
    generator = torch.Generator().manual_seed(0)
    asked = torch.randint(0, words, (len(batch.prompts.tokens), widths[0]), generator=generator)
    ids = torch.cat(
        [
            asked.repeat_interleave(batch.samples, 0),
            torch.randint(0, words, (len(own), widths[1]), generator=generator),
        ],
        dim=1,
    )
    banned = torch.tensor(module.banned_ids, dtype=torch.int64)
    ids = ids.masked_fill(torch.isin(ids, banned), next(each for each in range(words) if each not in module.banned_ids))
    places = torch.arange(sum(widths))
    mask = (places >= widths[0] - prompts[:, None]) & (places < widths[0] + own[:, None])
    types = torch.zeros_like(ids, dtype=torch.int8)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "mm_token_type_ids": types,
            "position_ids": module.family.position_ids(types, mask.long(), None, None, None, config),
            "response_mask": (torch.arange(widths[1]) < sampled[:, None]).long(),
        }
    )


def _vision_rate(module: PackedVLM, family: VLMFamily, batch: BatchSizes, config: Any, clock: Clock) -> float:
    """Operations per second of forward and backward pass of the tower, over some of the batch's media."""
    grids = [grid for each in batch.prompts.grids for grid in each]
    if not grids:
        return 1.0  # never asked for
    media = _media(family, config, torch.tensor(grids, dtype=torch.int64))
    flops = 3 * int(family.vision_flops(config, family.grids(media, config)).sum())

    def both() -> None:
        family.features(module.model, media).sum().backward()
        module.zero_grad()

    return flops / _fastest(both, clock)


def _media(family: VLMFamily, config: Any, grids: Tensor) -> dict[str, Tensor]:
    """Inputs of the tower for about `FLOPS` operations: images of the first grids, or as many smallest images."""
    smallest = family.dummy_media(config)
    costs = 3 * family.vision_flops(config, grids).sum(1).cumsum(0)
    count = max(int((costs <= FLOPS).sum()), 1)
    if "image_grid_thw" in smallest:
        patches = int(grids[:count].prod(-1).sum())
        pixels = torch.zeros(patches, smallest["pixel_values"].shape[1])
        return {"pixel_values": pixels, "image_grid_thw": grids[:count]}
    return {name: torch.cat([tensor] * count) for name, tensor in smallest.items()}


@dataclass(frozen=True)
class DecodingSpeed:
    """Seconds of a decoding step of the Hugging Face engine: ``overhead + rows * (row + keys * key)``.

    ``keys`` are the tokens in the cache of each row. All of them are copied in a step, so that ``key`` counts for long responses.
    """

    overhead: float
    row: float
    key: float


def _decoding_speed(model: Any, batch: BatchSizes, clock: Clock) -> DecodingSpeed:
    """Measured with the engine itself: steps of one row, of many rows behind prompts of the batch's mean length, and of as many
    rows at the end of its longest row.
    """
    _keep_freed_memory()
    engine = HFEngine.of_model(model)
    work = 2 * model_size(model.config, ModelConfig()).layers
    prompt = max(sum(batch.prompts.tokens) // len(batch.prompts.tokens), 1)
    longest = max(min(int(batch.lengths.max()), int(FLOPS / work), TOKENS // 2), 2)
    shortest = min(prompt, longest // 2)
    rows = max(min(len(batch.responses), engine.max_num_seqs, int(FLOPS / work / DECODED), TOKENS // longest), 2)
    padded = len(set(batch.prompts.tokens)) > 1
    alone, short, long = (
        step_seconds(engine, *size, padded, clock) for size in ((1, shortest), (rows, shortest), (rows, longest))
    )
    model.requires_grad_(True)
    key = max(long - short, 0.0) / (rows * (longest - shortest))
    row = max(short - alone, 0.0) / (rows - 1)
    return DecodingSpeed(max(alone - row, 0.0), max(row - (shortest + 1 + DECODED / 2) * key, 0.0), key)


def _keep_freed_memory() -> None:
    """Lets glibc reuse freed blocks of up to 31 MiB, as it does in a run after the first passes.

    A step that gets its memory from the system each time takes longer. glibc reuses blocks up to the size of the largest one that
    has been freed, of those of at most 32 MiB.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def step_seconds(engine: HFEngine, rows: int, length: int, padded: bool, clock: Clock) -> float:
    """The median of `DECODED` steps of rows behind a prompt of ``length`` tokens.

    Args:
        padded: the last one of several rows has a prompt that is shorter by a token: rows of different lengths need a mask.

    Raises:
        NonFiniteLogits: the model gives no distribution.
    """
    requests = [_prompt_of(engine, length)] * rows
    if padded and min(rows, length) > 1:
        requests[-1] = _prompt_of(engine, length - 1)
    for seed, request in enumerate(requests):
        engine.submit(replace(request, seed=seed), SamplingParams(max_tokens=DECODED + 2))
    done = engine.poll()  # reads the prompts
    seconds = []
    for _ in range(DECODED):
        start = clock()
        engine.poll()
        seconds.append(clock() - start)
    done += engine.poll()  # all rows end
    for error in filter(None, (each.error for each in done)):
        raise error
    return median(seconds)


def _prompt_of(engine: HFEngine, length: int) -> Request:
    word = next(each for each in range(10**6) if each not in engine.banned_ids)
    types, mask = torch.zeros(1, length, dtype=torch.int8), torch.ones(1, length, dtype=torch.int64)
    positions = engine.family.position_ids(types, mask, None, None, None, engine.model.config)[0]
    return Request([], torch.full((length,), word), types[0], positions)


def _optimizer_overhead(module: PackedVLM, bandwidth: float, clock: Clock) -> float:
    """Seconds of an optimizer step beside those of reading and writing weights and moments: of starting operations."""
    parameters = list(module.parameters())
    optimizer = Optimizer(parameters, OptimizerConfig(lr=1e-9))

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    moved = OPTIMIZER_BYTES * sum(parameter.numel() for parameter in parameters) / bandwidth
    return max(_fastest(step, clock, 3) - moved, 0.0)


def _bandwidth(clock: Clock) -> float:
    """Bytes read and written per second by a copy of 64 MiB."""
    source = torch.zeros(2**24)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source), clock)
