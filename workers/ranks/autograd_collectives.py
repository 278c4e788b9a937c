"""Collectives with gradients, between ranks that hold the same rows.

All of them keep one rule: every rank of the group computes the same loss from the joined values, and the gradient that reaches
a weight on a rank is that of the rank's own part of the work. So the gradient of a weight is the sum of its gradients over the
ranks that shared the work, and the size of the group appears nowhere as a factor.

A value is *shared* if every rank holds the same value and computes the same with it: its gradient is complete, and the same, on
every rank. A value is *split* if ranks hold parts of it, or do different work with it: gradients are then summed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


class Peers(NamedTuple):
    """A process group as plain values, which ``torch.compile`` understands."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: ProcessGroup) -> "Peers":
        """This process's place in ``group``."""
        return cls(group.group_name, distributed.get_world_size(group), distributed.get_rank(group))


def exchange(x: Tensor, peers: Peers) -> Tensor:
    """``(size, ...)``: part i goes to rank i, and part i of the result comes from rank i (all-to-all)."""
    return cast(Tensor, _Collective.apply(x, "exchange", "exchange", peers))


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers) -> Tensor:
    """``(m, ...)``: the first ``sent[0]`` rows go to rank 0, the next ``sent[1]`` to rank 1, and so on. The first ``received[0]``
    rows of the result ``(n, ...)`` come from rank 0.
    """
    return cast(Tensor, _Collective.apply(x, "exchange", "exchange", peers, (list(sent), list(received))))


def gather_shared(x: Tensor, peers: Peers) -> Tensor:
    """``(n, ...)`` of every rank joined ``(size * n, ...)``, for shared work: each rank's gradient is that of its own part."""
    return cast(Tensor, _Collective.apply(x, "gather", "own part", peers))


def gather_split(x: Tensor, peers: Peers) -> Tensor:
    """``(n, ...)`` of every rank joined ``(size * n, ...)``, for split work: the gradients of a part are summed at its owner."""
    return cast(Tensor, _Collective.apply(x, "gather", "sum and split", peers))


def sum_and_split(x: Tensor, peers: Peers) -> Tensor:
    """Sum over ranks of ``(size * n, ...)``, of which each rank gets its part ``(n, ...)`` (reduce-scatter)."""
    return cast(Tensor, _Collective.apply(x, "sum and split", "gather", peers))


def all_reduce(x: Tensor, name: str) -> Tensor:
    """The sum over ranks, without gradient, out of place."""
    return _done(_c10d.all_reduce(x.contiguous(), "sum", name))


def all_gather_tensor(x: Tensor, peers: Peers) -> Tensor:
    """``(size * n, ...)`` of ``(n, ...)``, without gradient."""
    return _done(_c10d.all_gather_into_tensor(x.contiguous(), peers.size, peers.name))


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, with gradient; all of a tensor that is not a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_c10d = torch.ops._c10d_functional  # the base of torch.distributed.tensor; torch.compile traces it


def _done(started: Tensor) -> Tensor:
    return cast(Tensor, _c10d.wait_tensor(started))


def _all_to_all(x: Tensor, peers: Peers, sent: Sequence[int] = (), received: Sequence[int] = ()) -> Tensor:
    equal = [1] * peers.size
    return _done(_c10d.all_to_all_single(x.contiguous(), received or equal, sent or equal, peers.name))


_COLLECTIVES: dict[str, Callable[..., Tensor]] = {
    "exchange": _all_to_all,
    "gather": all_gather_tensor,
    "sum and split": lambda x, peers: _done(_c10d.reduce_scatter_tensor(x.contiguous(), "sum", peers.size, peers.name)),
    "own part": lambda x, peers: x.chunk(peers.size)[peers.rank],
}


class _Collective(torch.autograd.Function):
    """One of `_COLLECTIVES`, and another one for its gradient, by their names, which ``torch.compile`` understands.

    ``rows``: how many go to each rank and come from it, if these are not equal parts; the gradient goes the other way.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, back: str, peers: Peers, rows: tuple[list[int], ...] = ()) -> Tensor:
        ctx.back, ctx.peers, ctx.rows = back, peers, rows
        return _COLLECTIVES[name](x, peers, *rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _COLLECTIVES[ctx.back](gradient, ctx.peers, *ctx.rows[::-1]), None, None, None, None
