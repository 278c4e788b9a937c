"""FSDP2 (``torch.distributed.fsdp``): weights, gradients and optimizer state are sharded over the ranks of dp x sp.

With ``layout.replicas`` above 1 (HSDP) they are sharded over the ranks of each replica: weights are gathered and gradients
scattered within a replica, which may be one node, and once an optimizer step each shard of the gradients is summed over replicas.

Groups that are gathered together: each decoder layer, each `TOWER_BLOCKS` blocks of a tower, the rest of the tower (patch
embedding and mergers), and with the root the remaining weights: embedding, final norm and head. The root stays gathered from the
beginning of the forward pass to the end of the backward pass, so ``lm_head.weight`` can be used as a plain weight, and tied
weights are in one group. Split experts (`workers.parallel.expert`) form separate groups, over fewer ranks, and so do the
projections of recurrent layers and what stays in float32: the rest of such a mixer, and a critic's value head. The tower's group
is gathered by the tower's forward, so text-only batches never touch it.

Gradients are summed over ranks, not averaged: each rank's loss is its rows' share of the loss of the mini-batch. `Unsharded` says
what stays unsharded from one micro-batch to the next.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from dataproto.errors import ending
from workers.model.lora import base_layers
from workers.model.packed_model import PackedVLM
from workers.model.patches import drop_sum_within_replica, drop_unreduced_gradient, end_backward_pass
from workers.model.precision import mixed_precision
from workers.parallel.expert import split_experts
from workers.parallel.transform import Transform

TOWER_BLOCKS = 8
"""Number of a tower's blocks that are gathered together. One by one, the host needs about 3 ms for each gather and each
reduction, longer than the device computes a block.
"""


class FullySharded(Transform):
    """Weights, gradients and optimizer state, sharded over dp x sp."""

    axes = ("dp", "sp")

    def apply(self, module: PackedVLM) -> None:
        """Turns parameters into DTensors in float32, on the mesh's device.

        Computes in bfloat16 where ``options.dtype`` says so (`workers.model.precision`); gradients are summed in float32 either
        way.
        """
        ranks, options = self.ranks, self.options
        mesh = ranks.replica_mesh or self.mesh
        on_host = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        shard = partial(
            fully_shard,
            mesh=mesh,
            mp_policy=mixed_precision(options.dtype, mesh.device_type),
            ignored_params=self._whole(module),
            offload_policy=on_host if options.offload else OffloadPolicy(),
        )
        for experts in split_experts(module):  # over the ranks that hold the same experts, which may be one rank
            copies = ("edp",) if ranks.replica_mesh is None else ("replica", "edp")
            holders: DeviceMesh = ranks.expert_mesh[copies]  # type: ignore[index]
            shard(
                experts,
                mesh=holders,
                reshard_after_forward=True,
                shard_placement_fn=partial(even_shards, here=experts.here, holders=holders.size(-1)),
            )
        exact = partial(shard, mp_policy=mixed_precision("float32", mesh.device_type), reshard_after_forward=True)
        for mixer in module.family.recurrent_modules(module.model).values():
            shard([part for name, part in mixer.named_children() if "proj" in name], reshard_after_forward=True)
            exact(mixer)
        for path in module.float32_parts:
            exact(module.get_submodule(path))
        towers = [module.model.get_submodule(tower) for tower in module.family.towers]
        for group in (*layer_groups(module), *towers):
            shard(group, reshard_after_forward=True)
        shard(module, reshard_after_forward=False)
        for part in sharded_parts(module):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def _whole(self, module: PackedVLM) -> set[nn.Parameter]:
        """Weights that each rank keeps whole: of 4 bits, which take less memory than a quarter of the shards' gathered layers."""
        layers = base_layers(module.model, module.family) if self.options.load_in_4bit else {}
        return {layer.weight for layer in layers.values()}  # type: ignore[misc]

    def reshard(self, module: PackedVLM) -> None:
        """Frees the gathered weights that a forward pass without a backward pass leaves."""
        for part in sharded_parts(module):
            part.reshard()

    @contextmanager
    def keep_gathered(self, module: PackedVLM, backward: bool) -> Iterator[None]:
        """Weights that ``options.unsharded`` names stay gathered from one micro-batch to the next in here."""
        if not self.options.leaves_unsharded("weights" if backward else "scoring"):
            yield
            return
        self._reshard_after_use(module, False)
        with ending(lambda: self._reshard_after_use(module, True), lambda: self.reshard(module)):
            yield

    @staticmethod
    def _reshard_after_use(module: PackedVLM, reshard: bool) -> None:
        for part in sharded_parts(module):
            part.set_reshard_after_backward(reshard, recurse=False)
            if part is not module:  # the root stays gathered until the pass ends
                part.set_reshard_after_forward(reshard, recurse=False)

    def before_backward(self, module: PackedVLM, last: bool) -> None:
        """Only the last backward pass of a call sums gradients over replicas and, where they stay unsharded, reduces them.

        In a pipeline each pass sums over replicas, except where gradients stay unsharded: no pass is named the last there, and
        `reduce_gradients` cannot sum what has been scattered.
        """
        if self.options.leaves_unsharded("gradients"):
            module.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif self.ranks.replica_mesh is not None:
            module.set_requires_all_reduce(last or self.ranks.layout.pp > 1)  # type: ignore[operator]

    def reduce_gradients(self, module: PackedVLM) -> None:
        """Where gradients stay unsharded, reduces what the backward passes of a pipeline have added up, group by group."""
        if self.options.leaves_unsharded("gradients"):
            module.set_requires_gradient_sync(True)  # type: ignore[operator]
            end_backward_pass(module)

    def drop_gradients(self, module: PackedVLM) -> None:
        """Drops gradients that are not reduced yet."""
        if self.options.leaves_unsharded("gradients"):
            module.set_requires_gradient_sync(True)  # type: ignore[operator]
            for group in weight_groups(module):
                for weight in group.fsdp_params:
                    drop_unreduced_gradient(weight)
        elif self.ranks.replica_mesh is not None:
            module.set_requires_all_reduce(True)  # type: ignore[operator]
            for group in weight_groups(module):
                drop_sum_within_replica(group)


def layer_groups(module: PackedVLM) -> list[list[nn.Module]]:
    """The decoder layers, each alone, and the blocks of towers in groups of `TOWER_BLOCKS`."""
    family, groups = module.family, []
    for path in family.repeated_layers:
        layers = list(module.model.get_submodule(path).children())
        size = 1 if path == family.decoder_layers else TOWER_BLOCKS
        groups += [layers[start : start + size] for start in range(0, len(layers), size)]
    return groups


@dataclass(frozen=True)
class GatheredBytes:
    """Bytes that a rank takes for what stays unsharded, in addition to its shards."""

    weights: int
    gradients: int


def gathered_bytes(module: nn.Module) -> GatheredBytes:
    """What gathered weights and float32 gradients take on a rank, in addition to its shards."""
    weights = gradients = 0
    for group in weight_groups(module):
        ranks = group.mesh_info.shard_mesh_size
        for weight in group.fsdp_params:
            shard = weight.sharded_param
            size = weight.sharded_size.numel()
            weights += size * ranks * (weight.mp_policy.param_dtype or shard.dtype).itemsize
            gradients += 4 * size * (ranks - 1) * shard.requires_grad
    return GatheredBytes(weights, gradients)


def even_shards(weight: nn.Parameter, here: int, holders: int) -> Shard:
    """The first dimension of split experts' ``weight`` that ``holders`` ranks can share evenly, with ``here`` experts on this
    rank.

    Shards of parts have to be of one size.
    """
    sizes = (here, *weight.shape[1:])
    return Shard(next((dim for dim, size in enumerate(sizes) if size % holders == 0), 1))


def weight_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP's own record of each group of weights that are gathered together."""
    for part in sharded_parts(module):
        state: Any = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or (state._fsdp_param_group,)  # one group before torch 2.12
        yield from (group for group in groups if group is not None)


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    """A module of each group of weights that are gathered together."""
    parts = {id(part._get_fsdp_state()): part for part in module.modules() if isinstance(part, FSDPModule)}
    return list(parts.values())
