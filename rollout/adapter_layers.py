"""Linear layers whose rows have different adapters: which rows have which in a pass, and the operator with its gradient.

Rows that follow each other with the same adapter are a segment. The product with the frozen weight is one for all rows; those
with the adapters are one for each segment, or on CUDA one grouped product for all. Letters: T rows, G segments, R largest rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, linear, pad

from dataproto.errors import InvalidConfig, RowCountMismatch
from dataproto.vlm import VLMFamily
from rollout.adapters import Adapter, AdapterConfig, adapted_layers
from rollout.sampling import project

RANK_MULTIPLE = 16
"""Grouped products take matrices whose sides are multiples of 16 bytes."""


@dataclass(frozen=True)
class Segment:
    """Rows ``start`` to ``stop`` with one adapter. Its pair is at ``place`` among the operator's matrices; ``None``: it has
    none.
    """

    start: int
    stop: int
    scaling: float = 1.0
    place: int | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Groups:
    """The matrices of all segments for grouped products. Ranks are filled up with zeros."""

    downs: Tensor  # A (G, R, in)
    ups: Tensor  # scaled B (G, out, R)
    ends: Tensor  # (G,) int32, where each segment ends


def low_rank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Sequence[Segment],
    matrices: Sequence[Tensor],
    groups: Groups | None = None,
) -> Tensor:
    """``x W^T + bias + scaling * (x A^T) B^T`` with the A and B of each row's segment.

    Args:
        x: ``(..., in)``; its leading dimensions flattened are the T rows.
        weight, bias: of the base, frozen: they get no gradient.
        segments: all T rows, in order.
        matrices: A ``(r, in)`` and B ``(out, r)`` in turn; the pair of a segment begins at ``2 * place``.
        groups: the same matrices for grouped products; ``None``: one product for each segment.

    Returns:
        ``(..., out)`` in the dtype of ``x``.
    """
    out: Tensor = _LowRankLinear.apply(x.flatten(0, -2), weight, bias, tuple(segments), groups, *matrices)
    return out.view(*x.shape[:-1], -1)


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: tuple[Segment, ...],
        groups: Groups | None,
        *matrices: Tensor,
    ) -> Tensor:
        out = linear(x, weight, bias)
        if groups is None:
            inner = _add_slices(out, x, segments, _in_dtype(matrices, x.dtype))
        else:
            inner = grouped_mm(x, groups.downs.transpose(1, 2), offs=groups.ends)
            out.add_(grouped_mm(inner, groups.ups.transpose(1, 2), offs=groups.ends))
        ctx.save_for_backward(x, weight, inner, *matrices)
        ctx.segments, ctx.groups = segments, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, *matrices = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        if ctx.groups is None:
            found = _gradients_of_slices(grad, grad_x, x, inner, ctx.segments, _in_dtype(matrices, x.dtype))
        else:
            found = _gradients_grouped(grad, grad_x, x, inner, ctx.segments, ctx.groups, matrices)
        grads = (each if each.dtype == m.dtype else each.to(m.dtype) for each, m in zip(found, matrices, strict=True))
        return grad_x, None, None, None, None, *grads


def _in_dtype(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The same tensors where they have the dtype: a look at it takes a tenth of the time of a call of ``to``."""
    return [each if each.dtype == dtype else each.to(dtype) for each in tensors]


# One product for each segment


def _add_slices(out: Tensor, x: Tensor, segments: Sequence[Segment], matrices: Sequence[Tensor]) -> Tensor:
    """Adds the adapters' products to ``out (T, out)``; returns ``x A^T`` ``(T, R)``, whose last columns may have no meaning."""
    inner = x.new_empty(x.shape[0], max(down.shape[0] for down in matrices[::2]))
    for each, *(own_out, own_x, own_inner) in _slices(segments, out, x, inner):
        if each.place is not None:
            down, up = matrices[2 * each.place : 2 * each.place + 2]
            states = own_inner.narrow(1, 0, down.shape[0])
            torch.mm(own_x, down.t(), out=states)
            own_out.addmm_(states, up.t(), alpha=each.scaling)
    return inner


def _slices(segments: Sequence[Segment], *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each segment with its rows of tensors that have a row for each of all."""
    sizes = [each.stop - each.start for each in segments]
    return zip(segments, *(each.split_with_sizes(sizes) for each in tensors), strict=True)


def _gradients_of_slices(
    grad: Tensor,
    grad_x: Tensor | None,
    x: Tensor,
    inner: Tensor,
    segments: Sequence[Segment],
    matrices: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of the matrices. Adds that of x to ``grad_x``."""
    found: dict[int, Tensor] = {}
    for each, part, own_x, own_inner in _slices(segments, grad, x, inner):
        if each.place is None:
            continue
        first = 2 * each.place
        down, up = matrices[first : first + 2]
        grad_inner = torch.mm(part, up).mul_(each.scaling)
        states = own_inner.narrow(1, 0, down.shape[0])
        if first in found:  # the adapter has rows in several places
            found[first].addmm_(grad_inner.t(), own_x)
            found[first + 1].addmm_(part.t(), states, alpha=each.scaling)
        else:
            found[first] = torch.mm(grad_inner.t(), own_x)
            found[first + 1] = torch.mm(part.t(), states).mul_(each.scaling)
        if grad_x is not None:
            grad_x[each.start : each.stop].addmm_(grad_inner, down)
    return [found[number] if number in found else torch.zeros_like(each) for number, each in enumerate(matrices)]


# One grouped product for all segments


def _gradients_grouped(
    grad: Tensor,
    grad_x: Tensor | None,
    x: Tensor,
    inner: Tensor,
    segments: Sequence[Segment],
    groups: Groups,
    matrices: Sequence[Tensor],
) -> list[Tensor]:
    """As `_gradients_of_slices`, in the dtype of the matrices."""
    ends = groups.ends
    grad_inner = grouped_mm(grad, groups.ups, offs=ends)
    if grad_x is not None:
        grad_x.add_(grouped_mm(grad_inner, groups.downs, offs=ends))
    grad_downs = grouped_mm(grad_inner.t(), x, offs=ends)
    grad_ups = grouped_mm(grad.t(), inner, offs=ends)
    found = [torch.zeros_like(matrix) for matrix in matrices]
    for number, each in enumerate(segments):
        if each.place is not None:
            first = 2 * each.place
            rank = len(found[first])
            found[first] += grad_downs[number, :rank]
            found[first + 1] += each.scaling * grad_ups[number, :, :rank]
    return found


@torch.no_grad()
def stacked(segments: Sequence[Segment], matrices: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`Groups.downs` and `Groups.ups`. Segments without an adapter have only zeros."""
    largest = max(len(down) for down in matrices[::2])
    rank = -(-largest // RANK_MULTIPLE) * RANK_MULTIPLE
    downs, ups = [], []
    for each in segments:
        down, up = matrices[2 * (each.place or 0) : 2 * (each.place or 0) + 2]
        factor = 0.0 if each.place is None else 1.0
        downs.append(pad(down, (0, 0, 0, rank - len(down))) * factor)
        ups.append(pad(up, (0, rank - len(down))) * (factor * each.scaling))
    return torch.stack(downs).to(dtype), torch.stack(ups).to(dtype)


Run = tuple[Adapter | None, int]
"""A number of tokens that follow each other, with their adapter; ``None`` is the model without one."""


@dataclass(frozen=True)
class Route:
    """The runs of a pass, adjacent ones of one adapter joined."""

    runs: tuple[Run, ...]
    _ends: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Route":
        """The same runs in the same order.

        >>> Route.of([(None, 2), (None, 3)]).runs
        ((None, 5),)
        """
        joined = ((adapter, sum(size for _, size in part)) for adapter, part in groupby(runs, key=lambda run: run[0]))
        return cls(tuple((adapter, size) for adapter, size in joined if size))

    def ends(self, device: torch.device) -> Tensor:
        """Where each run ends ``(G,)`` int32. Copied to the device once."""
        if device not in self._ends:
            sizes = torch.tensor([size for _, size in self.runs], dtype=torch.int32)
            self._ends[device] = sizes.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
        return self._ends[device]

    def of_layer(self, name: str) -> tuple[list[Segment], list[Tensor]]:
        """The segments of a layer's rows, and the matrices that they need, each adapter's once."""
        segments, matrices, start = [], list[Tensor](), 0
        places: dict[Adapter, int] = {}
        for adapter, size in self.runs:
            pair = None if adapter is None else adapter.pairs.get(name)
            if adapter is None or pair is None:
                segments.append(Segment(start, start + size))
            else:
                if adapter not in places:
                    places[adapter] = len(places)
                    matrices += pair
                segments.append(Segment(start, start + size, adapter.config.scaling, places[adapter]))
            start += size
        return segments, matrices


class AdapterRouter:
    """Lets the linear layers of a frozen model's decoder, and its head, compute with the adapters of the rows.

    Outside of `routed` the model computes as before. The names of its parameters do not change.
    """

    def __init__(self, model: nn.Module, family: VLMFamily) -> None:
        """Takes over the linear layers of ``model``; one router a model. Raises `InvalidConfig` for logits with a soft cap.

        Each layer's ``forward`` is replaced, only on the instance: a hook would get the output of the frozen product, and adding
        to that takes a copy of it. A module around the layer would change the names of its parameters.
        """
        if family.logit_cap(model.config) is not None:
            raise InvalidConfig(
                f"models of type {family.model_type} have a soft cap on their logits, which adapters by row do not compute"
            )
        self.model, self.family = model, family
        self._route: Route | None = None
        self._stacks: dict[str, tuple[tuple[Adapter | None, ...], Tensor, Tensor]] = {}  # of snapshots, by layer
        every = AdapterConfig(rank=1, mlp=family.experts is None, head=False)
        for name in adapted_layers(model, family, every):
            layer: Any = model.get_submodule(name)
            layer.forward = partial(self._linear, layer, name)  # of this instance; its class stays as it is

    @contextmanager
    def routed(self, runs: Sequence[Run]) -> Iterator[None]:
        """Within this context the tokens that each layer gets, flattened, have the adapters of ``runs``."""
        before, self._route = self._route, Route.of(runs)
        try:
            yield
        finally:
            self._route = before

    def _linear(self, layer: nn.Linear, name: str, x: Tensor) -> Tensor:
        segments, matrices = ([], []) if self._route is None else self._route.of_layer(name)
        if not matrices:
            return linear(x, layer.weight, layer.bias)
        _check_size(segments, x.numel() // x.shape[-1])
        groups = self._groups(name, segments, matrices, x) if x.is_cuda else None
        return low_rank_linear(x, layer.weight, layer.bias, segments, matrices, groups)

    def _groups(self, name: str, segments: Sequence[Segment], matrices: Sequence[Tensor], x: Tensor) -> Groups:
        """The matrices for grouped products. Those of snapshots are kept for the next tokens of the same rows."""
        route = self._route
        assert route is not None
        adapters = tuple(adapter for adapter, _ in route.runs)
        kept = self._stacks.get(name)
        if kept is None or kept[0] != adapters or kept[1].dtype != x.dtype:
            kept = (adapters, *stacked(segments, matrices, x.dtype))
            if not any(adapter.trained for adapter in adapters if adapter is not None):
                self._stacks[name] = kept
        return Groups(*kept[1:], route.ends(x.device))

    def logits(self, states: Tensor, runs: Sequence[Run]) -> Tensor:
        """Logits ``(n, V)`` float32 of states ``(n, H)`` with the adapters of ``runs``, without gradient."""
        weight = self.family.lm_head(self.model).weight
        segments, matrices = Route.of(runs).of_layer(self.family.head)
        _check_size(segments, len(states))
        logits = project(states, weight)
        for each in segments:
            if each.place is not None:
                down, up = matrices[2 * each.place : 2 * each.place + 2]
                add_head(logits[each.rows], states[each.rows], down, up, each.scaling)
        return logits

    def logits_of(self, adapter: Adapter | None, states: Tensor) -> Tensor:
        """`logits` of states that all have one adapter."""
        return self.logits(states, [(adapter, len(states))])


def add_head(logits: Tensor, states: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Adds an adapter of the head to ``logits (n, V)`` in place; returns ``states A^T`` ``(n, r)``, both in the logits' dtype."""
    inner = torch.mm(states.to(logits.dtype), down.t().to(logits.dtype))
    logits.addmm_(inner, up.t().to(logits.dtype), alpha=scaling)
    return inner


def _check_size(segments: Sequence[Segment], rows: int) -> None:
    if segments[-1].stop != rows:
        raise RowCountMismatch(f"the runs of adapters count {segments[-1].stop} tokens, but the layer got {rows}")
