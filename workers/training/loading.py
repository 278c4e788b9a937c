"""Checkpoints into packed models, whole or spread over ranks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from dataproto.errors import CheckpointError, InvalidConfig
from dataproto.vlm import VLMFamily, family_of
from workers.model.attention import use_packed_attention
from workers.model.kept_features import KeptFeatures, keeps_features
from workers.model.lora import add_adapters, base_layers, base_name
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.model.patches import cast_parameter, place_parameter
from workers.model.precision import compute_dtype
from workers.model.quantized import four_bit
from workers.parallel import Transform, parallelize
from workers.ranks.mesh import Ranks
from workers.weights.hollow_model import absent_weights, all_tensors, fill, hollow_model, make_room, stand_ins
from workers.weights.stored_tensors import CheckpointFiles, whole
from workers.weights.weight_sources import WeightSources

WITHIN_RUNS = ("", "actor/", "global_step_*/actor/")
"""Where exported weights lie below a role's folder, a checkpoint and a run's directory."""
Wrap = Callable[[PreTrainedModel, VLMFamily], PackedVLM]


def load_packed(
    config: Any, device: torch.device, ranks: Ranks, trains: bool, wrap: Wrap
) -> tuple[PackedVLM, list[Transform]]:
    """Loads a checkpoint directory (or hub name) and spreads it over ``ranks``, ready for packed forwards.

    The weights are in float32 if they are to be trained, else in the numbers that the model computes with, or in 4 bits.

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
        model, files, sources = hollow_model(config.model_path, family, trains and config.mtp_coef > 0)
    absent = absent_weights(model, sources)
    with stand_ins(model):
        freeze(model, family, config, trains)
        module = wrap(model, family)
    if module.makes_logits and any(name.startswith(f"{family.head}.") for name in absent):
        raise CheckpointError(
            f"{config.model_path} lacks {family.head}, the language-model head, as a reward model or another classifier does: "
            "its next tokens would be random; name the checkpoint of a model that writes text"
        )
    if (dtype := compute_dtype(config.dtype, device.type)) == torch.bfloat16:
        store_in_half(model, family, ranks)
    use_packed_attention(model, config.flash_attention)  # instead of the default kernel
    transforms = parallelize(module, ranks, config)
    layers = base_layers(model, family) if config.load_in_4bit else {}
    layers = {name: layer for name, layer in layers.items() if model.get_parameter(name).is_meta}
    for layer in layers.values():
        place_parameter(layer, "weight", nn.Parameter(torch.empty(0), requires_grad=False))  # until it is read
    hollow = {name for name, tensor in all_tensors(module) if tensor.device.type == "meta"}
    make_room(module, device, parameters_on=torch.device("cpu") if config.offload else device)
    with ranks.fail_together():
        fill(module, "model.", files, sources, hollow)
        fill_in_4_bits(layers, files, sources, device, dtype)
    if trains and ranks.size("pp") == 1 and keeps_features(model, family):
        module.kept = KeptFeatures(family, model.config, dtype)
    return module, transforms


def fill_in_4_bits(
    layers: Mapping[str, nn.Module],
    files: CheckpointFiles,
    sources: WeightSources,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Reads the weights of linear layers, one at a time, and rounds each on the device; they expand to ``dtype``.

    Raises:
        CheckpointError: a file is damaged.
        InvalidConfig: a weight cannot be rounded, or torchao is not installed.
    """
    for name, layer in layers.items():
        stored = sources.stored[str(base_name(name))]
        with files.opened():
            weight = stored.read(whole(stored.shape)).to(device, dtype)
        place_parameter(layer, "weight", four_bit(weight, name))


def freeze(model: PreTrainedModel, family: VLMFamily, config: ModelConfig, trains: bool) -> None:
    """Adds adapters if the configuration has some, and turns off the gradients of weights that are not trained.

    Raises:
        InvalidConfig: an option is for the vision tower, and the model has none, or for linear layers, and it has fused experts.
    """
    if config.load_in_4bit and list(family.expert_layers(model)):
        raise InvalidConfig(
            "load_in_4bit=True rounds the weights of linear layers, and most of this model's are of fused experts: leave it out"
        )
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


def store_in_half(model: PreTrainedModel, family: VLMFamily, ranks: Ranks) -> None:
    """Casts the weights of a model that are never trained to bfloat16, in place; its results stay the same to the bit.

    Weights that the layout computes with in float32 keep it: those of the family, those of recurrent mixers under FSDP except
    their projections, and all under autocast.
    """
    sharded = ranks.size("dp", "sp") > 1
    if ranks.size("tp") > 1 and not sharded:
        return
    kept = {id(weight) for name, weight in model.named_parameters() if family.in_float32(base_name(name) or name)}
    for mixer in family.recurrent_modules(model).values() if sharded else ():
        kept |= {id(weight) for name, weight in mixer.named_parameters() if "proj" not in name.partition(".")[0]}
    for weight in model.parameters():
        if not weight.requires_grad and id(weight) not in kept and weight.dtype == torch.float32:
            cast_parameter(weight, torch.bfloat16)


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
        raise InvalidConfig(
            f"model path {model_path!r} holds no checkpoint: {_no_checkpoint(model_path, error)}"
        ) from error
    family = family_of(config)
    family.check_supported(config)
    return family


def _no_checkpoint(model_path: str, error: Exception) -> str:
    """Why a path or hub name holds no checkpoint. For a path, the hub client would only say what form hub names have."""
    path = Path(model_path)
    if within := [file for depth in WITHIN_RUNS for file in path.glob(f"{depth}huggingface/config.json")]:
        return f"it is part of a run; give {within[-1].parent}"
    if (path / "adapter_config.json").exists():
        return "it is an adapter; merge it into its base model (merge_and_unload of peft) and name the merged model"
    if path.is_dir() and not (path / "config.json").exists():
        return "the directory has no config.json"
    if not path.exists() and (path.is_absolute() or model_path.startswith(".") or model_path.count("/") > 1):
        return "there is no such directory"
    return str(error).splitlines()[0]
