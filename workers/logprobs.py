"""Log-probs and entropy of chosen tokens from hidden states, without ever holding the full logits."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rollout.policy import policy_log_probs

# Logits held at a time: 2**25 float32 values are 128 MiB.
CHUNK_ELEMENTS = 2**25


def token_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` under softmax(logits / temperature), banned ids masked.

    Works in chunks of tokens whose logits are recomputed in the backward pass, so that memory does not grow with V times N.

    Args:
        hidden: ``(N, H)`` states that predict the targets.
        head_weight: ``(V, H)``.
        targets: ``(N,)`` int64.
        entropy: also return the entropy of each distribution, in nats, with gradient.

    Returns:
        log-probs ``(N,)`` float32 and entropies ``(N,)`` float32 or ``None``.

    >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    >>> log_probs, entropies = token_log_probs(hidden, weight, torch.tensor([0]), entropy=True)
    >>> round(log_probs.item(), 4), round(entropies.item(), 4)
    (-0.3133, 0.5822)
    """
    compute = partial(_chunk, temperature=temperature, banned_ids=tuple(banned_ids), entropy=entropy)
    size = max(chunk_elements // head_weight.shape[0], 1)
    if len(targets) <= size:
        return compute(hidden, head_weight, targets)
    if torch.is_grad_enabled():
        compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    chunks = [compute(h, head_weight, t) for h, t in zip(hidden.split(size), targets.split(size), strict=True)]
    log_probs = torch.cat([chunk[0] for chunk in chunks])
    return log_probs, torch.cat([chunk[1] for chunk in chunks]) if entropy else None  # type: ignore[misc]


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, banned_ids: tuple[int, ...], entropy: bool
) -> tuple[Tensor, Tensor | None]:
    log_probs = policy_log_probs(linear(hidden, weight.to(hidden.dtype)), temperature, banned_ids)
    chosen = log_probs.gather(1, targets[:, None]).squeeze(1)
    return chosen, -(log_probs.exp() * log_probs).sum(1) if entropy else None
