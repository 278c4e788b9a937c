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
from rollout.vllm.weights import renamed

LORA_RANK, WEIGHTS_STAY = "lora_rank", "weights_stay"
"""Keys of vLLM's ``additional_config``."""
LOW_RANK = "low_rank"
"""The attribute of a layer with its A ``(R, in)`` and B ``(out, R)``, this rank's parts."""


JOINED_LAYERS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Layers that vLLM fuses, in its order."""


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
        parts = len(JOINED_LAYERS.get(name.rpartition(".")[2], ("alone",)))
        into = getattr(layer, "input_size_per_partition", layer.input_size)  # the latter if the layer is not split
        out = getattr(layer, "output_size_per_partition", layer.output_size)
        down, up = (
            torch.zeros(*shape, dtype=layer.params_dtype, device=worker.device)
            for shape in ((parts * rank, into), (out, parts * rank))
        )
        layer.low_rank = down, up
        taken += down.nbytes + up.nbytes
        method, kind = copy.copy(layer.quant_method), cast(Any, type(layer.quant_method))
        method.__class__ = with_low_rank(kind)
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


def _matrices(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Pair]]:
    """This rank's A and B of each of vLLM's layers that the adapter has, by name."""
    model, layers = model_of(worker), decoder_linears(worker)
    places = {each: (fused, place) for fused, several in JOINED_LAYERS.items() for place, each in enumerate(several)}
    found: dict[str, dict[int, Pair]] = {}
    for name, pair in pairs_of(tensors).items():
        for weight in renamed(model, f"{name}.weight"):
            path = weight.removesuffix(".weight")
            parent, _, leaf = path.rpartition(".")
            fused, place = (leaf, 0) if path in layers else places.get(leaf, (leaf, 0))
            found.setdefault(f"{parent}.{fused}", {})[place] = pair
    for name, pairs in found.items():
        if name not in layers:
            raise InvalidConfig(
                f"vLLM's model has no linear layer {name!r} for an adapter: the engine's option lora_rank=0 has adapters merged"
            )
        if name.endswith(".qkv_proj") and pairs.keys() == {0, 1}:  # keys are values too, as in Gemma 4
            pairs[2] = pairs[1]
        downs, ups = zip(*(pairs[place] for place in sorted(pairs)))
        yield name, joined(layers[name], list(downs), list(ups))


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


def wanted_part(module: Any, parts: list[Tensor], held: Tensor) -> Tensor:
    """This rank's part of the weights that are fused in a parameter."""
    sizes = getattr(module, "output_partition_sizes", [])
    if len(sizes) > 1 and len(parts) != len(sizes):  # some are fused already in the checkpoint
        whole = torch.cat(parts)
        scale = len(whole) // sum(sizes)
        parts = list(whole.split([size * scale for size in sizes]))
    if len(parts) == 1:
        return part_of_rank(parts[0], tuple(held.shape))
    return torch.cat([part_of_rank(part, (size, *held.shape[1:])) for part, size in zip(parts, sizes, strict=True)])


def part_of_rank(whole: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rank's slice of this shape. If there are more ranks than slices, neighbours hold equal slices."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if whole.ndim != len(shape):
        return whole
    for axis, (size, wanted) in enumerate(zip(whole.shape, shape)):
        if wanted < size:
            start = rank * (size // wanted) // ranks * wanted
            whole = whole.narrow(axis, start, wanted)
    return whole
