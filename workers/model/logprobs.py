"""Log-probs and entropy of chosen tokens from hidden states, without ever holding the full logits."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout.sampling import BANNED_LOGIT, project

# Logits held at a time, in elements: enough tokens to keep the device's matrix units busy.
CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}


def token_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    entropy: bool = False,
    chunk_elements: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` under softmax(logits / temperature), banned ids masked: `rollout.sampling`, for many tokens.

    Works in chunks of tokens whose logits are recomputed in the backward pass, so that memory does not grow with V times N.
    Logits, their statistics and the sum of the weight's gradient over chunks are in float32 (float64 for float64 states).

    Args:
        hidden: ``(N, H)`` states that predict the targets.
        head_weight: ``(V, H)``.
        targets: ``(N,)`` int64.
        entropy: also return the entropy of each distribution, in nats, with gradient.
        chunk_elements: how many logits are held at a time.
        compiled: fuse what is done to logits with ``torch.compile``.

    Returns:
        log-probs ``(N,)`` float32 and entropies ``(N,)`` float32 or ``None``.

    >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    >>> log_probs, entropies = token_log_probs(hidden, weight, torch.tensor([0]), entropy=True)
    >>> round(log_probs.item(), 4), round(entropies.item(), 4)
    (-0.3133, 0.5822)
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    size = chunk_size(head_weight.shape[0], hidden.device, chunk_elements)
    banned = _on_device(tuple(banned_ids), hidden.device) if banned_ids else None
    with torch.autocast(device, enabled=False):
        log_probs, entropies = _TokenLogProbs.apply(
            hidden, head_weight, targets, temperature, banned, entropy, size, compiled
        )
    return log_probs, entropies if entropy else None


def chunk_size(vocabulary: int, device: torch.device, elements: int | None = None) -> int:
    """Tokens whose logits are held at a time."""
    size = max((elements or CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])) // vocabulary, 1)
    return size - size % 256 if size > 256 else size  # whole tiles of the matrix units


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        banned: Tensor | None,
        entropy: bool,
        size: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        score = _compiled(_scores) if compiled else _scores
        keep = len(targets) <= size and hidden.device.type == "cpu"
        w, parts, every = weight.to(hidden.dtype), [], None
        for states, chosen in zip(hidden.split(size), targets.split(size), strict=True):
            *part, every = score(project(states, w), chosen, temperature, banned, entropy, keep)
            parts.append(part)
        log_probs, log_sums, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, banned, log_sums, entropies, every)
        ctx.settings = temperature, entropy, size, compiled
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, banned, log_sums, entropies, kept = ctx.saved_tensors
        temperature, entropy, size, compiled = ctx.settings
        gradient = _compiled(_logit_gradient) if compiled else _logit_gradient
        w = weight.to(hidden.dtype)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(targets), size):
                at = slice(start, start + size)
                logits = project(hidden[at], w) if kept is None else None
                uncertain = (entropies[at], entropy_grad[at]) if entropy else None
                part = gradient(
                    logits, kept, log_sums[at], targets[at], temperature, banned, grad[at], uncertain, hidden.dtype
                )
                if to_hidden is not None:
                    torch.mm(part, w, out=to_hidden[at])
                if ctx.needs_input_grad[1]:
                    to_weight = accumulate_matmul(to_weight, part.t(), hidden[at])
        if to_weight is None and ctx.needs_input_grad[1]:
            to_weight = torch.zeros_like(weight)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), *[None] * 6


def accumulate_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b`` in float32 (float64)."""
    if a.device.type == "cuda" and a.dtype in (torch.bfloat16, torch.float16):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32)
    product = torch.mm(a, b)
    product = product if product.dtype == torch.float64 else product.float()
    return product if total is None else total.add_(product)


def _scale(logits: Tensor, temperature: float, banned: Tensor | None) -> Tensor:
    """The policy's logits, in the place of the model's."""
    if temperature != 1.0:
        logits.div_(temperature)
    return logits if banned is None else logits.index_fill_(1, banned, BANNED_LOGIT)


def _scores(
    logits: Tensor, targets: Tensor, temperature: float, banned: Tensor | None, entropy: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probs of the targets, log-sums of exponentials and entropies, ``(n,)`` each, the last zero unless asked for; to keep,
    all log-probs ``(n, V)``.
    """
    logits = _scale(logits, temperature, banned)
    log_sums = logits.logsumexp(1)
    chosen = logits.gather(1, targets[:, None]).squeeze(1) - log_sums
    if not entropy and not keep:
        return chosen, log_sums, torch.zeros_like(chosen), None
    every = logits - log_sums[:, None]
    entropies = -(every.exp() * every).sum(1) if entropy else torch.zeros_like(chosen)
    return chosen, log_sums, entropies, every if keep else None


def _logit_gradient(
    logits: Tensor | None,
    every: Tensor,
    log_sums: Tensor,
    targets: Tensor,
    temperature: float,
    banned: Tensor | None,
    grad: Tensor,
    uncertain: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient ``(n, V)`` of the logits, from them or, where they are ``None``, from all log-probs, the gradient of the
    targets' log-probs, and entropies with theirs.

    With p = softmax(z), of log p_t by z_j: [j = t] - p_j; of the entropy H: -p_j (log p_j + H).
    """
    if logits is not None:
        every = _scale(logits, temperature, banned) - log_sums[:, None]
    slope = -grad[:, None]
    if uncertain is not None:
        entropies, entropy_grad = uncertain
        slope = slope - entropy_grad[:, None] * (every + entropies[:, None])
    out = every.exp().mul_(slope)
    if torch.compiler.is_compiling():  # one pass over all of it, rather than one more for a few elements
        here = torch.arange(out.shape[1], device=out.device) == targets[:, None]
        out = torch.where(here, out + grad[:, None], out)
    else:
        out.scatter_add_(1, targets[:, None], grad[:, None])
    if banned is not None:
        out.index_fill_(1, banned, 0.0)
    return (out if temperature == 1.0 else out.div_(temperature)).to(dtype)


@cache
def _on_device(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, so that a step does not wait for the copy."""
    return torch.tensor(ids, device=device)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
