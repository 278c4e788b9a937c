"""Low-rank adapters through ``peft``: put into a model in place, so that module paths stay, and merged when weights leave it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily
from workers.engine_config import EngineConfig

BASE = ".base_layer"  # what peft puts between an adapted layer's name and its own parameters
ADAPTER = "default"


def add_adapters(model: PreTrainedModel, family: VLMFamily, config: EngineConfig) -> None:
    """Freezes the model and puts trainable adapters, which change nothing yet, beside its linear layers.

    Their initial values depend on nothing but the model, so all ranks draw the same.

    Raises:
        InvalidConfig: ``peft`` is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise InvalidConfig("lora needs the package peft: pip install 'dataproto-vlm[lora]'") from error
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # any number scales
        target_modules=list(adapted_layers(model, family, config.lora_vision)),
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)


def adapted_layers(model: nn.Module, family: VLMFamily, vision: bool) -> Iterator[str]:
    """Names of the linear layers that get an adapter: those of decoder layers and, with ``vision``, of tower and mergers."""
    roots = (family.decoder_layers, *((family.vision_tower, *family.mergers) if vision else ()))
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and any(name.startswith(f"{root}.") for root in roots):
            yield name


def base_name(name: str) -> str | None:
    """The base model's name of a parameter, ``None`` for one of an adapter.

    >>> base_name("layers.0.q_proj.base_layer.weight"), base_name("layers.0.q_proj.lora_A.default.weight")
    ('layers.0.q_proj.weight', None)
    """
    if ".lora_A." in name or ".lora_B." in name:
        return None
    return name.replace(BASE, "")


def merged_weight(model: nn.Module, name: str, full: Callable[[Tensor], Tensor]) -> Tensor:
    """The parameter ``name`` of an adapted layer with its adapter merged: W + alpha / r * B A; a bias as it is.

    Args:
        full: makes a whole tensor out of one that may be sharded.
    """
    prefix, _, kind = name.rpartition(f"{BASE}.")
    weight = full(model.get_parameter(name))
    if kind != "weight":
        return weight
    layer: Any = model.get_submodule(prefix)
    down, up = (full(part[ADAPTER].weight) for part in (layer.lora_A, layer.lora_B))
    return weight + layer.scaling[ADAPTER] * (up @ down).to(weight.dtype)
