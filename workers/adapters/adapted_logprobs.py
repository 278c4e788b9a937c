"""Log-probs of several targets a token under a head that may have an adapter, in chunks, so that full logits are never in memory.

Letters: N tokens, M targets, H hidden size, V vocabulary, r rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dataproto.transfer import move
from rollout.adapters.router import add_head
from rollout.sampling import project
from workers.model.logprobs import chunk_size
from workers.model.packed_model import select_rows


def adapted_log_probs(
    states: Tensor,
    weight: Tensor,
    places: Tensor,
    targets: Tensor,
    pair: tuple[Tensor, Tensor] | None = None,
    scaling: float = 1.0,
    chunk_elements: int | None = None,
) -> Tensor:
    """``log softmax(states (W + scaling B A)^T)`` at targets of the states: no temperature, and no id masked.

    The backward pass computes the logits again, unless they are one chunk on the CPU.

    Args:
        states: ``(N, H)``.
        weight: W ``(V, H)``.
        places: ``(M,)`` int64 on the CPU: the state that predicts each target.
        targets: ``(M,)`` int64.
        pair: A ``(r, H)`` and B ``(V, r)``; ``None`` for the head only.
        chunk_elements: logits in memory at a time, see `workers.model.logprobs.chunk_size`.

    Returns:
        ``(M,)`` float32 (float64 for float64 states).

    >>> adapted_log_probs(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([0, 0]), torch.tensor([0, 3])).exp()
    tensor([0.2500, 0.2500])
    """
    if not bool((places.diff() >= 0).all()):
        return _once_each(states, weight, places, targets, pair, scaling, chunk_elements)
    size = chunk_size(len(weight), states.device, chunk_elements)
    starts = torch.arange(0, len(states), size)
    bounds = [*torch.searchsorted(places, starts).tolist(), len(places)]
    places, targets = move(places, states.device), move(targets, states.device)
    down, up = pair or (None, None)
    found: Tensor = _AdaptedLogProbs.apply(states, weight, places, targets, down, up, scaling, size, bounds)
    return found


def _once_each(
    states: Tensor, weight: Tensor, places: Tensor, targets: Tensor, pair: tuple[Tensor, Tensor] | None, *settings: Any
) -> Tensor:
    """`adapted_log_probs` for places in any order: each target of a place is computed once, in their order."""
    keys, which = torch.unique(places * len(weight) + targets.cpu(), return_inverse=True)
    found = adapted_log_probs(states, weight, keys // len(weight), keys % len(weight), pair, *settings)
    return select_rows(found[:, None], move(which, found.device)).squeeze(1)


class _AdaptedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        places: Tensor,
        targets: Tensor,
        down: Tensor | None,
        up: Tensor | None,
        scaling: float,
        size: int,
        bounds: list[int],
    ) -> Tensor:
        keep = len(states) <= size and not states.is_cuda
        parts, sums, kept = [], [], None
        for number, part in enumerate(states.split(size)):
            logits, _ = _logits(part, weight, down, up, scaling)
            log_sum = logits.logsumexp(1)
            own = slice(*bounds[number : number + 2])
            rows = places[own] - number * size
            parts.append(logits[rows, targets[own]] - log_sum[rows])
            sums.append(log_sum)
            kept = logits if keep else None
        ctx.save_for_backward(states, weight, places, targets, down, up, torch.cat(sums), kept)
        ctx.settings = scaling, size, bounds
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, places, targets, down, up, sums, kept = ctx.saved_tensors
        scaling, size, bounds = ctx.settings
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grads = () if down is None or up is None else (torch.zeros_like(down), torch.zeros_like(up))
        for number, start in enumerate(range(0, len(states), size)):
            rows, own = slice(start, start + size), slice(*bounds[number : number + 2])
            where = places[own] - start
            logits, inner = (kept, None) if kept is not None else _logits(states[rows], weight, down, up, scaling)
            # d log p_t / d z_j = [j = t] - p_j
            of_rows = grad.new_zeros(len(logits)).index_add_(0, where, grad[own])
            slope = (logits - sums[rows, None]).exp_().mul_(-of_rows[:, None])
            slope.index_put_((where, targets[own]), grad[own], accumulate=True)
            torch.mm(slope.to(states.dtype), weight, out=grad_states[rows])
            if grad_weight is not None:
                grad_weight += torch.mm(slope.to(states.dtype).t(), states[rows])
            if not grads:
                continue
            part = states[rows].to(slope.dtype)
            inner = torch.mm(part, down.t().to(slope.dtype)) if inner is None else inner
            grad_inner = torch.mm(slope, up.to(slope.dtype)).mul_(scaling)
            grad_states[rows] += torch.mm(grad_inner, down.to(slope.dtype)).to(states.dtype)
            grads[0].addmm_(grad_inner.t(), part)
            grads[1].addmm_(slope.t(), inner, alpha=scaling)
        return grad_states, grad_weight, None, None, *(grads or (None, None)), None, None, None


def _logits(
    states: Tensor, weight: Tensor, down: Tensor | None, up: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor | None]:
    """Logits ``(n, V)`` float32 and, with an adapter, ``states A^T``."""
    logits = project(states, weight)
    if down is None or up is None:
        return logits, None
    return logits, add_head(logits, states, down, up, scaling)
