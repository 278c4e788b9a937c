"""The parameters of a model by part, from its config alone: the model is built on the meta device, without storage."""

from dataclasses import dataclass
from typing import Any

import torch

from dataproto.vlm import VLMFamily, family_of
from workers.model.lora import base_layers
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout
from workers.training.loading import freeze

FREEZING = ("lora_rank", "lora_vision", "load_in_4bit", "freeze_vision", "freeze_language")
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
    experts: int = 0  # of the layers, those in experts that tokens choose from
    expert_layers: int = 0  # decoder layers that are mixtures of experts
    tensors: int = 0  # weights that are handed over to an engine
    four_bit: int = 0  # of the layers, those kept in 4 bits
    largest_four_bit: int = 0  # of one weight

    @property
    def total(self) -> int:
        return self.vision + self.layers + self.embedding + self.head + self.rest

    def on_rank(self, layout: Layout) -> int:
        """Parameters that the fullest rank keeps: layers are split over pp and tp, words over tp, everything over the shards."""
        layers, embedding, head = (part / layout.tp for part in (self.layers, self.embedding, self.head))
        ends = self.vision + embedding + head + self.rest
        if layout.pp > 1:  # the first stage has tower and embedding, the last one the head, tied or not
            ends = max(self.vision + embedding, (head or embedding) + self.rest)
        return round((layers / layout.pp + ends) / layout.shards)

    def gathered(self, layout: Layout) -> float:
        """Parameters of a rank's part of the model, which has a part of the experts with ep, once FSDP has gathered them."""
        return self.on_rank(layout) * layout.shards - self._experts_elsewhere(layout) / layout.pp / layout.tp

    def experts_here(self, layout: Layout) -> float:
        """Of `gathered`, those in experts."""
        return self.experts / (layout.ep * layout.tp * layout.pp)

    def computed_layer(self, layout: Layout) -> float:
        """Parameters of the largest decoder layer as a rank computes it."""
        return (self.largest_layer - self._experts_elsewhere(layout) / max(self.expert_layers, 1)) / layout.tp

    def _experts_elsewhere(self, layout: Layout) -> float:
        return self.experts * (1 - 1 / layout.ep)


def model_size(config: Any, compute: ModelConfig, trains: bool = True, makes_logits: bool = True) -> ModelSize:
    """The size of the model that a config describes.

    Args:
        compute: what of it is trained, and the adapters.
        trains: ``False`` for a reference.
        makes_logits: ``False`` for a critic, whose head has one output.
    """
    with torch.device("meta"):
        model = family_of(config).new_model(config)
    return count(model, family_of(config), compute, trains, makes_logits)


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
    return ModelSize(
        **sizes,
        largest_layer=max(
            sum(weight.numel() for weight in layer.parameters() if id(weight) not in four_bit) for layer in layers
        ),
        trained=sum(trained.values()),
        tower_trained=trained["vision"] > 0,
        experts=sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name),
        expert_layers=len(family.expert_layers(model)),
        tensors=sum(1 for _ in model.parameters()),
        four_bit=sum(four_bit.values()),
        largest_four_bit=max(four_bit.values(), default=0),
    )
