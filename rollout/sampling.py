"""The policy, defined once for actor, reference and engines. Letters: B rows, V vocabulary."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import NonFiniteLogits
from rollout.engine import SamplingParams

# Finite, so that p * log p of a banned token is 0 and not NaN.
BANNED_LOGIT = -1e30


def project(states: Tensor, weight: Tensor) -> Tensor:
    """The head: states ``(n, H)`` and weight ``(V, H)`` to logits ``(n, V)`` float32 (float64 of float64), in actor and engines.

    In half precision the product is not rounded: a logit of 20 would become a multiple of 1/8.

    >>> project(torch.tensor([[16.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 0.03125]]).bfloat16())
    tensor([[16.0312]])
    """
    if states.device.type == "cuda" and states.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(states, weight.t(), out_dtype=torch.float32)
    if states.dtype != torch.float64:
        states, weight = states.float(), weight.float()
    return torch.mm(states, weight.t())


def policy_log_probs(logits: Tensor, temperature: float, banned_ids: Sequence[int]) -> Tensor:
    """log softmax(logits / temperature) in float32 with the banned ids masked, over the last dimension.

    >>> policy_log_probs(torch.tensor([0.0, 0.0, 9.0]), 1.0, banned_ids=[2]).exp().tolist()
    [0.5, 0.5, 0.0]
    """
    logits = logits.to(torch.float32, copy=True)
    if temperature != 1.0:
        logits = logits.div_(temperature)
    if banned_ids:
        logits = logits.index_fill_(-1, _on_device(tuple(banned_ids), logits.device), BANNED_LOGIT)
    return logits.log_softmax(-1)


@lru_cache
def _on_device(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Ids that are looked up at every token, sent once: sending makes the host wait for the device."""
    return torch.tensor(ids, device=device)


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


def draw(probs: Tensor, numbers: Tensor) -> Tensor:
    """One token a row by inverting the distribution function at a uniform number; ``(B, V)``, ``(B,)`` -> ``(B,)``.

    A token of probability zero is never drawn; where probabilities are not finite, any may be, but none out of range. First the
    block of the vocabulary is found in which the number falls, then the token in it: sums in double precision are short,
    whatever V is.

    >>> draw(torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]), torch.tensor([0.6, 0.999])).tolist()
    [2, 0]
    """
    blocks = probs.unflatten(-1, (-1, _block_size(probs.shape[-1])))  # (B, blocks, size)
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = numbers.double().unsqueeze(-1) * cumulative[..., -1:]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_min(0)), 0.0)
    within = blocks.gather(-2, block.unsqueeze(-1).expand(-1, -1, blocks.shape[-1])).squeeze(-2)
    token = _first_above(within.double().cumsum(-1), target - before)
    return (block * blocks.shape[-1] + token).squeeze(-1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Place ``(B, 1)`` of the first entry of ``(B, N)`` above the target, that is, of a summand that is not zero."""
    total = cumulative[..., -1:]
    below = target.minimum(torch.nextafter(total, torch.zeros_like(total)))
    # No entry is above NaN: an index out of range would end a CUDA process.
    return torch.searchsorted(cumulative, below, right=True).clamp_max_(cumulative.shape[-1] - 1)


def _block_size(vocabulary: int) -> int:
    """The largest power of two that divides it, up to 1024."""
    return min(vocabulary & -vocabulary, 1024)


def sample(
    logits: Tensor, sampling: SamplingParams, numbers: Tensor, banned_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Next tokens ``(B,)`` int64 of ``logits (B, V)``, and their log-probs ``(B,)`` under the policy, before top-p and top-k.

    Where logits are NaN or infinity, so is the log-prob (see `check_sampled`), and the token is any of the vocabulary.

    Args:
        numbers: ``(B,)`` float64, each row's uniform number at this step (see `rollout.randomness.uniforms`).
    """
    log_probs = policy_log_probs(logits, sampling.temperature or 1.0, banned_ids)
    if sampling.temperature == 0:
        chosen = log_probs.argmax(-1)
    else:
        chosen = draw(restrict(log_probs, sampling.top_p, sampling.top_k), numbers)
    return chosen, log_probs.gather(1, chosen[:, None]).squeeze(1)


def check_sampled(token_ids: Sequence[int], log_probs: Sequence[float], banned_ids: Sequence[int], row: str) -> None:
    """Raises `NonFiniteLogits` where a response was sampled from logits that make no distribution; ``row`` names it.

    Logits that are minus infinity for some tokens make one, in which those have no probability.

    >>> check_sampled([5, 0], [-0.5, float("nan")], banned_ids=[], row="row 3")
    Traceback (most recent call last):
    ...
    dataproto.errors.NonFiniteLogits: row 3: the logits of response token 1 are not finite: the model's weights, or the row's \
pixels, hold NaN or infinity; the engine goes on with finite ones
    """
    wrong = ~np.isfinite(log_probs) | np.isin(token_ids, banned_ids)  # a banned one: all others have no probability
    if wrong.any():
        raise NonFiniteLogits(
            f"{row}: the logits of response token {int(wrong.argmax())} are not finite: the model's weights, or the row's "
            "pixels, hold NaN or infinity; the engine goes on with finite ones"
        )
