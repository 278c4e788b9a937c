"""Full weights, under their checkpoint names, of a model that may be sharded, split over ranks or adapted."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, TypeGuard

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from dataproto.planning import split_by_size
from dataproto.transfer import all_gather_equal
from dataproto.vlm import VLMFamily
from workers.model.lora import base_name, is_adapted, matrix_name, merged_weight, scale_of
from workers.model.quantized import dense
from workers.ranks.mesh import Ranks

BUCKET_BYTES = 1 << 29  # tensors are gathered together up to this size

NamedParameter = tuple[str, Tensor, torch.dtype]
"""A parameter with its name, and the dtype in which it is handed over."""

InFloat32 = Callable[[str], bool]
"""Whether a parameter of the base model, by its name, keeps its own dtype; see `VLMFamily.in_float32`."""


def named_weights(
    model: nn.Module, dtype: torch.dtype | None = None, in_float32: InFloat32 | None = None, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yields (parameter name of the base model, full tensor) pairs, with adapters merged into the weights that they adapt or, if
    not ``merged``, left out. Last come buffers that checkpoints hold, in their own dtype.

    Collective: all ranks of the model must iterate. Sharded tensors are gathered a bucket at a time.

    Args:
        dtype: of the tensors, by default their own. A narrower dtype reduces the traffic.
    """

    names = [name for name, _ in model.named_parameters() if merged and is_adapted(model, name)]
    adapted = {base_name(name) or "": partial(merged_weight, model, name, full_tensor) for name in names}
    yield from _gathered(base_parameters(model, dtype, in_float32), adapted)
    yield from named_buffers(model)


def base_parameters(
    model: nn.Module, dtype: torch.dtype | None = None, in_float32: InFloat32 | None = None
) -> Iterator[NamedParameter]:
    """The parameters of the base model, by their names there."""
    for name, parameter in model.named_parameters():
        if (base := base_name(name)) is not None:
            own = dtype is None or (in_float32 is not None and in_float32(base))
            yield base, parameter, parameter.dtype if own else dtype  # type: ignore[misc]


def adapter_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields A ``(r, in)`` and B ``(out, r)`` of each adapted linear layer (`matrix_name`); B has the adapter's scale.

    Collective as `named_weights`.
    """
    matrices = ((name, weight, weight.dtype) for name, weight in model.named_parameters() if matrix_name(name))
    for name, weight in _gathered(matrices, {}):
        yield matrix_name(name) or name, (scale_of(model, name) * weight).to(dtype or weight.dtype)


def _gathered(
    parameters: Iterable[NamedParameter], instead: Mapping[str, Callable[[], Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors of parameters, in the given dtypes; or what there is ``instead`` of one of this name."""

    def together(each: NamedParameter) -> tuple[DeviceMesh, torch.dtype] | None:
        name, parameter, wanted = each
        return (parameter.device_mesh, wanted) if name not in instead and _is_row_sharded(parameter) else None

    for alike, run in groupby(parameters, together):
        if alike is None:
            for name, parameter, wanted in run:
                yield name, (instead[name]() if name in instead else full_tensor(parameter, wanted)).to(wanted)
        else:
            sized = (((name, parameter), parameter.numel() * wanted.itemsize) for name, parameter, wanted in run)
            for bucket in split_by_size(sized, BUCKET_BYTES):
                yield from _gather_bucket(bucket, *alike)


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the buffers that checkpoints hold, such as the correction of a router's scores. No rank splits them."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer.detach()


def _is_row_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """Whether a parameter is sharded by FSDP only: along its rows, within each replica if there are several."""
    by_rows = ((Shard(0),), (Replicate(), Shard(0)))
    return isinstance(parameter, DTensor) and parameter.placements in by_rows


def _gather_bucket(bucket: list[Any], mesh: DeviceMesh, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Gathers the full tensors of named parameters by one collective, within a replica if there are several."""
    group, ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    # All ranks hold the same number of rows, except that the last ranks may hold fewer; their padding is never read.
    shapes = [(-(-len(weight) // ranks), *weight.shape[1:]) for _, weight in bucket]
    sizes = [math.prod(shape) for shape in shapes]
    mine = torch.empty(sum(sizes), dtype=dtype, device=mesh.device_type)
    for part, (_, weight) in zip(mine.split(sizes), bucket, strict=True):
        local = weight.to_local().detach()
        part[: local.numel()].copy_(local.reshape(-1))
    gathered = torch.empty(ranks * len(mine), dtype=dtype, device=mine.device)
    all_gather_equal(gathered, mine, group=group)
    by_rank = gathered.view(ranks, -1)
    for parts, shape, (name, weight) in zip(by_rank.split(sizes, dim=1), shapes, bucket, strict=True):
        yield name, parts.reshape(-1, *shape[1:])[: len(weight)]


def all_named_weights(
    model: nn.Module, ranks: Ranks, dtype: torch.dtype | None, in_float32: InFloat32 | None, merged: bool
) -> Iterator[tuple[str, Tensor]]:
    """`named_weights` of all pipeline stages on every rank, stage by stage. A weight that two stages hold is yielded once."""
    entries = [(name, weight.shape, kind) for name, weight, kind in base_parameters(model, dtype, in_float32)]
    entries += [(name, buffer.shape, buffer.dtype) for name, buffer in named_buffers(model)]
    return _of_all_stages(named_weights(model, dtype, in_float32, merged), entries, ranks)


def all_adapter_weights(model: nn.Module, ranks: Ranks, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """`adapter_weights` of all pipeline stages on every rank."""
    entries = [
        (name, weight.shape, dtype or weight.dtype)
        for each, weight in model.named_parameters()
        if (name := matrix_name(each))
    ]
    return _of_all_stages(adapter_weights(model, dtype), entries, ranks)


def _of_all_stages(
    mine: Iterator[tuple[str, Tensor]], entries: list[tuple[str, torch.Size, torch.dtype]], ranks: Ranks
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all pipeline stages on every rank, stage by stage, each name once.

    Args:
        mine: this stage's tensors: those of the ``entries``, in their order.
    """
    group = ranks.group("pp")
    if group is None:
        yield from mine
        return
    yielded: set[str] = set()
    for rank, stage in enumerate(ranks.all_gather(entries, "pp")):
        for name, shape, kind in stage:
            weight = next(mine)[1].to(kind).contiguous() if rank == ranks.rank("pp") else None
            if name in yielded:
                continue
            if weight is None:
                weight = torch.empty(shape, dtype=kind, device=ranks.mesh.device_type)  # type: ignore[union-attr]
            distributed.broadcast(weight, src=distributed.get_global_rank(group, rank), group=group)
            yield name, weight
        yielded |= {name for name, _, _ in stage}


def float32_weights(model: nn.Module, family: VLMFamily) -> list[nn.Parameter]:
    """The parameters that are used in float32 whatever the model computes in; see `VLMFamily.float32_weights`."""
    return [weight for name, weight in model.named_parameters() if family.in_float32(base_name(name) or name)]


def full_tensor(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The full tensor of one that may be sharded or of 4 bits, on the compute device and without gradient; no copy of any other.

    Args:
        dtype: in which a sharded tensor is gathered, by default its own.
    """
    if not isinstance(weight, DTensor):
        return dense(weight.detach())
    on_device: Any = weight.detach().to(weight.device_mesh.device_type, dtype or weight.dtype)
    return on_device.full_tensor()


def meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and configuration on the meta device, without adapters or shards, for writing checkpoints."""
    with torch.device("meta"):
        copied = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="sdpa")
    copied.generation_config = model.generation_config
    return copied
