"""Low-rank adapters: put into a model in place, so that module paths stay, and merged when weights leave it.

Those of linear layers are ``peft``'s. Fused experts ``(experts, out, in)`` get one for each expert and weight (`AdaptedExperts`),
which computes what peft's ``target_parameters`` do; peft's own matrices, each of all experts together, cannot be dealt out to
ranks by expert.
"""

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily
from workers.model.model_config import ModelConfig
from workers.model.patches import hollow_parameter, replace_submodule, set_expert_count

BASE = ".base_layer"  # what peft puts between an adapted layer's name and its own parameters
ADAPTER = "default"


def add_adapters(model: PreTrainedModel, family: VLMFamily, config: ModelConfig) -> None:
    """Freezes the model and puts trainable adapters, which change nothing yet, beside its linear layers and experts.

    Routers get none. The adapters' initial values depend on nothing but the model, so all ranks draw the same.

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
        for name in expert_layers(model, family):
            adapted = AdaptedExperts(model.get_submodule(name), config.lora_rank, config.lora_alpha)
            replace_submodule(model, name, adapted)


def adapted_layers(model: nn.Module, family: VLMFamily, vision: bool) -> Iterator[str]:
    """Names of the linear layers that get an adapter: those of decoder layers and, with ``vision``, of tower and mergers."""
    roots = (family.decoder_layers, *((family.vision_tower, *family.mergers) if vision else ()))
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and any(name.startswith(f"{root}.") for root in roots):
            yield name


def expert_layers(model: nn.Module, family: VLMFamily) -> list[str]:
    """Names of the modules that hold a sparse layer's experts."""
    pattern = family.experts
    return [name for name, _ in model.named_modules() if pattern is not None and fnmatchcase(name, pattern)]


class AdaptedExperts(nn.Module):
    """Fused experts in whose place each weight W ``(experts, out, in)`` is used as W + alpha / r * B A, for every expert.

    The weights keep their names; beside each are ``lora_A_<name>`` ``(experts, r, in)`` and ``lora_B_<name>``
    ``(experts, out, r)``, both with the experts first, so that experts are dealt out with all that is theirs. A forward pass
    computes the sums of all experts of a layer, which takes as much memory as their weights; the backward pass needs them, so
    they are kept unless ``activation_checkpointing="full"`` computes them again.
    """

    def __init__(self, experts: nn.Module, rank: int, alpha: float) -> None:
        """``experts`` holds fused weights alone; it computes with the sums from now on."""
        super().__init__()
        self.scaling = alpha / rank
        self.weights = tuple(name for name, _ in experts.named_parameters())
        for name in self.weights:
            weight = experts.get_parameter(name)
            count, out, into = weight.shape
            bound = 1 / math.sqrt(into)  # as peft's, which are those of a linear layer
            down = torch.empty(count, rank, into, dtype=weight.dtype, device=weight.device).uniform_(-bound, bound)
            self.register_parameter(name, weight)
            self.register_parameter(f"lora_A_{name}", nn.Parameter(down))
            self.register_parameter(f"lora_B_{name}", nn.Parameter(weight.new_zeros(count, out, rank)))
            hollow_parameter(experts, name)
        self.compute = (experts,)  # in a tuple, so that its empty parameters are not this module's

    @property
    def num_experts(self) -> int:
        """How many of them are here."""
        return int(self.compute[0].num_experts)  # type: ignore[arg-type]

    @num_experts.setter
    def num_experts(self, count: int) -> None:
        set_expert_count(self.compute[0], count)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the experts make of the same arguments with the sums."""
        sums = {name: self.merged(name) for name in self.weights}
        made: Tensor = functional_call(self.compute[0], sums, args, kwargs)
        return made

    def merged(self, name: str) -> Tensor:
        """``(experts, out, in)``."""
        down, up = getattr(self, f"lora_A_{name}"), getattr(self, f"lora_B_{name}")
        return torch.baddbmm(getattr(self, name), up, down, alpha=self.scaling)


def base_name(name: str) -> str | None:
    """The base model's name of a parameter, ``None`` for one of an adapter.

    >>> base_name("layers.0.q_proj.base_layer.weight"), base_name("layers.0.q_proj.lora_A.default.weight")
    ('layers.0.q_proj.weight', None)
    >>> base_name("layers.0.mlp.experts.down_proj"), base_name("layers.0.mlp.experts.lora_A_down_proj")
    ('layers.0.mlp.experts.down_proj', None)
    """
    if ".lora_A" in name or ".lora_B" in name:
        return None
    return name.replace(BASE, "")


def is_adapted(model: nn.Module, name: str) -> bool:
    """Whether an adapter stands beside the parameter ``name``."""
    owner, _, child = name.rpartition(".")
    return BASE in name or hasattr(model.get_submodule(owner), f"lora_A_{child}")


def merged_weight(model: nn.Module, name: str, full: Callable[[Tensor], Tensor]) -> Tensor:
    """The parameter ``name`` of an adapted layer with its adapter merged: W + alpha / r * B A; a bias as it is.

    Args:
        full: makes a whole tensor out of one that may be sharded.
    """
    if BASE not in name:
        return _merged_experts(model, name, full)
    prefix, _, kind = name.rpartition(f"{BASE}.")
    weight = full(model.get_parameter(name))
    if kind != "weight":
        return weight
    layer: Any = model.get_submodule(prefix)
    down, up = (full(part[ADAPTER].weight) for part in (layer.lora_A, layer.lora_B))
    return weight + layer.scaling[ADAPTER] * (up @ down).to(weight.dtype)


def _merged_experts(model: nn.Module, name: str, full: Callable[[Tensor], Tensor]) -> Tensor:
    owner, _, child = name.rpartition(".")
    experts: Any = model.get_submodule(owner)
    weight, down, up = (full(getattr(experts, each)) for each in (child, f"lora_A_{child}", f"lora_B_{child}"))
    return torch.baddbmm(weight, up, down, alpha=experts.scaling)
