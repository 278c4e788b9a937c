"""One packed forward and backward pass of a tiny model, in one process or over the ranks of a layout."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.vlm import family_of
from helpers.batches import film_prompt, prompt_batch, with_responses, with_turns
from helpers.forward_rows import forward_rows
from helpers.tiny_models import GEMMA4_TYPES, rounding, tiny_config, tiny_model
from workers.model.model_config import ModelConfig
from workers.model.named_weights import full_tensor
from workers.model.packed_model import PackedVLM
from workers.parallel import parallelize
from workers.parallel.pipeline import PipelineParallel
from workers.parallel.transform import Transform
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.training.micro_batches import MicroBatch, MicroBatchFeed, common_lengths, micro_batches

CPU = torch.device("cpu")
TEMPERATURE = 0.8

Result = dict[str, Any]
"""``log_probs`` and ``entropy`` ``(B, R)``, ``gradients`` by name."""


def config_with_heads(model_type: str, heads: int, key_value_heads: int, tied: bool = False) -> Any:
    """`tiny_config` with another number of heads; see `with_heads`."""
    return with_heads(tiny_config(model_type), heads, key_value_heads, tied)


def with_heads(config: Any, heads: int, key_value_heads: int, tied: bool = False) -> Any:
    """The config, changed to another number of heads; the size of a head shrinks if the config has no option for it."""
    text = config.get_text_config()
    if config.model_type in GEMMA4_TYPES:  # whose layers have heads of their own
        counts = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
        config.text_config = type(text)(**text.to_dict() | counts | {"tie_word_embeddings": tied})
        config.tie_word_embeddings = tied
        return config
    if getattr(text, "head_dim", None) is None and "mrope_section" in (text.rope_parameters or {}):
        half = text.hidden_size // heads // 2
        sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
        text.rope_parameters = text.rope_parameters | {
            "mrope_section": sections
        }  # a new dict, since all models share this one
    text.num_attention_heads, text.num_key_value_heads = heads, key_value_heads
    config.tie_word_embeddings = text.tie_word_embeddings = tied
    return config


def mixed_rows(config: Any) -> DataProto:
    """Rows with two images of unequal size, with one and with none; a shared image, samples of one prompt, an empty response."""
    grids = [[(4, 6), (8, 4)], [(6, 6)], [], [(6, 6)]]
    prompts = prompt_batch(config, grids, texts=[4, 7, 5, 3])[[0, 0, 1, 2, 2, 3, 0]]
    return with_responses(config, prompts, lengths=[5, 4, 1, 6, 2, 3, 0], width=6)


def film_rows(config: Any) -> DataProto:
    """Rows with a video and with two images in turn, and one of text: two data-parallel ranks have one kind of media each."""
    prompts = prompt_batch(config, [[(4, 6), (8, 4)], []], texts=[24, 5])
    prompts = DataProto.concat([prompts, film_prompt(config, prompts["input_ids"].shape[1])])
    return with_responses(config, prompts[[0, 2, 0, 2, 1]], lengths=[4, 2, 3, 5, 1], width=5)


def text_rows(config: Any) -> DataProto:
    """Rows without images, with fewer response tokens than ranks."""
    return with_responses(config, prompt_batch(config, [[], []], texts=[3, 2]), lengths=[1, 1], width=1)


def one_image(config: Any) -> DataProto:
    """One row with one image."""
    return with_responses(config, prompt_batch(config, [[(4, 4)]], texts=[5]), lengths=[3], width=4)


def turn_rows(config: Any) -> DataProto:
    """Samples of two prompts, with images in later turns: other ones in each sample, and none."""
    prompts = prompt_batch(config, [[(4, 6)], []], texts=[4, 6])[[0, 0, 1, 1, 0]]
    return with_turns(config, prompts, [[(4, 4), (6, 4)], [(8, 4)], [(4, 6)], [], [(4, 4)]])


def odd_rows(config: Any) -> DataProto:
    """Rows with two images and with none, two samples of a prompt, and an odd number of packed tokens."""
    prompts = prompt_batch(config, [[(4, 6), (8, 4)], []], texts=[4, 6])
    tokens = int(prompts["attention_mask"].sum())
    return with_responses(config, prompts[[0, 0, 1]], lengths=[3, 1, 1 + tokens % 2], width=4)


def run_pass(
    config: Any,
    data: DataProto,
    ranks: Ranks | None = None,
    prepare: Callable[[PackedVLM], None] | None = None,
    **options: Any,
) -> Result:
    """Log-probs, entropies and the full gradients of a weighted sum of both. With dp > 1 each rank has every dp-th row, and with
    pp > 1 they are two micro-batches or more.

    ``options`` are those of `ModelConfig`; ``prepare`` changes the model before it is parallelized.
    """
    ranks = ranks or Ranks()
    model = tiny_model(config.model_type, config=config)
    module = PackedVLM(model, family_of(config), TEMPERATURE)
    if options.get("freeze_vision"):
        model.get_submodule(str(module.family.vision_tower)).requires_grad_(False)
    if prepare is not None:
        prepare(module)
    transforms = parallelize(module, ranks, ModelConfig(**options))
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(2, *data["response_mask"].shape, generator=generator) * data["response_mask"]
    mine = np.arange(ranks.rank("dp"), len(data), ranks.size("dp"))

    def weighted(outputs: Any, rows: np.ndarray) -> Tensor:
        return (outputs.log_probs * weights[0, rows] + 0.1 * outputs.entropy * weights[1, rows]).sum()

    if ranks.size("pp") > 1:
        scores = _over_stages(module, ranks, transforms, data[mine], lambda outputs, at: weighted(outputs, mine[at]))
    else:
        (length,) = common_lengths([data[mine]], module, ranks)
        outputs = forward_rows(module, data[mine], CPU, entropy=True, tower=ranks.size("dp") > 1, length=length)
        weighted(outputs, mine).backward()
        scores = torch.stack([outputs.log_probs, outputs.entropy], 1).detach()
    for transform in transforms:
        transform.sum_gradients(module)
    gradients = {n: full_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    every = [np.arange(rank, len(data), ranks.size("dp")) for rank in range(ranks.size("dp"))]
    order = torch.from_numpy(np.concatenate(every)).argsort()
    log_probs, entropy = torch.cat(ranks.all_gather(scores, "dp"))[order].unbind(1)
    stages = ranks.all_gather(gradients, "pp")
    return {
        "log_probs": log_probs,
        "entropy": entropy,
        "gradients": {name: gradient for stage in stages for name, gradient in stage.items()},
    }


def _over_stages(
    module: PackedVLM,
    ranks: Ranks,
    transforms: Sequence[Transform],
    data: DataProto,
    weighted: Callable[[Any, Any], Tensor],
) -> Tensor:
    """Log-probs and entropies ``(B, 2, R)`` of two micro-batches or more, and their gradients."""
    found = torch.zeros(len(data), 2, data["response_mask"].shape[1])

    def conclude(part: MicroBatch, outputs: Any) -> None:
        if not part.inert:
            found[part.index] = torch.stack([outputs.log_probs, outputs.entropy], 1).detach()
            weighted(outputs, part.index).backward()

    parts = micro_batches(data, module, 60 * ranks.size("sp"), ranks)
    for transform in transforms:
        transform.before_backward(module, last=False)
    (pipeline,) = (transform for transform in transforms if isinstance(transform, PipelineParallel))
    pipeline.run(MicroBatchFeed(module, parts, CPU, conclude), CPU, torch.float32, entropy=True, backward=True)
    for transform in transforms:
        transform.reduce_gradients(module)
    return ranks.broadcast_from_last({"found": found}, "pp")["found"]


def differences(found: Result, expected: Result) -> list[str]:
    """Describes values that differ: log-probs and entropies by more than 1e-5, gradients by more than 1e-4 of their norm."""
    wrong = []
    for name in ("log_probs", "entropy"):
        error = float((found[name] - expected[name]).abs().max())
        if not error <= 1e-5:
            wrong.append(f"{name} off by {error:.1e}")
    for name in sorted(found["gradients"].keys() | expected["gradients"].keys()):
        ours, theirs = (result["gradients"].get(name, torch.zeros(())) for result in (found, expected))
        error, norm = float((ours - theirs).norm()), float(theirs.norm())
        if not error <= 1e-4 * norm + 2 * rounding(name):
            wrong.append(f"{name} off by {error:.1e} of {norm:.1e}")
    return wrong


@cache
def joined(layout: Layout) -> Ranks:
    """The calling rank's `Ranks` in ``layout``, on the CPU; the same in each call, since each process group has threads that
    wait as long as the process lives.
    """
    return init_ranks(layout, CPU)
