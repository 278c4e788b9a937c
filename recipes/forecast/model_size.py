"""The parameters of a model by part, from its config alone: the model is built on the meta device, without storage."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dataproto.vlm import VLMFamily, family_of
from workers.model.lora import base_layers
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout
from workers.training.loading import freeze

PARTS = ("vision", "layers", "embedding", "head", "rest")


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters. A tied head counts as embedding."""

    vision: int  # tower and mergers
    layers: int  # decoder layers
    embedding: int
    head: int
    rest: int  # the final norm
    largest_layer: int  # of the decoder
    trained: int  # of all parts, adapters included
    tower_trained: bool
    norms: tuple[int, ...] = ()  # widths of the norms in a decoder layer
    expert_layers: int = 0  # decoder layers that are mixtures of experts
    matrices: int = 0  # of the trained ones, those in matrices of layers, which Muon steps
    four_bit: int = 0  # of the layers, those kept in 4 bits
    largest_four_bit: int = 0  # of one weight

    @property
    def total(self) -> int:
        return self.vision + self.layers + self.embedding + self.head + self.rest

    def on_rank(self, layout: Layout) -> int:
        """Parameters that the fullest rank keeps: layers are split over pp and tp, words over tp, everything over the shards.

        >>> size = ModelSize(100, 800, embedding=40, head=60, rest=0, largest_layer=80, trained=1000, tower_trained=True)
        >>> size.on_rank(Layout()), size.on_rank(Layout(dp=2)), size.on_rank(Layout(tp=2)), size.on_rank(Layout(pp=2))
        (1000, 500, 550, 540)
        """
        layers, embedding, head = (part / layout.tp for part in (self.layers, self.embedding, self.head))
        ends = self.vision + embedding + head + self.rest
        if layout.pp > 1:  # the first stage has tower and embedding, the last one the head, tied or not
            ends = max(self.vision + embedding, (head or embedding) + self.rest)
        return round((layers / layout.pp + ends) / layout.shards)


def model_size(config: Any, compute: ModelConfig, trains: bool = True, makes_logits: bool = True) -> ModelSize:
    """The size of the model that a config describes.

    Args:
        compute: what of it is trained, and the adapters.
        trains: ``False`` for a reference.
        makes_logits: ``False`` for a critic, whose head has one output.
    """
    frozen = (
        compute.lora_rank,
        compute.lora_vision,
        compute.load_in_4bit,
        compute.freeze_vision,
        compute.freeze_language,
    )
    key = (config.to_json_string(), *frozen, trains, makes_logits)
    if key not in _counted:
        _counted[key] = count(meta_model(config), family_of(config), compute, trains, makes_logits)
    return _counted[key]


_counted: dict[tuple[Any, ...], ModelSize] = {}


def meta_model(config: Any) -> Any:
    """The model without storage."""
    with torch.device("meta"):
        return family_of(config).new_model(config)


def count(model: Any, family: VLMFamily, compute: ModelConfig, trains: bool, makes_logits: bool) -> ModelSize:
    """Counts the parameters of a model, which it freezes and gives adapters as ``compute`` says."""
    freeze(model, family, compute, trains)
    places = {
        "vision": family.vision_parts,
        "layers": (family.decoder_layers,),
        "embedding": (family.embedding,),
        "head": (family.head,),
    }
    sizes, trained = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for name, weight in model.named_parameters():
        part = next(
            (part for part, paths in places.items() if any(name.startswith(f"{each}.") for each in paths)), "rest"
        )
        sizes[part] += weight.numel()
        trained[part] += weight.numel() * weight.requires_grad
    if not makes_logits:
        hidden = int(model.config.get_text_config().hidden_size)
        sizes["head"], trained["head"] = hidden, hidden * trains
    layers = list(model.get_submodule(family.decoder_layers).children())
    rounded = base_layers(model, family) if compute.load_in_4bit and trains else {}
    four_bit = {id(model.get_parameter(name)): model.get_parameter(name).numel() for name in rounded}
    blocks = [path for path in (family.vision_blocks, family.decoder_layers) if path is not None]
    matrices = (
        weight.numel()
        for path in blocks
        for weight in model.get_submodule(path).parameters()
        if weight.requires_grad and weight.ndim == 2
    )
    return ModelSize(
        **sizes,
        largest_layer=max(
            sum(weight.numel() for weight in layer.parameters() if id(weight) not in four_bit) for layer in layers
        ),
        trained=sum(trained.values()),
        tower_trained=trained["vision"] > 0,
        norms=tuple(_norms(layers[0])),
        expert_layers=len(family.expert_layers(model)),
        matrices=sum(matrices),
        four_bit=sum(four_bit.values()),
        largest_four_bit=max(four_bit.values(), default=0),
    )


def _norms(layer: nn.Module) -> list[int]:
    return [
        int(weight.numel())
        for module in layer.modules()
        if type(module).__name__.endswith("Norm")
        for weight in module.parameters(recurse=False)
    ]


def mlp_width(text: Any) -> int:
    """Numbers between the two products of a layer's MLP; of a mixture, those of the experts that a token is sent to and of the
    experts that all tokens share. If the first layers are dense, the mean of all layers, rounded up.

    >>> from types import SimpleNamespace
    >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    >>> mlp_width(SimpleNamespace(**sizes)), mlp_width(SimpleNamespace(**sizes, n_shared_experts=1))
    (128, 160)
    >>> mlp_width(SimpleNamespace(**sizes, first_k_dense_replace=1, num_hidden_layers=4))
    120
    """
    experts, width = getattr(text, "num_experts_per_tok", None), getattr(text, "moe_intermediate_size", None)
    beside = getattr(text, "top_k_experts", None)  # a dense MLP
    if beside and width:
        return int(text.intermediate_size) + int(beside) * (int(width) + int(text.hidden_size) // 2)
    if not experts or not width:
        return int(text.intermediate_size)
    shared = (getattr(text, "n_shared_experts", None) or 0) * int(width)
    shared += getattr(text, "shared_expert_intermediate_size", None) or 0
    sparse = int(experts) * (int(width) + int(text.hidden_size) // 2) + int(shared)
    if not (dense := int(getattr(text, "first_k_dense_replace", None) or 0)):
        return sparse
    layers = int(text.num_hidden_layers)
    return -(-(dense * int(text.intermediate_size) + (layers - dense) * sparse) // layers)
