"""Log-probs and entropy where each rank of a tp group holds a part of the vocabulary: `workers.model.logprobs`, for split logits.

A rank's logits never leave it. For each token it sends three numbers: the logarithm of its part of the normaliser, the mean of
its logits under its part of the distribution, and the target's logit if the target is in its part.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from rollout.sampling import BANNED_LOGIT, project
from workers.model.logprobs import accumulate_matmul, chunk_size, compiled_once, ids_on
from workers.model.precision import in_autocast_dtype
from workers.ranks.autograd_collectives import Peers, all_gather_tensor, all_reduce


def split_token_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    entropy: bool = False,
    chunk_elements: int | None = None,
    compiled: bool = False,
    cap: float | None = None,
    *,
    peers: Peers,
) -> tuple[Tensor, Tensor | None]:
    """`token_log_probs` with a DTensor ``head_weight (V, H)`` that is split along V over ``peers``.

    Every rank gives the same ``hidden (N, H)`` and ``targets (N,)`` and gets the same log-probs and entropies ``(N,)``.
    """
    weight = cast(DTensor, head_weight).to_local()
    hidden = in_autocast_dtype(hidden)
    first = peers.rank * len(weight)
    banned = ids_on(tuple(i - first for i in banned_ids if 0 <= i - first < len(weight)), hidden.device)
    size = chunk_size(len(weight), hidden.device, chunk_elements)
    with torch.autocast(hidden.device.type, enabled=False):
        log_probs, entropies = _SplitLogProbs.apply(
            hidden, weight, targets - first, temperature, banned, entropy, size, compiled, peers, cap
        )
    return log_probs, entropies if entropy else None


class _SplitLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        banned: Tensor,
        entropy: bool,
        size: int,
        compiled: bool,
        peers: Peers,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        statistics = compiled_once(_part_statistics) if compiled else _part_statistics
        w = weight.to(hidden.dtype)
        parts = [
            statistics(project(states, w, cap), chosen, temperature, banned, entropy)
            for states, chosen in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        normalisers, means, picked = (
            all_gather_tensor(torch.cat(parts, 1)[None], peers).transpose(0, 1).unbind(0)
        )  # (size, N) each
        normaliser = normalisers.logsumexp(0)
        log_probs = picked.sum(0) - normaliser
        entropies = normaliser - ((normalisers - normaliser).exp() * means).sum(0)
        ctx.save_for_backward(hidden, weight, targets, banned, normaliser, entropies)
        ctx.settings = temperature, entropy, size, compiled, peers, cap
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, banned, normaliser, entropies = ctx.saved_tensors
        temperature, entropy, size, compiled, peers, cap = ctx.settings
        gradient = compiled_once(_part_gradient) if compiled else _part_gradient
        w = weight.to(hidden.dtype)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = None
        with torch.autocast(hidden.device.type, enabled=False):  # the pass may be within the forward pass's
            for start in range(0, len(targets), size):
                at = slice(start, start + size)
                part = gradient(
                    project(hidden[at], w, cap),
                    targets[at],
                    temperature,
                    banned,
                    normaliser[at],
                    grad[at],
                    (entropies[at], entropy_grad[at]) if entropy else None,
                    hidden.dtype,
                    cap,
                )
                if to_hidden is not None:
                    torch.mm(part, w, out=to_hidden[at])
                if ctx.needs_input_grad[1]:
                    to_weight = accumulate_matmul(to_weight, part.t(), hidden[at])
        if to_weight is None and ctx.needs_input_grad[1]:  # of no token, where another rank has some: zero, not absent
            to_weight = torch.zeros_like(weight)
        if to_hidden is not None:
            to_hidden = all_reduce(to_hidden, peers.name)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), *[None] * 8


def _part_statistics(logits: Tensor, targets: Tensor, temperature: float, banned: Tensor, entropy: bool) -> Tensor:
    """Three numbers for each token, ``(3, n)``, from this rank's part of the model's logits ``(n, V / size)``: log-sum-exp as
    the policy's, their mean under this part of the policy (0 unless ``entropy``), and the target's (0 if another rank has it).
    """
    logits = _policy_logits_(logits, temperature, banned)
    inside, place = _inside(targets, logits.shape[1])
    picked = torch.where(inside, logits.gather(1, place[:, None]).squeeze(1), 0.0)
    normaliser = logits.logsumexp(1)
    mean = (logits.sub(normaliser[:, None]).exp_() * logits).sum(1) if entropy else torch.zeros_like(picked)
    return torch.stack([normaliser, mean, picked])


def _part_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    banned: Tensor,
    normaliser: Tensor,
    grad: Tensor,
    entropy_terms: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
    cap: float | None,
) -> Tensor:
    """The gradient of this rank's part of the model's logits ``(n, V / size)``; see `workers.model.logprobs`.

    Args:
        normaliser: log-sum-exps ``(n,)`` of the policy's logits, over all ranks.
        grad: of the targets' log-probs ``(n,)``.
        entropy_terms: entropies ``(n,)`` and their gradients ``(n,)``.
    """
    logits = _policy_logits_(logits, temperature, banned)
    capped = None if cap is None else 1 - (logits * (temperature / cap)).square()
    every = logits.sub_(normaliser[:, None])  # log-probs
    slope = -grad[:, None]
    if entropy_terms is not None:  # of the entropy H by logit j: -p_j (log p_j + H)
        entropies, entropy_grad = entropy_terms
        slope = slope - entropy_grad[:, None] * (every + entropies[:, None])
    inside, place = _inside(targets, logits.shape[1])
    part = every.exp_().mul_(slope)
    if torch.compiler.is_compiling():  # fuses into one pass; a scatter would need another one
        is_target = torch.arange(part.shape[1], device=part.device) == targets[:, None]
        part = torch.where(is_target, part + grad[:, None], part)
    else:
        part.scatter_add_(1, place[:, None], torch.where(inside, grad, 0.0)[:, None])
    part = part if capped is None else part.mul_(capped)
    return part.index_fill_(1, banned, 0.0).div_(temperature).to(dtype)


def _policy_logits_(logits: Tensor, temperature: float, banned: Tensor) -> Tensor:
    """Turns this rank's part of the model's logits into the policy's, in place."""
    if temperature != 1.0:
        logits.div_(temperature)
    return logits.index_fill_(1, banned, BANNED_LOGIT)


def _inside(targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Mask of the targets ``(n,)`` in this rank's part, and their indices there, 0 for the others."""
    inside = (targets >= 0) & (targets < vocabulary)
    return inside, torch.where(inside, targets, 0)
