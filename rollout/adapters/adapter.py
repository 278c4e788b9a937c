"""One low-rank adapter: the matrices by the layer that they adapt."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily
from rollout.adapters.packed_tensors import PackedTensors, pack
from rollout.sampling import derive_seed

Pair = tuple[Tensor, Tensor]
"""A ``(r, in)`` and B ``(out, r)``: the layer's output gets alpha / r * B A x more."""

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""The ends of peft's names of A and B."""


@dataclass(frozen=True)
class AdapterConfig:
    """Which layers of the language model an adapter has, and how strong it is. The vision tower has none.

    Args:
        rank: r of every pair of matrices.
        alpha: the output of a pair is scaled by alpha / r.
        attention: the linear layers of attention.
        mlp: the linear layers of the MLPs.
        head: the output projection. If the embedding is tied to it, the embedding stays as it is.
    """

    rank: int
    alpha: float = 32.0
    attention: bool = True
    mlp: bool = True
    head: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise InvalidConfig(f"rank={self.rank} must be at least 1 and alpha={self.alpha} above 0")
        if not (self.attention or self.mlp or self.head):
            raise InvalidConfig("attention, mlp and head are all off: nothing would be trained; turn one on")

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter by the names of the layers that it adapts. Two adapters are equal only if they are the same object."""

    config: AdapterConfig
    pairs: Mapping[str, Pair]
    directory: Path | None = None  # of a snapshot that was read from files

    @property
    def trained(self) -> bool:
        """Whether the matrices have gradients: those of a snapshot do not, and never change."""
        return any(down.requires_grad for down, _ in self.pairs.values())

    def packed(self, dtype: torch.dtype = torch.float32) -> PackedTensors:
        """A copy of the matrices, rounded to a dtype, that does not follow their training."""
        return pack(dict(self.named_parameters()), dtype)

    def snapshot(self, dtype: torch.dtype = torch.float32) -> "Adapter":
        """A copy in float32 that does not follow the training of this one, with its numbers rounded to a dtype."""
        return unpacked(self.config, self.packed(dtype))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices, A before B of each layer, under peft's names without its prefix."""
        for name, (down, up) in self.pairs.items():
            yield name + DOWN, down
            yield name + UP, up


def unpacked(config: AdapterConfig, packed: PackedTensors) -> Adapter:
    """The adapter, in float32, whose matrices `Adapter.packed` has copied."""
    matrices = iter(packed.in_float32().tensors().items())
    return Adapter(config, {name.removesuffix(DOWN): (down, up) for (name, down), (_, up) in zip(matrices, matrices)})


def adapted_layers(model: nn.Module, family: VLMFamily, config: AdapterConfig) -> dict[str, tuple[int, int]]:
    """The layers that an adapter has by name, with their sizes (out, in).

    Raises:
        InvalidConfig: the MLPs hold fused experts, which have no adapters here.
    """
    if config.mlp and family.experts is not None:
        fused = next((name for name, _ in model.named_modules() if fnmatchcase(name, family.experts)), None)
        if fused is not None:
            raise InvalidConfig(f"{fused} holds fused experts, which have no adapters: pass train_mlp=False")
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith(f"{family.decoder_layers}."):
            inner = name.removeprefix(f"{family.decoder_layers}.")
            if config.attention if "attn" in inner else config.mlp:
                found[name] = (layer.out_features, layer.in_features)
    if config.head:
        rows, columns = family.lm_head(model).weight.shape
        found[family.head] = (rows, columns)
    return found


def new_adapter(model: nn.Module, family: VLMFamily, config: AdapterConfig, seed: int, device: Any = None) -> Adapter:
    """A trainable adapter in float32 that changes nothing yet: B is zero, A uniform as that of a linear layer (as in peft).

    Each A has a random stream of its own, from the seed and the name of its layer, so that a layer's A does not depend on
    which others are adapted.

    Raises:
        InvalidConfig: see `adapted_layers`.
    """
    pairs = {}
    for name, (out, into) in adapted_layers(model, family, config).items():
        generator = torch.Generator().manual_seed(derive_seed("adapter", seed, name))
        bound = 1 / math.sqrt(into)
        down = torch.empty(config.rank, into).uniform_(-bound, bound, generator=generator)
        pairs[name] = (
            nn.Parameter(down.to(device)),
            nn.Parameter(torch.zeros(out, config.rank, device=device)),
        )
    return Adapter(config, pairs)
