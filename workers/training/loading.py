"""Checkpoints into packed models, whole or spread over ranks."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily, family_of
from workers.model.attention import use_packed_attention
from workers.model.lora import add_adapters
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel import Transform, parallelize
from workers.ranks.mesh import Ranks
from workers.weights import all_tensors, fill, hollow_model, make_room, stand_ins

Wrap = Callable[[PreTrainedModel, VLMFamily], PackedVLM]


def load_packed(
    config: Any, device: torch.device, ranks: Ranks, trains: bool, wrap: Wrap
) -> tuple[PackedVLM, list[Transform]]:
    """Loads a checkpoint directory (or hub name) in float32 and spreads it over ``ranks``, ready for packed forwards.

    The model is spread without its weights; then each rank reads its own parts of them, one after the other, to its device. So
    every rank needs the checkpoint, and none ever holds the whole model unless it keeps it.

    Args:
        config: an `ModelConfig` with a ``model_path``.
        wrap: the packed model around a loaded one.

    Raises:
        InvalidConfig: there is no such checkpoint, or it does not fit the options.
        CheckpointError: the checkpoint is damaged, incomplete, or of another model than its config says.
        RankFailure: another rank cannot read it.
    """
    family = checkpoint_family(config.model_path)
    with ranks.fail_together():
        model, files, sources = hollow_model(config.model_path, family)
    with stand_ins(model):
        freeze(model, family, config, trains)
        module = wrap(model, family)
    use_packed_attention(model, config.flash_attention)  # instead of the default kernel
    transforms = parallelize(module, ranks, config)
    hollow = {name for name, tensor in all_tensors(module) if tensor.device.type == "meta"}
    make_room(module, device, parameters_on=torch.device("cpu") if config.offload else device)
    with ranks.fail_together():
        fill(module, "model.", files, sources, hollow)
    return module, transforms


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
    """
    try:
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model path {model_path!r} holds no checkpoint: {str(error).splitlines()[0]}") from error
    return family_of(config)
