"""The adapter (LoRA) of the policy in vLLM's model: each linear layer of the decoder adds two products to its own.

vLLM's own adapters look up the adapter of each row in kernels of their own (punica), for requests with many of them. Here all
rows have one. So a layer needs only two plain products, which are compiled and recorded with it, and vLLM loads weights as ever.
Where it has fused several layers, their A are rows of one matrix, and their B on the diagonal of another.
"""

import copy
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from rollout.adapters import Pair
from rollout.low_rank import add_low_rank, pairs_of
from rollout.vllm.running_engine import model_of
from rollout.vllm.weights import JOINED_WEIGHTS, by_parameter, part_of_rank, renamed, wanted_part

LORA_RANK, WEIGHTS_STAY = "lora_rank", "weights_stay"
"""Keys of vLLM's ``additional_config``."""
LOW_RANK = "low_rank"
"""The attribute of a layer with its A ``(R, in)`` and B ``(out, R)``, this rank's parts."""


@cache
def with_low_rank(kind: Any) -> Any:
    """A class of vLLM's methods of linear layers that also adds the products of `LOW_RANK`."""

    class WithLowRank(kind):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return add_low_rank(kind.apply(self, layer, x, bias), x, *layer.low_rank)

    return WithLowRank


def decoder_linears(worker: Any) -> dict[str, Any]:
    """The linear layers of a worker's decoder, by name."""
    from vllm.model_executor.layers.linear import LinearBase

    model, inner = model_of(worker), ".0.any.weight"
    (name,) = renamed(model, family_of(worker.model_config.hf_config).decoder_layers + inner)
    root = name.removesuffix(inner)
    layers = model.get_submodule(root).named_modules()
    return {f"{root}.{path}": layer for path, layer in layers if isinstance(layer, LinearBase)}


def make_room(worker: Any, rank: int) -> int:
    """Gives each linear layer of the decoder an adapter of zeros of this rank. Returns their bytes."""
    taken = 0
    for name, layer in decoder_linears(worker).items():
        parts = len(JOINED_WEIGHTS.get(name.rpartition(".")[2], ("alone",)))
        into = getattr(layer, "input_size_per_partition", layer.input_size)  # the latter if the layer is not split
        out = getattr(layer, "output_size_per_partition", layer.output_size)
        down, up = (
            torch.zeros(*shape, dtype=layer.params_dtype, device=worker.device)
            for shape in ((parts * rank, into), (out, parts * rank))
        )
        layer.low_rank = down, up
        taken += down.nbytes + up.nbytes
        method, kind = copy.copy(layer.quant_method), cast(Any, type(layer.quant_method))
        method.__class__, method.of_weight = with_low_rank(kind), layer.quant_method
        layer.quant_method = method
    return taken


@torch.no_grad()
def load_low_rank(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies an adapter into the running model in place; layers that it lacks have none.

    Raises:
        InvalidConfig: it has a layer or a rank that the model has no room for.
    """
    left = decoder_linears(worker)
    for name, matrices in _matrices(worker, tensors):
        for place, matrix in zip(left.pop(name).low_rank, matrices, strict=True):
            place.zero_()
            place[: matrix.shape[0], : matrix.shape[1]].copy_(matrix)
    for layer in left.values():
        for place in layer.low_rank:
            place.zero_()


@torch.no_grad()
def differing_low_rank(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the layers whose adapter is not equal to the given one, in the engine's dtype."""
    layers = decoder_linears(worker)
    return [
        name
        for name, matrices in _matrices(worker, tensors)
        if not all(
            torch.equal(place[: matrix.shape[0], : matrix.shape[1]], matrix.to(place))
            for place, matrix in zip(layers[name].low_rank, matrices, strict=True)
        )
    ]


def _matrices(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Pair]]:
    """This rank's A and B of each of vLLM's layers that the adapter has, by name."""
    model, layers, pairs = model_of(worker), decoder_linears(worker), pairs_of(tensors)
    downs, ups = (
        by_parameter(model, [(f"{name}.weight", pair[each]) for name, pair in pairs.items()]) for each in (0, 1)
    )
    for (weight, down), (_, up) in zip(downs, ups, strict=True):
        name = weight.removesuffix(".weight")
        if name not in layers:
            raise InvalidConfig(
                f"vLLM's model has no linear layer {name!r} for an adapter: the engine's option lora_rank=0 has adapters merged"
            )
        yield name, joined(layers[name], down, up)


def joined(layer: Any, down: list[Tensor], up: list[Tensor]) -> Pair:
    """This rank's A and B of a layer that has fused several.

    Raises:
        InvalidConfig: the layer has no room for their ranks.
    """
    room, whole = layer.low_rank, torch.cat(down)
    rank, starts = len(whole), torch.tensor([0, *map(len, down)]).cumsum(0).tolist()
    if rank > len(room[0]):
        raise InvalidConfig(
            f"the adapter's rank is above the engine's lora_rank: {rank} rows of A, room for {len(room[0])}"
        )
    placed = [pad(each, (start, rank - start - each.shape[1])) for each, start in zip(up, starts, strict=False)]
    return part_of_rank(whole, (rank, room[0].shape[1])), wanted_part(layer, placed, room[1][:, :rank])
