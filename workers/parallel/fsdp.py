"""Weights, gradients and optimizer state spread over the ranks of dp x sp by FSDP2 (``torch.distributed.fsdp``).

Groups that are gathered together: each decoder layer, each vision block, the rest of the vision tower (patch embedding and
mergers), and with the root what is left: embedding, final norm and head. The root stays gathered from the beginning of the
forward pass to the end of the backward pass, so ``lm_head.weight`` can be used as a bare weight, and tied weights stand in
one group. Experts that are dealt out (`workers.parallel.expert`) are groups of their own, over fewer ranks. The tower's own
group is gathered by its own forward, so text-only batches never touch it.

Gradients are summed over ranks, not averaged: each rank's loss is its rows' share of the one loss of the mini-batch.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from workers.model.model_config import ModelConfig, compute_dtype
from workers.model.packed_model import PackedVLM
from workers.parallel.expert import split_experts
from workers.ranks.mesh import Ranks


def apply(module: PackedVLM, ranks: Ranks, options: ModelConfig) -> None:
    """Shards ``module`` in place; its parameters become DTensors in float32, on the mesh's device.

    Computes in bfloat16 where ``options.dtype`` says so; sums of gradients are float32 either way.
    """
    mesh = ranks.submesh("dp", "sp")
    if mesh is None:
        return
    half = compute_dtype(options.dtype, mesh.device_type) == torch.bfloat16
    shard = partial(
        fully_shard,
        mesh=mesh,
        # Inputs are cast by nobody: rotary angles of the vision tower are float32 on purpose.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if options.offload else OffloadPolicy(),
    )
    family, model = module.family, module.model
    blocks = [
        block
        for path in (family.vision_blocks, family.decoder_layers)
        for block in model.get_submodule(path).children()
    ]
    for experts in split_experts(module):  # over the ranks that hold the same ones, be it one alone
        holders: DeviceMesh = ranks.expert_mesh["edp"]  # type: ignore[index]
        shard(
            experts,
            mesh=holders,
            reshard_after_forward=options.reshard_after_forward,
            shard_placement_fn=partial(even_shards, here=experts.here, holders=holders.size()),
        )
    for block in (*blocks, model.get_submodule(family.vision_tower)):
        shard(block, reshard_after_forward=options.reshard_after_forward)
    shard(module, reshard_after_forward=False)
    for part in sharded_parts(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def even_shards(weight: nn.Parameter, here: int, holders: int) -> Shard:
    """The first dimension of dealt-out experts' ``weight``, of which ``here`` stand on this rank, that holders can share evenly:
    shards of parts have to be of one size.
    """
    sizes = (here, *weight.shape[1:])
    return Shard(next((dim for dim, size in enumerate(sizes) if size % holders == 0), 1))


def reshard(module: nn.Module) -> None:
    """Frees the gathered weights that a forward pass without a backward pass left behind."""
    for part in sharded_parts(module):
        part.reshard()


def keep_gathered(module: nn.Module, keep: bool) -> None:
    """Whether the backward passes from here on leave the weights that they used gathered, for the next micro-batch."""
    for part in sharded_parts(module):
        part.set_reshard_after_backward(not keep, recurse=False)


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    """The modules whose weights are gathered together."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
