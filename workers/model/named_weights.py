"""Weights of a model that may be sharded, split over ranks or adapted, as the plain tensors of its checkpoint."""

import copy
import math
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from dataproto._exchange import all_gather_equal
from workers.model.lora import base_name, is_adapted, merged_weight
from workers.ranks.mesh import Ranks

BUCKET_BYTES = 1 << 29  # of gathered tensors: they are gathered together up to this size


def named_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(parameter name of the base model, full tensor), one after the other; adapters are merged into what they adapt.

    Every rank of the model takes part: sharded tensors are gathered a bucket at a time, and freed when the caller lets go.

    Args:
        dtype: what sharded tensors are gathered in, if not their own; halves the traffic where the reader is of half the width.
    """
    bucket: list[tuple[str, DTensor]] = []
    filled = 0
    for name, parameter in model.named_parameters():
        base = base_name(name)
        if base is None:
            continue
        adapted = is_adapted(model, name)
        if not adapted and _split_by_rows(parameter):
            size = parameter.numel() * (dtype or parameter.dtype).itemsize
            if bucket and (filled + size > BUCKET_BYTES or not _alike(parameter, bucket[0][1])):
                yield from _gathered(bucket, dtype)
                bucket, filled = [], 0
            bucket.append((name, parameter))
            filled += size
            continue
        yield from _gathered(bucket, dtype)
        bucket, filled = [], 0
        yield base, merged_weight(model, name, full_tensor) if adapted else full_tensor(parameter, dtype)
    yield from _gathered(bucket, dtype)


def _split_by_rows(parameter: Tensor) -> TypeGuard[DTensor]:
    """Whether every rank of a one-dimensional mesh holds some rows of it: FSDP's way, and nothing beside."""
    return isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)


def _alike(one: DTensor, other: DTensor) -> bool:
    return one.device_mesh == other.device_mesh and one.dtype == other.dtype


def _gathered(bucket: list[tuple[str, DTensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of the bucket, by one collective."""
    if not bucket:
        return
    first = bucket[0][1]
    mesh, kind = first.device_mesh, dtype or first.dtype
    # All ranks hold as many rows but for the last ones; where rows run out, what is sent is never read.
    shapes = [(-(-len(weight) // mesh.size()), *weight.shape[1:]) for _, weight in bucket]
    sizes = [math.prod(shape) for shape in shapes]
    mine = torch.empty(sum(sizes), dtype=kind, device=mesh.device_type)
    for place, (_, weight) in zip(mine.split(sizes), bucket, strict=True):
        local = weight.to_local().detach()
        place[: local.numel()].copy_(local.reshape(-1))
    everybody = torch.empty(mesh.size() * len(mine), dtype=kind, device=mine.device)
    all_gather_equal(everybody, mine, group=mesh.get_group())
    by_rank = everybody.view(mesh.size(), -1)
    for parts, shape, (name, weight) in zip(by_rank.split(sizes, dim=1), shapes, bucket, strict=True):
        yield name, parts.reshape(-1, *shape[1:])[: len(weight)]


def all_named_weights(model: nn.Module, ranks: Ranks, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """`named_weights` of all pipeline stages on every rank: each stage's in turn, a weight that two of them hold once."""
    group = ranks.group("pp")
    if group is None:
        yield from named_weights(model, dtype)
        return
    forms = [
        (name, weight.shape, dtype or weight.dtype) for name, weight in model.named_parameters() if base_name(name)
    ]
    done: set[str] = set()
    for rank, stage in enumerate(ranks.all_gather(forms, "pp")):
        mine = named_weights(model, dtype) if rank == ranks.rank("pp") else None
        for name, shape, kind in stage:
            base = base_name(name) or name
            weight = None if mine is None else next(mine)[1].to(kind).contiguous()
            if base in done:
                continue
            if weight is None:
                weight = torch.empty(shape, dtype=kind, device=ranks.mesh.device_type)  # type: ignore[union-attr]
            distributed.broadcast(weight, src=distributed.get_global_rank(group, rank), group=group)
            yield base, weight
        done |= {base_name(name) or name for name, _, _ in stage}


def full_tensor(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All of a tensor, on the device that computes, without gradient; no copy if it is whole already.

    ``dtype`` is what a sharded one is gathered in.
    """
    if not isinstance(weight, DTensor):
        return weight.detach()
    on_device: Any = weight.detach().to(weight.device_mesh.device_type, dtype or weight.dtype)
    whole: Tensor = on_device.full_tensor()
    return whole


def meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and configuration without storage, adapters or shards: what knows how a checkpoint is written."""
    with torch.device("meta"):
        bare = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="sdpa")
    bare.generation_config = model.generation_config
    return bare
