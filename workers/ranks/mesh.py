"""Where a process stands among all that share one model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataproto.errors import InvalidConfig, RankFailure
from workers.ranks.layout import Layout

T = TypeVar("T")

AXES = ("pp", "dp", "sp", "tp")
"""The mesh's dimensions, slowest first: ranks of one tp group are neighbours."""

JOINED_AXES = (("dp", "sp"), ("sp", "tp"), ("dp", "sp", "tp"))
"""Products of axes that have a process group of their own: FSDP shards, ranks with the same rows, a pipeline stage."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in a `Layout`, and the process groups of its axes.

    >>> alone = Ranks()
    >>> alone.size("dp", "sp"), alone.rank("tp"), alone.group("dp")
    (1, 0, None)
    """

    layout: Layout = field(default_factory=Layout)
    mesh: DeviceMesh | None = None  # dims "pp", "dp", "sp", "tp"; None in a world of one, which has no process group
    joined: Mapping[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)  # flattened, by their axes
    experts: DeviceMesh | None = field(
        default=None, repr=False
    )  # dims "edp", "ep": dp x sp, by who holds which experts

    def size(self, *axes: str) -> int:
        """Product of the degrees of ``axes``."""
        return prod(getattr(self.layout, axis) for axis in axes)

    def rank(self, axis: str) -> int:
        """This process's position along one axis."""
        return 0 if self.mesh is None else int(self.mesh.get_local_rank(axis))

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """One-dimensional mesh of the ranks that differ from this one in ``axes`` alone, ``None`` if there is no other.

        Several axes: one of `JOINED_AXES`, or ``AXES``, that is everybody.
        """
        if self.mesh is None or self.size(*axes) == 1:
            return None
        return self.mesh[axes[0]] if len(axes) == 1 else self.joined[axes]

    def group(self, *axes: str) -> ProcessGroup | None:
        """The process group of `submesh`."""
        mesh = self.submesh(*axes)
        return None if mesh is None else mesh.get_group()

    def gather(self, value: T, *axes: str) -> list[T]:
        """Everybody's ``value``, any picklable object, along ``axes``, in rank order."""
        group = self.group(*axes)
        if group is None:
            return [value]
        values: list[T] = [value] * self.size(*axes)
        distributed.all_gather_object(values, value, group=group)
        return values

    def any_of(self, flags: Sequence[bool], *axes: str) -> list[bool]:
        """Place by place, whether a flag is set on any rank along ``axes``; all have as many."""
        return [any(flag) for flag in zip(*self.gather(list(flags), *axes), strict=True)]

    def from_last(self, value: T, axis: str) -> T:
        """The ``value``, any picklable object, of the last rank along ``axis``."""
        group = self.group(axis)
        if group is None:
            return value
        held = [value]
        distributed.broadcast_object_list(
            held, src=distributed.get_global_rank(group, self.size(axis) - 1), group=group
        )
        return held[0]

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What raises on one rank raises on all, so that none waits for ever in a collective that others never reach.

        Raises:
            RankFailure: another rank raised; says which and what. The rank that did raises its own error.
        """
        try:
            yield
        except Exception as error:
            self._failures(f"{type(error).__name__}: {error}")
            error.agreed = True  # type: ignore[attr-defined]
            raise
        failures = self._failures(None)
        if failures:
            raise RankFailure("; ".join(failures))

    def _failures(self, mine: str | None) -> list[str]:
        everybody = self.gather(mine, *AXES)
        return [f"rank {rank}: {failure}" for rank, failure in enumerate(everybody) if failure is not None]

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks for all."""
        return self.mesh is None or distributed.get_rank() == 0


def agreed(error: Exception) -> bool:
    """Whether all ranks know of an error, see `Ranks.all_or_none`."""
    return isinstance(error, RankFailure) or getattr(error, "agreed", False)


def join(layout: Layout, device: torch.device) -> Ranks:
    """Takes this process's place in ``layout``, over the default process group; every process calls it.

    A world of one needs no process group.

    Raises:
        InvalidConfig: there is no process group, or its size is not the layout's.
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
    several: tuple[tuple[str, ...], ...] = (*JOINED_AXES, AXES)
    joined = {axes: mesh[axes]._flatten("_".join(axes)) for axes in several}
    return Ranks(layout, mesh, joined, _experts(layout, device))


def _experts(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """The ranks of dp x sp once more: neighbours along "ep" hold different experts, those along "edp" the same ones."""
    if layout.ep == 1:
        return None
    shape = (layout.pp, layout.dp * layout.sp // layout.ep, layout.ep, layout.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=("pp", "edp", "ep", "tp"))["edp", "ep"]
