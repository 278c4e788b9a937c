"""Log-probs and entropies of target tokens from hidden states, in chunks, so that the full logits are never in memory."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from dataproto.vlm.family import SoftCap
from rollout.sampling import ids_on, policy_logits_, project
from workers.model.precision import in_autocast_dtype
from workers.ranks.autograd_collectives import Peers, all_gather_tensor, all_reduce

CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Logits in memory at a time, in elements, by device type: enough tokens to keep the matrix units busy."""


def token_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    entropy: bool = False,
    chunk_elements: int | None = None,
    compiled: bool = False,
    cap: SoftCap | None = None,
    peers: Peers | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` under softmax(logits / temperature), with banned ids masked: the policy of `rollout.sampling`.

    Computes chunks of tokens and recomputes their logits in the backward pass, so that memory does not grow with N x V. Logits,
    their statistics and the gradient of the weight, summed over chunks, are in float32 (float64 for float64 states).

    Args:
        hidden: ``(N, H)`` hidden states that predict the targets.
        head_weight: ``(V, H)`` weight of the language-model head.
        targets: ``(N,)`` int64.
        entropy: also return the entropy of the policy at each token, in nats, with gradient.
        chunk_elements: number of logits in memory at a time; by default `CHUNK_ELEMENTS`.
        compiled: fuse the operations on logits with ``torch.compile``.
        cap: soft cap of the logits and their scale, see `VLMFamily.logit_cap`.
        peers: ranks over which ``head_weight``, then a DTensor, is split along V. All give the same ``hidden`` and ``targets``
            and get the same result. A rank's logits never leave it: it sends three numbers a token, see `_part_statistics`.

    Returns:
        log-probs ``(N,)`` float32 and entropies ``(N,)`` float32 or ``None``.

    >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    >>> log_probs, entropies = token_log_probs(hidden, weight, torch.tensor([0]), entropy=True)
    >>> round(log_probs.item(), 4), round(entropies.item(), 4)
    (-0.3133, 0.5822)
    """
    hidden, weight, ids = in_autocast_dtype(hidden), head_weight, tuple(banned_ids)
    if peers is not None:
        weight = cast(DTensor, head_weight).to_local()
        first = peers.rank * len(weight)
        targets, ids = targets - first, tuple(i - first for i in ids if 0 <= i - first < len(weight))
    banned = ids_on(ids, hidden.device) if ids else None
    size = chunk_size(len(weight), hidden.device, chunk_elements)
    with torch.autocast(hidden.device.type, enabled=False):
        log_probs, entropies = _TokenLogProbs.apply(
            hidden, weight, targets, _Settings(temperature, banned, entropy, size, compiled, cap, peers)
        )
    return log_probs, entropies if entropy else None


class _Settings(NamedTuple):
    temperature: float
    banned: Tensor | None
    entropy: bool
    size: int  # tokens of a chunk
    compiled: bool
    cap: SoftCap | None
    peers: Peers | None

    def made(self, function: Any) -> Any:
        """A function of tensors, compiled if that is wanted."""
        return compiled_once(function) if self.compiled else function


def chunk_size(vocabulary: int, device: torch.device, elements: int | None = None) -> int:
    """Number of tokens in a chunk of at most ``elements`` logits, by default `CHUNK_ELEMENTS`."""
    size = max((elements or CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])) // vocabulary, 1)
    return size - size % 256 if size > 256 else size  # a multiple of the tile size of matrix units


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, at: _Settings) -> tuple[Tensor, Tensor]:
        w, kept = weight.to(hidden.dtype), None
        chunks = zip(hidden.split(at.size), targets.split(at.size), strict=True)
        own = at.temperature, at.banned, at.entropy
        if at.peers is None:
            statistics, parts = at.made(_chunk_log_probs), []
            keep = len(targets) <= at.size and hidden.device.type == "cpu"
            for states, chosen in chunks:
                *part, kept = statistics(project(states, w, at.cap), chosen, *own, keep)
                parts.append(part)
            log_probs, log_sums, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        else:
            statistics = at.made(_part_statistics)
            found = torch.cat([statistics(project(states, w, at.cap), chosen, *own) for states, chosen in chunks], 1)
            gathered = all_gather_tensor(found[None], at.peers)
            normalisers, means, picked = gathered.transpose(0, 1).unbind(0)  # (ranks, N) each
            log_sums = normalisers.logsumexp(0)
            log_probs = picked.sum(0) - log_sums
            entropies = log_sums - ((normalisers - log_sums).exp() * means).sum(0)
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropies, kept)
        ctx.at = at
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, entropies, kept = ctx.saved_tensors
        at: _Settings = ctx.at
        gradient, w = at.made(_logit_gradient), weight.to(hidden.dtype)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = None
        with torch.autocast(hidden.device.type, enabled=False):  # the pass may be within the forward pass's
            for start in range(0, len(hidden), at.size):
                here = slice(start, start + at.size)
                logits = project(hidden[here], w, at.cap) if kept is None else None
                terms = (entropies[here], entropy_grad[here]) if at.entropy else None
                own = targets[here], at.temperature, at.banned, grad[here]
                part = gradient(logits, kept, log_sums[here], *own, terms, hidden.dtype, at.cap)
                if to_hidden is not None:
                    torch.mm(part, w, out=to_hidden[here])
                if ctx.needs_input_grad[1]:
                    to_weight = accumulate_matmul(to_weight, part.t(), hidden[here])
        if to_weight is None and ctx.needs_input_grad[1]:  # of no token, where another rank has some: zero, not absent
            to_weight = torch.zeros_like(weight)
        if to_hidden is not None and at.peers is not None:
            to_hidden = all_reduce(to_hidden, at.peers.name)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None


def accumulate_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b``, or ``a @ b`` without a total, in float32 (float64 for float64 inputs). May change ``total`` in place."""
    if a.device.type == "cuda" and a.dtype in (torch.bfloat16, torch.float16):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32)
    product = torch.mm(a, b)
    product = product if product.dtype == torch.float64 else product.float()
    return product if total is None else total.add_(product)


def _chunk_log_probs(
    logits: Tensor, targets: Tensor, temperature: float, banned: Tensor | None, entropy: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns, for the n tokens of a chunk:

    - log-probs of the targets, log-sum-exps of the logits and entropies (zero unless requested), ``(n,)`` each;
    - with ``keep``, the log-probs of all tokens ``(n, V)`` for the backward pass, else ``None``.
    """
    logits = policy_logits_(logits, temperature, banned)
    log_sums = logits.logsumexp(1)
    chosen = logits.gather(1, targets[:, None]).squeeze(1) - log_sums
    if not entropy and not keep:
        return chosen, log_sums, torch.zeros_like(chosen), None
    log_probs = logits - log_sums[:, None]
    entropies = -(log_probs.exp() * log_probs).sum(1) if entropy else torch.zeros_like(chosen)
    return chosen, log_sums, entropies, log_probs if keep else None


def _logit_gradient(
    logits: Tensor | None,
    kept: Tensor,
    log_sums: Tensor,
    targets: Tensor,
    temperature: float,
    banned: Tensor | None,
    grad: Tensor,
    entropy_terms: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
    cap: SoftCap | None = None,
) -> Tensor:
    """The gradient ``(n, V)`` of the model's logits, or of this rank's part of them.

    With p = softmax(z), the derivative by z_j of log p_t is [j = t] - p_j, and of the entropy H is -p_j (log p_j + H). Of a cap c
    of logits with the scale s the derivative is s * (1 - (z / c) ** 2).

    Args:
        logits: the model's logits ``(n, V)``, or ``None`` if the forward pass kept the log-probs.
        kept: log-probs ``(n, V)`` of the policy, used if there are no logits.
        log_sums: log-sum-exps ``(n,)`` of the policy's logits, over all ranks.
        targets: ``(n,)``; those of another rank are not in ``[0, V)``.
        grad: of the targets' log-probs ``(n,)``.
        entropy_terms: entropies ``(n,)`` and their gradients ``(n,)``.
    """
    log_probs = kept if logits is None else policy_logits_(logits, temperature, banned).sub_(log_sums[:, None])
    slope = -grad[:, None]
    if entropy_terms is not None:
        entropies, entropy_grad = entropy_terms
        slope = slope - entropy_grad[:, None] * (log_probs + entropies[:, None])
    capped = None
    if cap is not None:
        capped = cap.scale * (1 - ((log_probs + log_sums[:, None]) * (temperature / cap.cap)).square())
    out = (log_probs.exp() if logits is None else log_probs.exp_()).mul_(slope)
    if torch.compiler.is_compiling():  # fuses into one pass; a scatter would need another one
        is_target = torch.arange(out.shape[1], device=out.device) == targets[:, None]
        out = torch.where(is_target, out + grad[:, None], out)
    else:
        inside, place = _inside(targets, out.shape[1])
        out.scatter_add_(1, place[:, None], torch.where(inside, grad, 0.0)[:, None])
    if capped is not None:
        out = out * capped
    if banned is not None:
        out.index_fill_(1, banned, 0.0)
    return (out if temperature == 1.0 else out.div_(temperature)).to(dtype)


@cache
def compiled_once(function: Any) -> Any:
    """A function of tensors, compiled for any number of tokens; the same for each call with it."""
    return torch.compile(function, dynamic=True)


def _part_statistics(
    logits: Tensor, targets: Tensor, temperature: float, banned: Tensor | None, entropy: bool
) -> Tensor:
    """Three numbers for each token, ``(3, n)``, from this rank's part of the model's logits ``(n, V / size)``: log-sum-exp as
    the policy's, their mean under this part of the policy (0 unless ``entropy``), and the target's (0 if another rank has it).
    """
    logits = policy_logits_(logits, temperature, banned)
    inside, place = _inside(targets, logits.shape[1])
    picked = torch.where(inside, logits.gather(1, place[:, None]).squeeze(1), 0.0)
    normaliser = logits.logsumexp(1)
    mean = (logits.sub(normaliser[:, None]).exp_() * logits).sum(1) if entropy else torch.zeros_like(picked)
    return torch.stack([normaliser, mean, picked])


def _inside(targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Mask of the targets ``(n,)`` in this rank's part, and their indices there, 0 for the others."""
    inside = (targets >= 0) & (targets < vocabulary)
    return inside, torch.where(inside, targets, 0)
