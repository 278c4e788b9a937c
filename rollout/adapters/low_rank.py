"""A linear layer whose rows have different adapters, as one operator with its gradient.

Rows that follow each other with the same adapter are a segment. The product with the frozen weight is one for all rows; those
with the adapters are one for each segment, or on CUDA one grouped product for all. Letters: T rows, G segments, R largest rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, linear, pad

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
            inner = _add_grouped(out, x, groups)
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
        return (
            grad_x,
            None,
            None,
            None,
            None,
            *(each if each.dtype == m.dtype else each.to(m.dtype) for each, m in zip(found, matrices, strict=True)),
        )


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


def _add_grouped(out: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """As `_add_slices`."""
    inner = grouped_mm(x, groups.downs.transpose(1, 2), offs=groups.ends)
    out.add_(grouped_mm(inner, groups.ups.transpose(1, 2), offs=groups.ends))
    return inner


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
    """`Groups.downs` and `Groups.ups`. Segments without an adapter have zeros alone."""
    largest = max(len(down) for down in matrices[::2])
    rank = -(-largest // RANK_MULTIPLE) * RANK_MULTIPLE
    downs, ups = [], []
    for each in segments:
        down, up = matrices[2 * (each.place or 0) : 2 * (each.place or 0) + 2]
        factor = 0.0 if each.place is None else 1.0
        downs.append(pad(down, (0, 0, 0, rank - len(down))) * factor)
        ups.append(pad(up, (0, rank - len(down))) * (factor * each.scaling))
    return torch.stack(downs).to(dtype), torch.stack(ups).to(dtype)
