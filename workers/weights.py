"""Weights of a model that may be sharded, split over ranks or adapted, as the plain tensors of its checkpoint."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from workers.lora import base_name, merged_weight
from workers.mesh import Ranks


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(parameter name of the base model, full tensor), one after the other; adapters are merged into what they adapt.

    Every rank of the model takes part: a sharded tensor is gathered when its turn comes, and freed when the caller lets go.
    """
    for name, parameter in model.named_parameters():
        base = base_name(name)
        if base is not None:
            yield base, merged_weight(model, name, full_tensor) if base != name else full_tensor(parameter)


def all_named_weights(model: nn.Module, ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """`named_weights` of all pipeline stages on every rank: each stage's in turn, a weight that two of them hold once."""
    group = ranks.group("pp")
    if group is None:
        yield from named_weights(model)
        return
    forms = [(name, weight.shape, weight.dtype) for name, weight in model.named_parameters() if base_name(name)]
    done: set[str] = set()
    for rank, stage in enumerate(ranks.gather(forms, "pp")):
        mine = named_weights(model) if rank == ranks.rank("pp") else None
        for name, shape, dtype in stage:
            base = base_name(name) or name
            weight = None if mine is None else next(mine)[1].contiguous()
            if base in done:
                continue
            if weight is None:
                weight = torch.empty(shape, dtype=dtype, device=ranks.mesh.device_type)  # type: ignore[union-attr]
            distributed.broadcast(weight, src=distributed.get_global_rank(group, rank), group=group)
            yield base, weight
        done |= {base_name(name) or name for name, _, _ in stage}


def full_tensor(weight: Tensor) -> Tensor:
    """All of a tensor, on the device that computes, without gradient; no copy if it is whole already."""
    if not isinstance(weight, DTensor):
        return weight.detach()
    on_device: Any = weight.detach().to(weight.device_mesh.device_type)
    whole: Tensor = on_device.full_tensor()
    return whole


def bare_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and configuration without storage, adapters or shards: what knows how a checkpoint is written."""
    with torch.device("meta"):
        bare = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="sdpa")
    bare.generation_config = model.generation_config
    return bare
