"""Low-rank adapters (LoRA, arXiv:2106.09685), inserted into a model in place and merged when its weights are exported.

Linear layers use the adapters of ``peft`` by an operator of ours. Fused experts ``(experts, out, in)`` use `AdaptedExperts`, with
one adapter for each expert and weight. It computes the same as peft's ``target_parameters``, whose matrices hold all experts
together and so cannot be split over ranks by expert.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from transformers import PreTrainedModel

from dataproto.errors import InvalidConfig, raised_as
from dataproto.vlm import VLMFamily
from workers.model.model_config import ModelConfig
from workers.model.patches import hollow_parameter, replace_forward, replace_submodule, set_on_module

BASE_LAYER = ".base_layer"  # peft inserts it between the name of an adapted layer and those of its parameters
ADAPTER_NAME = "default"
ADAPTERS_OFF = "_disable_adapters"  # the attribute of adapted layers, peft's and ours, that turns their adapters off


def add_adapters(model: PreTrainedModel, family: VLMFamily, config: ModelConfig) -> None:
    """Freezes the model and adds trainable adapters to its linear layers and experts, except routers.

    The output of the model does not change. Adapters are initialised from a fixed seed, so they are equal on all ranks.

    Raises:
        InvalidConfig: ``peft`` is not installed.
    """
    with raised_as(InvalidConfig, "lora_rank needs the package peft: pip install 'dataproto-vlm[lora]'", ImportError):
        import peft
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # any number scales
        target_modules=[f"model.{name}" for name in _adapted_layers(model, family, config.lora_vision)],
    )
    # Of a mixture of experts peft takes layers named gate_proj or up_proj for experts, dense and shared ones too; in a plain
    # module it takes them by their names.
    plain = nn.ModuleDict({"model": model})
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(settings, plain, adapter_name=ADAPTER_NAME)
        for name in family.expert_layers(model):
            adapted = AdaptedExperts(model.get_submodule(name), config.lora_rank, config.lora_alpha)
            replace_submodule(model, name, adapted)
    if not config.load_in_4bit:  # torchao's weights of 4 bits have an operator of their own
        for layer in plain.modules():
            if isinstance(layer, peft.tuners.lora.Linear):
                replace_forward(layer, MethodType(adapted_forward, layer))


def adapted_forward(layer: Any, x: Tensor) -> Tensor:
    """What an adapted linear layer of peft computes, by the operator `low_rank_linear`. As a method of each layer, and not an
    object of its own, all layers share one compiled code.
    """
    base = layer.base_layer
    if layer.disable_adapters:
        return base(x)
    down, up = (part[ADAPTER_NAME].weight for part in (layer.lora_A, layer.lora_B))
    flat, scale = x.flatten(0, -2), layer.scaling[ADAPTER_NAME]
    out, _ = low_rank_linear(flat, base.weight, base.bias, down.to(x.dtype), up.to(x.dtype), scale)
    return out.unflatten(0, x.shape[:-1])


@torch.library.custom_op("dataproto::low_rank_linear", mutates_args=())
def low_rank_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``x W^T + bias + scale * (x A^T) B^T`` ``(T, out)``, and ``x A^T`` ``(T, r)`` for its gradient, by one operator.

    As operators of their own the two products would make three tensors of the size of the output, of which selective
    checkpointing keeps two. W and the bias are frozen: they get no gradient.
    """
    out, inner = linear(x, weight, bias), linear(x, down)
    return out.addmm_(inner, up.t(), alpha=scale), inner


@low_rank_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], down.shape[0])


@torch.library.custom_op("dataproto::low_rank_input_gradient", mutates_args=())
def _low_rank_input_gradient(grad: Tensor, weight: Tensor, inner: Tensor, down: Tensor) -> Tensor:
    return torch.mm(grad, weight).addmm_(inner, down)


@_low_rank_input_gradient.register_fake
def _(grad: Tensor, weight: Tensor, inner: Tensor, down: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


def _keep_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, down, up, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, down, up, output[1])


def _low_rank_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, down, up, inner = ctx.saved_tensors
    grad_inner = torch.mm(grad, up).mul(ctx.scale)
    grad_x = _low_rank_input_gradient(grad, weight, grad_inner, down) if ctx.needs_input_grad[0] else None
    return grad_x, None, None, torch.mm(grad_inner.t(), x), torch.mm(grad.t(), inner).mul(ctx.scale), None


low_rank_linear.register_autograd(_low_rank_gradients, setup_context=_keep_for_gradient)


def _adapted_layers(model: nn.Module, family: VLMFamily, vision: bool) -> Iterator[str]:
    """Names of the linear layers that get an adapter: in decoder layers and, with ``vision``, in vision tower and mergers."""
    roots = (family.decoder_layers, *(family.vision_parts if vision else ()))
    routers = {id(part) for router in family.routers(model) for part in router.modules()}
    for name, layer in model.named_modules():
        inside = any(name.startswith(f"{root}.") for root in roots)
        if isinstance(layer, nn.Linear) and inside and id(layer) not in routers:
            yield name


def base_layers(model: nn.Module, family: VLMFamily) -> dict[str, nn.Module]:
    """The linear layers under adapters in the decoder, by the names of their weights."""
    return {
        f"{name}.weight": layer
        for name, layer in model.named_modules()
        if name.endswith(BASE_LAYER) and name.startswith(f"{family.decoder_layers}.")
    }


class AdaptedExperts(nn.Module):
    """Fused experts that use W + alpha / r * B A instead of each weight W ``(experts, out, in)``.

    Each weight keeps its name; its adapter is ``lora_A_<name>`` ``(experts, r, in)`` and ``lora_B_<name>`` ``(experts, out, r)``.
    Experts are the first dimension of all three, so that they are split over ranks alike. A forward pass computes the merged
    weights of all experts, which take as much memory as the weights. They are kept for the backward pass unless
    ``activation_checkpointing="full"`` recomputes them.
    """

    def __init__(self, experts: nn.Module, rank: int, alpha: float) -> None:
        """Moves the weights out of ``experts``, which must hold only fused weights; it then computes with merged ones."""
        super().__init__()
        self.scaling = alpha / rank
        self._disable_adapters = False  # as peft's layers call it
        self.weights = tuple(name for name, _ in experts.named_parameters())
        for name in self.weights:
            weight = experts.get_parameter(name)
            count, out, into = weight.shape
            bound = 1 / math.sqrt(into)  # the same initialisation as peft's: that of a linear layer
            down = torch.empty(count, rank, into, dtype=weight.dtype, device=weight.device).uniform_(-bound, bound)
            self.register_parameter(name, weight)
            self.register_parameter(f"lora_A_{name}", nn.Parameter(down))
            self.register_parameter(f"lora_B_{name}", nn.Parameter(weight.new_zeros(count, out, rank)))
            hollow_parameter(experts, name)
        self.compute = (experts,)  # in a tuple, so that it is not registered as a submodule with its meta parameters

    @property
    def num_experts(self) -> int:
        """The number of experts on this rank."""
        return int(self.compute[0].num_experts)  # type: ignore[arg-type]

    @num_experts.setter
    def num_experts(self, count: int) -> None:
        set_on_module(self.compute[0], "num_experts", count)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Calls the experts with their merged weights."""
        merged = {name: getattr(self, name) if self._disable_adapters else self.merged(name) for name in self.weights}
        return functional_call(self.compute[0], merged, args, kwargs)

    def merged(self, name: str) -> Tensor:
        """The merged weight ``name``, ``(experts, out, in)``."""
        down, up = getattr(self, f"lora_A_{name}"), getattr(self, f"lora_B_{name}")
        return torch.baddbmm(getattr(self, name), up, down, alpha=self.scaling)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """In here the model computes as it did before it had adapters."""
    adapted = list(_with_adapters(model))
    for layer in adapted:
        set_on_module(layer, ADAPTERS_OFF, True)
    try:
        yield
    finally:
        for layer in adapted:
            set_on_module(layer, ADAPTERS_OFF, False)


def _with_adapters(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that have adapters. What replaces a module of experts keeps it, unregistered, as ``compute[0]``."""
    for module in model.modules():
        layers = [module]
        while isinstance(inner := getattr(layers[-1], "compute", None), tuple):
            layers += inner
        yield from (layer for layer in layers if hasattr(layer, ADAPTERS_OFF))


def base_name(name: str) -> str | None:
    """The name of a parameter in the base model, or ``None`` if it belongs to an adapter.

    >>> base_name("layers.0.q_proj.base_layer.weight"), base_name("layers.0.q_proj.lora_A.default.weight")
    ('layers.0.q_proj.weight', None)
    >>> base_name("layers.0.mlp.experts.down_proj"), base_name("layers.0.mlp.experts.lora_A_down_proj")
    ('layers.0.mlp.experts.down_proj', None)
    """
    if ".lora_A" in name or ".lora_B" in name:
        return None
    return name.replace(BASE_LAYER, "")


def matrix_name(name: str) -> str | None:
    """The name by which an engine knows a matrix of a linear layer's adapter, or ``None`` for any other parameter.

    >>> matrix_name("layers.0.q_proj.lora_A.default.weight"), matrix_name("layers.0.q_proj.base_layer.weight")
    ('layers.0.q_proj.lora_A.weight', None)
    """
    end = f".{ADAPTER_NAME}.weight"
    return name.replace(end, ".weight") if name.endswith(end) else None


def scale_of(model: nn.Module, name: str) -> float:
    """What the parameter ``name`` of an adapter is multiplied by outside of the model, where B has the scale."""
    layer, up, _ = name.rpartition(".lora_B.")
    return float(model.get_submodule(layer).scaling[ADAPTER_NAME]) if up else 1.0  # type: ignore[index]


def is_adapted(model: nn.Module, name: str) -> bool:
    """Whether the parameter ``name`` has an adapter."""
    owner, _, child = name.rpartition(".")
    return BASE_LAYER in name or hasattr(model.get_submodule(owner), f"lora_A_{child}")


def merged_weight(model: nn.Module, name: str, full: Callable[[Tensor], Tensor]) -> Tensor:
    """The parameter ``name`` of an adapted layer with its adapter merged: W + alpha / r * B A, in the numbers of the adapter.
    A bias is unchanged.

    Args:
        full: returns the full tensor of one that may be sharded.
    """
    if BASE_LAYER not in name:
        return _merged_experts(model, name, full)
    prefix, _, kind = name.rpartition(f"{BASE_LAYER}.")
    weight = full(model.get_parameter(name))
    if kind != "weight":
        return weight
    layer: Any = model.get_submodule(prefix)
    down, up = (full(part[ADAPTER_NAME].weight) for part in (layer.lora_A, layer.lora_B))
    return weight.to(up.dtype) + layer.scaling[ADAPTER_NAME] * (up @ down)


def _merged_experts(model: nn.Module, name: str, full: Callable[[Tensor], Tensor]) -> Tensor:
    owner, _, child = name.rpartition(".")
    experts: Any = model.get_submodule(owner)
    weight, down, up = (full(getattr(experts, each)) for each in (child, f"lora_A_{child}", f"lora_B_{child}"))
    return torch.baddbmm(weight.to(up.dtype), up, down, alpha=experts.scaling)
