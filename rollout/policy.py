"""The policy, defined once for actor, reference and engines."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Finite, so that p * log p of a banned token is 0 and not NaN.
BANNED_LOGIT = -1e30


def policy_log_probs(logits: Tensor, temperature: float, banned_ids: Sequence[int]) -> Tensor:
    """log softmax(logits / temperature) in float32 with the banned ids masked, over the last dimension.

    >>> policy_log_probs(torch.tensor([0.0, 0.0, 9.0]), 1.0, banned_ids=[2]).exp().tolist()
    [0.5, 0.5, 0.0]
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if banned_ids:
        logits = logits.index_fill(-1, torch.tensor(banned_ids, device=logits.device), BANNED_LOGIT)
    return logits.log_softmax(-1)


def restrict(log_probs: Tensor, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Probabilities ``(B, V)`` left after top-k and then top-p (nucleus, Holtzman et al. 2020), not renormalised.

    >>> (restrict(torch.tensor([[0.5, 0.3, 0.2]]).log(), top_p=0.6) > 0).tolist()
    [[True, True, False]]
    """
    probs = log_probs.exp()
    if 0 < top_k < probs.shape[-1]:
        smallest = probs.topk(top_k, dim=-1).values[..., -1:]
        probs = probs.masked_fill(probs < smallest, 0.0)
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        ordered = ordered / ordered.sum(-1, keepdim=True)
        dropped = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses top_p stays
        probs = probs.masked_fill(dropped.gather(-1, order.argsort(-1)), 0.0)
    return probs


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row by inverting the distribution function at a uniform number; ``(B, V)``, ``(B,)`` -> ``(B,)``.

    A token of probability zero is never drawn.

    >>> draw(torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]), torch.tensor([0.6, 0.999])).tolist()
    [2, 0]
    """
    cumulative = probs.double().cumsum(-1)
    total = cumulative[..., -1:]
    target = (uniforms.double().unsqueeze(-1) * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
