"""The speed of this CPU, measured within seconds on a model of the config's widths."""

import copy
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.vlm import VLMFamily, family_of
from recipes.forecast.batch_sizes import BatchSizes
from recipes.forecast.devices import DEVICES, Device
from recipes.forecast.model_size import model_size
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.training.forward_pass import forward_rows

TOKENS = 2048  # at most, in a timed pass
FLOPS = 3e10  # about, of a timed pass
LARGEST = 300_000_000  # parameters of a model that is timed whole
LAYERS = 4  # of the timed part of a larger one
CPU = torch.device("cpu")
Clock = Callable[[], float]


def this_device(batch: BatchSizes) -> Device:
    """The machine's GPU, with its own memory, or else its CPU.

    A GPU that the table does not have counts as an H100.
    """
    return this_gpu() if torch.cuda.is_available() else calibrate_cpu(batch)


def this_gpu() -> Device:
    """The machine's first GPU; see `this_device`."""
    title = torch.cuda.get_device_name().lower()
    known = next((each for each in DEVICES if each.split("-")[0] in title), "h100")
    return replace(DEVICES[known], name=title, memory=torch.cuda.get_device_properties(0).total_memory)


def calibrate_cpu(batch: BatchSizes, clock: Clock = time.perf_counter) -> Device:
    """This CPU, with the operations per second that a model of these widths reaches on rows like these.

    Builds the model with random weights, of a large one the first decoder layers, and times forward and backward passes of text
    rows, of the tower, decoding steps, and a copy in memory. ``clock`` returns seconds.
    """
    config = _shortened(batch.config)
    family = family_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family_of(config).model_class().from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    decode = _decoding_seconds(model, config, clock)
    module = PackedVLM(model, family, 1.0)
    language = _language_rate(module, family, batch, config, clock)
    vision = _vision_rate(module, family, batch, config, clock)
    layers = batch.config.get_text_config().num_hidden_layers / config.get_text_config().num_hidden_layers
    return Device(
        "cpu", cpu_memory(), _bandwidth(clock), language, vision, decode_overhead=decode * layers, on_cpu=True
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


def _fastest(call: Callable[[], object], clock: Clock, times: int = 2) -> float:
    call()
    seconds = []
    for _ in range(times):
        start = clock()
        call()
        seconds.append(clock() - start)
    return min(seconds)


def _language_rate(module: PackedVLM, family: VLMFamily, batch: BatchSizes, config: Any, clock: Clock) -> float:
    """Operations per second of forward and backward pass over rows of text that are as long as the batch's."""
    rows = len(batch.responses)
    length, response = (max(int(total / rows), 2) for total in (batch.lengths.sum(), sum(batch.responses)))
    response = min(response, length - 1)
    flops = family.flops(config, [length], logit_tokens=response).language * 3
    count = max(min(int(FLOPS / flops), TOKENS // length, rows), 1)
    data = text_rows(module, count, length, response)
    module.train()

    def both() -> None:
        forward_rows(module, data, CPU).scores.sum().backward()
        module.zero_grad()

    return count * flops / _fastest(both, clock)


def text_rows(module: PackedVLM, rows: int, length: int, response: int) -> DataProto:
    """Rows of one prompt and one response, of random words."""
    vocabulary = int(module.model.config.get_text_config().vocab_size)
    image = module.family.media_tokens(module.model.config).image
    words = vocabulary if image is None else min(image, vocabulary)
    ids = torch.randint(0, words, (rows, length), generator=torch.Generator().manual_seed(0))
    banned = torch.tensor(module.banned_ids, dtype=torch.int64)
    ids = ids.masked_fill(torch.isin(ids, banned), next(each for each in range(words) if each not in module.banned_ids))
    mask = torch.ones_like(ids)
    types = torch.zeros_like(ids, dtype=torch.int8)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": types,
            "position_ids": module.family.position_ids(types, mask, None, None, None, module.model.config),
            "response_mask": mask[:, :response],
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


@torch.inference_mode()
def _decoding_seconds(model: Any, config: Any, clock: Clock) -> float:
    """Seconds of a decoding step of one row, which are mostly those of starting operations."""
    ids = torch.ones(1, 8, dtype=torch.int64)
    text = model.get_submodule(family_of(config).language_model)
    cache = text(input_ids=ids, use_cache=True).past_key_values

    def step() -> None:
        text(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)

    return _fastest(step, clock, 5)


def _bandwidth(clock: Clock) -> float:
    """Bytes read and written per second by a copy of 64 MiB."""
    source = torch.zeros(2**24)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source), clock)
