"""Checkpoints into packed models, whole or spread over ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily, family_of
from workers.engine_config import EngineConfig
from workers.lora import add_adapters
from workers.mesh import Ranks
from workers.packed import PackedVLM
from workers.parallel import parallelize

Wrap = Callable[[PreTrainedModel, VLMFamily], PackedVLM]


def load_packed(config: Any, device: torch.device, ranks: Ranks, trains: bool, wrap: Wrap) -> PackedVLM:
    """Loads a checkpoint directory (or hub name) in float32 and spreads it over ``ranks``, ready for packed forwards.

    Where FSDP alone spreads it, the first rank reads the checkpoint into its host memory and the others receive their parts;
    with tensor parallelism or offload each rank reads it, and keeps its own part.

    Args:
        config: an `EngineConfig` with a ``model_path``.
        wrap: the packed model around a loaded one.
    """
    family = checkpoint_family(config.model_path)
    alone_reads = ranks.size("dp", "sp") == ranks.layout.world_size > 1 and not config.offload
    if alone_reads and not ranks.first:
        model = hollow_model(config.model_path)
    else:
        model = AutoModelForImageTextToText.from_pretrained(
            config.model_path, dtype=torch.float32, attn_implementation="sdpa"
        )
    freeze(model, family, config, trains)
    if ranks.mesh is None:
        model.to(device)  # type: ignore[arg-type]
    module = wrap(model, family)
    weights = module.state_dict() if alone_reads and ranks.first else {}
    parallelize(module, ranks, config)
    if alone_reads:
        receive(module, weights, device, ranks)
    return module


def hollow_model(model_path: str) -> PreTrainedModel:
    """The checkpoint's model without storage, on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(model_path), dtype=torch.float32, attn_implementation="sdpa"
        )
    return model.eval()


def receive(module: nn.Module, weights: dict[str, Any], device: torch.device, ranks: Ranks) -> None:
    """Fills sharded parameters, and buffers, from the first rank's whole ones."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if not ranks.first:
        module.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(module, weights, options=options)
    for buffer in module.buffers():
        distributed.broadcast(buffer, src=0)


def freeze(model: PreTrainedModel, family: VLMFamily, config: EngineConfig, trains: bool) -> None:
    """Leaves gradients to what is trained, and adds the adapters if it is they."""
    if not trains:
        model.requires_grad_(False)
    elif config.lora is not None:
        add_adapters(model, family, config.lora)
    if config.freeze_vision:
        for path in (family.vision_tower, *family.mergers):
            model.get_submodule(path).requires_grad_(False)


def checkpoint_family(model_path: str) -> VLMFamily:
    """The family of a checkpoint directory or hub name.

    Raises:
        InvalidConfig: there is no such checkpoint.
        UnknownModel: it is of no registered family.
    """
    try:
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model path {model_path!r} holds no checkpoint: {str(error).splitlines()[0]}") from error
    return family_of(config)
