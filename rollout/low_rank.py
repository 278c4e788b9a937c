"""The adapter (LoRA) of a policy in an engine that holds the base: every row has it, and nobody merges it into the weights.

Each adapted layer adds two plain products. An engine for the adapters of several policies is `rollout.adapter_layers`.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily
from rollout.adapters import DOWN, UP, Pair, linear_layers


def add_low_rank(out: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """``out + x A^T B^T`` for A ``down (r, in)`` and B ``up (out, r)``, which has the adapter's scale."""
    return out + linear(linear(x, down), up)


def pairs_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Pair]:
    """A and B of each layer, from A and B in any order under the layer's name and `DOWN` or `UP`.

    >>> down, up = torch.zeros(1, 3), torch.zeros(2, 1)
    >>> [each.shape for each in pairs_of([("q.lora_A.weight", down), ("q.lora_B.weight", up)])["q"]]
    [torch.Size([1, 3]), torch.Size([2, 1])]

    Raises:
        InvalidConfig: one of a pair is missing.
    """
    found = dict(tensors)
    names = [name.removesuffix(DOWN) for name in found if name.endswith(DOWN)]
    wanted = {name + end for name in names for end in (DOWN, UP)}
    if odd := sorted(wanted ^ found.keys()):
        raise InvalidConfig(f"an adapter has A and B of each layer: {odd[0]} is missing or not known")
    return {name: (found[name + DOWN], found[name + UP]) for name in names}


class LowRankLayers:
    """The linear layers of a Hugging Face decoder, which add the products of an adapter; of zeros until `load`."""

    def __init__(self, model: nn.Module, family: VLMFamily, rank: int) -> None:
        """Replaces ``forward`` of each layer instance. A and B are buffers of it, which move with the model."""
        self.layers = linear_layers(model, family)
        for layer in self.layers.values():
            layer.register_buffer("low_rank_down", layer.weight.new_zeros(rank, layer.in_features), persistent=False)
            layer.register_buffer("low_rank_up", layer.weight.new_zeros(layer.out_features, rank), persistent=False)
            layer.forward = partial(_adapted, layer, layer.forward)  # type: ignore[method-assign]

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies an adapter in place; layers that it lacks have none.

        Raises:
            InvalidConfig: it has a layer or a shape that the model has not.
        """
        pairs = pairs_of(tensors)
        if unknown := sorted(pairs.keys() - self.layers.keys()):
            raise InvalidConfig(f"the engine's model has no linear layer {unknown[0]!r} for an adapter")
        for name, layer in self.layers.items():
            for place, matrix in zip(_buffers(layer), pairs.get(name, (None, None)), strict=True):
                if matrix is None:
                    place.zero_()
                elif matrix.shape == place.shape:
                    place.copy_(matrix)
                else:
                    raise InvalidConfig(
                        f"the adapter of {name!r} has a matrix {tuple(matrix.shape)}, and the engine has room for "
                        f"{tuple(place.shape)}"
                    )


def _buffers(layer: nn.Module) -> Pair:
    return layer.get_buffer("low_rank_down"), layer.get_buffer("low_rank_up")


def _adapted(layer: nn.Module, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return add_low_rank(base(x), x, *_buffers(layer))
