"""Checkpoints into packed models, whole or spread over ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, PreTrainedModel

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily, family_of
from workers.model.attention import use_packed_attention
from workers.model.lora import add_adapters
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel import Transform, parallelize
from workers.ranks.mesh import Ranks

Wrap = Callable[[PreTrainedModel, VLMFamily], PackedVLM]


def load_packed(
    config: Any, device: torch.device, ranks: Ranks, trains: bool, wrap: Wrap
) -> tuple[PackedVLM, list[Transform]]:
    """Loads a checkpoint directory (or hub name) in float32 and spreads it over ``ranks``, ready for packed forwards.

    Where FSDP spreads it, the first rank (of each pipeline stage) reads the checkpoint into its host memory and the others
    receive their parts; with tensor parallelism or offload each rank reads it, and keeps its own part.

    Args:
        config: an `ModelConfig` with a ``model_path``.
        wrap: the packed model around a loaded one.
    """
    family = checkpoint_family(config.model_path)
    one_reads = ranks.size("dp", "sp") > 1 == ranks.size("tp") and not config.offload
    reader = ranks.rank("dp") == ranks.rank("sp") == 0
    if one_reads and not reader:
        model = hollow_model(config.model_path)
    else:
        model = family.model_class().from_pretrained(config.model_path, dtype=torch.float32, attn_implementation="sdpa")
    freeze(model, family, config, trains)
    if ranks.mesh is None:
        model.to(device)  # type: ignore[arg-type]
    module = wrap(model, family)
    use_packed_attention(model, config.flash_attention)  # instead of the default kernel
    weights = module.state_dict() if one_reads and reader else {}
    transforms = parallelize(module, ranks, config)
    if one_reads:
        receive(module, weights, device, ranks)
    return module, transforms


def hollow_model(model_path: str) -> PreTrainedModel:
    """The checkpoint's model without storage, on the meta device."""
    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model: PreTrainedModel = (
            family_of(config).model_class().from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        )
    return model.eval()


def receive(module: nn.Module, weights: dict[str, Any], device: torch.device, ranks: Ranks) -> None:
    """Fills sharded parameters, and buffers, with those of the first rank of dp x sp, one after the other."""
    if not weights:
        module.to_empty(device=device)
    group = ranks.group("dp", "sp")
    send = partial(distributed.broadcast, src=distributed.get_global_rank(group, 0), group=group)  # type: ignore[arg-type]
    for name, parameter in module.named_parameters():
        whole = weights[name].to(device) if weights else torch.empty(parameter.shape, device=device)
        send(whole)
        sharded: Any = parameter.data
        shape, offset = compute_local_shape_and_global_offset(whole.shape, sharded.device_mesh, sharded.placements)
        part = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
        sharded.to_local().copy_(whole[part])
    for buffer in module.buffers():
        send(buffer)


def freeze(model: PreTrainedModel, family: VLMFamily, config: ModelConfig, trains: bool) -> None:
    """Adds adapters if the configuration has some, and turns off the gradients of weights that are not trained.

    Raises:
        InvalidConfig: an option is for the vision tower, and the model has none.
    """
    if (config.freeze_vision or config.freeze_language or config.lora_vision) and not family.vision_parts:
        raise InvalidConfig(
            f"freeze_vision, freeze_language and lora_vision: models of type {family.model_type} have no vision tower; leave "
            "them out"
        )
    if config.lora_rank:
        add_adapters(model, family, config)
    if not trains or config.freeze_language:
        model.requires_grad_(False)
    if trains and (config.freeze_vision or config.freeze_language):
        for path in family.vision_parts:
            model.get_submodule(path).requires_grad_(config.freeze_language)


def checkpoint_family(model_path: str) -> VLMFamily:
    """The family of a checkpoint directory or hub name.

    Raises:
        InvalidConfig: there is no such checkpoint.
        UnknownModel: it is of no registered family.
        InvalidConfig: it has parts that the family does not compute.
    """
    try:
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model path {model_path!r} holds no checkpoint: {str(error).splitlines()[0]}") from error
    family = family_of(config)
    family.check_supported(config)
    return family
