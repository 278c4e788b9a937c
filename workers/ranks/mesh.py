"""The position of a process in a `Layout`, and its process groups."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataproto.errors import InvalidConfig, RankFailure, end_after
from workers.ranks.layout import Layout

T = TypeVar("T")

AXES = ("pp", "dp", "sp", "tp")
"""Dimensions of the mesh, slowest first: the ranks of one tp group are consecutive."""

FLATTENED_AXES = (("dp", "sp"), ("sp", "tp"), ("dp", "sp", "tp"))
"""Products of axes that have a process group: FSDP shards, ranks with the same rows, a pipeline stage."""


@dataclass(frozen=True)
class Ranks:
    """This process's position in a `Layout`, and the process group of each axis.

    >>> single = Ranks()
    >>> single.size("dp", "sp"), single.rank("tp"), single.group("dp")
    (1, 0, None)
    """

    layout: Layout = field(default_factory=Layout)
    mesh: DeviceMesh | None = None  # dimensions `AXES`; None in a world of size 1, which has no process group
    flattened: Mapping[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)  # by axes
    expert_mesh: DeviceMesh | None = field(default=None, repr=False)  # see `_init_expert_mesh`
    replica_mesh: DeviceMesh | None = field(default=None, repr=False)
    """With the dimensions "replica" and "shard": dp x sp with layout.replicas above 1."""

    def size(self, *axes: str) -> int:
        """Product of the degrees of ``axes``."""
        return prod(getattr(self.layout, axis) for axis in axes)

    def rank(self, axis: str) -> int:
        """This process's position along one axis."""
        return 0 if self.mesh is None else int(self.mesh.get_local_rank(axis))

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """One-dimensional mesh of the ranks that differ from this one only along ``axes``, or ``None`` if it has one rank.

        Args:
            axes: one axis, one of `FLATTENED_AXES`, or all of `AXES`.
        """
        if self.mesh is None or self.size(*axes) == 1:
            return None
        return self.mesh[axes[0]] if len(axes) == 1 else self.flattened[axes]

    def group(self, *axes: str) -> ProcessGroup | None:
        """The process group of `submesh`."""
        mesh = self.submesh(*axes)
        return None if mesh is None else mesh.get_group()

    def all_gather(self, value: T, *axes: str) -> list[T]:
        """The ``value`` (any picklable object) of each rank along ``axes``, in rank order."""
        group = self.group(*axes)
        return [value] if group is None else gathered(value, group)

    def broadcast_from_last(self, value: T, axis: str) -> T:
        """The ``value`` (any picklable object) of the last rank along ``axis``."""
        group = self.group(axis)
        if group is None:
            return value
        values = [value]
        distributed.broadcast_object_list(
            values, src=distributed.get_global_rank(group, self.size(axis) - 1), group=group
        )
        return values[0]

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """If the block raises on one rank, raises on all ranks, so that none waits in a collective that others never reach.

        Raises:
            RankFailure: another rank raised; the message names the rank and its error. A rank that itself raises keeps its own
                error.
        """
        try:
            yield
        except Exception as error:
            end_after(error, partial(self._tell, error))
            raise
        failures = self._gather_failures(None)
        if failures:
            raise RankFailure("; ".join(failures))

    def _tell(self, error: Exception) -> None:
        self._gather_failures(f"{type(error).__name__}: {error}")
        error.raised_on_all_ranks = True  # type: ignore[attr-defined]

    def _gather_failures(self, failure: str | None) -> list[str]:
        failures = self.all_gather(failure, *AXES)
        return [f"rank {rank}: {message}" for rank, message in enumerate(failures) if message is not None]

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the process that writes files and logs."""
        return self.mesh is None or distributed.get_rank() == 0


def gathered(value: T, group: ProcessGroup | None) -> list[T]:
    """The ``value`` (any picklable object) of each rank of a process group, the default one if ``None``, in rank order."""
    values: list[T] = [value] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values


def raised_on_all_ranks(error: Exception) -> bool:
    """Whether every rank raised because of this error; see `Ranks.fail_together`."""
    return isinstance(error, RankFailure) or getattr(error, "raised_on_all_ranks", False)


def init_ranks(layout: Layout, device: torch.device) -> Ranks:
    """Builds the mesh and process groups of ``layout`` over the default process group. Every process must call it.

    A world of size 1 needs no process group.

    Raises:
        InvalidConfig: there is no default process group, or its size is not ``layout.world_size``.
    """
    if layout.world_size == 1:
        return Ranks(layout)
    if not distributed.is_initialized():
        raise InvalidConfig(
            f"{layout} needs {layout.world_size} processes, but this one has no process group: start it by torchrun and call "
            "torch.distributed.init_process_group first"
        )
    if distributed.get_world_size() != layout.world_size:
        raise InvalidConfig(
            f"{layout} needs {layout.world_size} processes, but the default process group has {distributed.get_world_size()}"
        )
    mesh = init_device_mesh(device.type, tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=AXES)
    products: tuple[tuple[str, ...], ...] = (*FLATTENED_AXES, AXES)
    flattened = {axes: mesh[axes]._flatten("_".join(axes)) for axes in products}
    replicas = None
    if layout.replicas > 1:
        replicas = flattened["dp", "sp"]._unflatten(0, (layout.replicas, layout.shards), ("replica", "shard"))
    return Ranks(layout, mesh, flattened, _init_expert_mesh(layout, device), replicas)


def _init_expert_mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """Divides dp x sp x tp into "replica" x "edp" x "ep": ranks along "ep", those of ep x tp, hold different experts, the others
    hold the same ones, of which ranks along "edp" share one copy. Without replicas there are two dimensions.
    """
    holders = layout.ep * layout.tp
    if holders == 1:
        return None
    shape = (layout.pp, layout.replicas, layout.shards // layout.ep, holders)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "replica", "edp", "ep"))
    return mesh["replica", "edp", "ep"] if layout.replicas > 1 else mesh["edp", "ep"]
