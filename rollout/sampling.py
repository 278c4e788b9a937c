"""The policy and the random streams it is sampled with, defined once for actor, reference and engines.

A random stream belongs to a sample: the sample draws the same numbers on any rank and in any batch. Letters: B rows, V
vocabulary.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._triton import has_triton

from dataproto.errors import NonFiniteLogits
from dataproto.transfer import move
from dataproto.vlm.family import SoftCap
from rollout.engine import SamplingParams, TopLogProbs

Numbers = TypeVar("Numbers", np.ndarray, Tensor)

BANNED_LOGIT = -1e30
"""Finite, so that p * log p of a banned token is 0 and not NaN."""

_GOLDEN, *_FACTORS = (each - (1 << 64) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Of SplitMix64, as signed numbers of 64 bits."""


def project(states: Tensor, weight: Tensor, cap: SoftCap | None = None) -> Tensor:
    """The output projection of actor and engines: states ``(n, H)`` and weight ``(V, H)`` to logits ``(n, V)`` float32 (float64
    for float64), with the soft cap of `VLMFamily.logit_cap`.

    The product of half-precision tensors is not rounded to their dtype, where a logit of 20 would become a multiple of 1/8.

    >>> project(torch.tensor([[16.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 0.03125]]).bfloat16())
    tensor([[16.0312]])
    """
    if states.device.type == "cuda" and states.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(states, weight.t(), out_dtype=torch.float32)
    else:
        if states.dtype != torch.float64:
            states, weight = states.float(), weight.float()
        logits = torch.mm(states, weight.t())
    return logits if cap is None else cap.apply_(logits)


def policy_log_probs(logits: Tensor, temperature: float, banned_ids: Sequence[int]) -> Tensor:
    """log softmax(logits / temperature) over the last dimension, in float32, with the banned ids masked.

    >>> policy_log_probs(torch.tensor([0.0, 0.0, 9.0]), 1.0, banned_ids=[2]).exp().tolist()
    [0.5, 0.5, 0.0]
    """
    return policy_log_probs_(logits.to(torch.float32, copy=True), temperature, banned_ids)


def policy_log_probs_(logits: Tensor, temperature: float, banned_ids: Sequence[int]) -> Tensor:
    """As `policy_log_probs`, without a copy: float32 ``logits`` are overwritten."""
    banned = ids_on(tuple(banned_ids), logits.device) if banned_ids else None
    return policy_logits_(logits.float(), temperature, banned).log_softmax(-1)


def policy_logits_(logits: Tensor, temperature: float, banned: Tensor | None) -> Tensor:
    """Tempers ``logits (..., V)`` and masks the ids ``banned``, in place, without storing more of their size."""
    if temperature != 1.0:
        logits.div_(temperature)
    return logits if banned is None else logits.index_fill_(-1, banned, BANNED_LOGIT)


@lru_cache
@torch.inference_mode(False)  # gradients may need what an engine has put there
def ids_on(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Ids that every token needs, copied to the device once."""
    return move(torch.tensor(ids, dtype=torch.int64), device)


def restrict(log_probs: Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    """Probabilities ``(B, V)`` after top-k, then top-p (nucleus sampling, Holtzman et al. 2020), then min-p (Nguyen et al. 2024:
    tokens below ``min_p`` times the largest probability are dropped), not renormalised.

    >>> (restrict(torch.tensor([[0.5, 0.3, 0.2]]).log(), top_p=0.6) > 0).tolist()
    [[True, True, False]]
    >>> (restrict(torch.tensor([[0.5, 0.3, 0.2]]).log(), min_p=0.5) > 0).tolist()
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
        dropped[..., 0] = False  # also where top_p is 0 in float32
        probs = probs.masked_fill(dropped.gather(-1, order.argsort(-1)), 0.0)
    if min_p > 0:
        probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs


def draw_tokens(probs: Tensor, numbers: Tensor) -> Tensor:
    """One token ``(B,)`` per row of ``probs (B, V)``: the inverse of the distribution function at uniform ``numbers (B,)``.

    A token of probability zero is never drawn. If probabilities are not finite, any token of the vocabulary may be drawn. The
    search first finds the block of the vocabulary, then the token in it. A block has at most 1,024 probabilities and is summed in
    their dtype. Sums over blocks, and sums within the block that is found, are in double precision.

    >>> draw_tokens(torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]), torch.tensor([0.6, 0.999])).tolist()
    [2, 0]
    """
    size = min(probs.shape[-1] & -probs.shape[-1], 1024)  # the largest power of two, at most 1024, that divides V
    blocks = probs.unflatten(-1, (-1, size))  # (B, blocks, size)
    cumulative = blocks.sum(-1).double().cumsum(-1)
    target = numbers.double().unsqueeze(-1) * cumulative[..., -1:]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_min(0)), 0.0)
    within = blocks.gather(-2, block.unsqueeze(-1).expand(-1, -1, blocks.shape[-1])).squeeze(-2)
    token = _first_above(within.double().cumsum(-1), target - before)
    return (block * blocks.shape[-1] + token).squeeze(-1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index ``(B, 1)`` of the first entry of ``(B, N)`` above the target, which belongs to a summand that is not zero."""
    total = cumulative[..., -1:]
    below = target.minimum(torch.nextafter(total, torch.zeros_like(total)))
    # No entry is above NaN, and an index out of range would end a CUDA process.
    return torch.searchsorted(cumulative, below, right=True).clamp_max_(cumulative.shape[-1] - 1)


def sample(
    logits: Tensor,
    sampling: SamplingParams,
    numbers: Tensor,
    banned_ids: Sequence[int],
    undrawn_ids: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Next tokens ``(B,)`` int64 of ``logits (B, V)``, and their log-probs ``(B,)`` under the policy, before top-p, top-k and
    min-p. Overwrites ``logits``.

    If the logits of a row contain NaN or infinity, its log-prob is not finite (see `non_finite`) and its token arbitrary.

    Args:
        numbers: ``(B,)`` float64, each row's uniform number at this step (see `uniforms`).
        banned_ids: have no probability under the policy.
        undrawn_ids: have one, and are never drawn.
    """
    whole = (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0) and not undrawn_ids
    if whole and logits.device.type == "cuda" and has_triton():
        from rollout.fused_sampling import draw

        return draw(logits.float(), sampling.temperature, numbers, banned_ids)
    log_probs = policy_log_probs_(logits, sampling.temperature or 1.0, banned_ids)
    drawn = log_probs
    if undrawn_ids:
        drawn = log_probs.index_fill(-1, ids_on(tuple(undrawn_ids), log_probs.device), -math.inf)
    if sampling.temperature == 0:
        chosen = drawn.argmax(-1)
    else:
        chosen = draw_tokens(restrict(drawn, sampling.top_p, sampling.top_k, sampling.min_p), numbers)
    return chosen, log_probs.gather(1, chosen[:, None]).squeeze(1)


def likeliest(log_probs: Tensor, count: int) -> list[TopLogProbs]:
    """For each row of ``log_probs (B, V)`` its ``count`` likeliest tokens with their log-probs, likeliest first.

    >>> likeliest(torch.tensor([[-0.5, -2.0, -1.5]]), 2)
    [[(0, -0.5), (2, -1.5)]]
    """
    values, tokens = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]


def non_finite(
    token_ids: Sequence[int], log_probs: Sequence[float], banned_ids: Sequence[int], row: str
) -> NonFiniteLogits | None:
    """The error of a response that was sampled from logits that define no distribution, if it was; ``row`` names it.

    Logits may be minus infinity for some tokens, which then have no probability.

    >>> print(non_finite([5, 0], [-0.5, float("nan")], banned_ids=[], row="row 3"))
    row 3: the logits of response token 1 are not finite: the model's weights, or the row's pixels, contain NaN or infinity; \
the engine stays usable with finite ones
    """
    # A banned token means that all others have no probability.
    wrong = ~np.isfinite(log_probs) | np.isin(token_ids, banned_ids)
    if not wrong.any():
        return None
    return NonFiniteLogits(
        f"{row}: the logits of response token {int(wrong.argmax())} are not finite: the model's weights, or the row's "
        "pixels, contain NaN or infinity; the engine stays usable with finite ones"
    )


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the values that identify a sample, such as (seed, uid, sample number).

    >>> derive_seed(0, "1-7", 3) == derive_seed(0, "1-7", 3)
    True
    >>> derive_seed(0, "1-7", 3) == derive_seed(0, "1-7", 4)
    False
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn of an episode whose sample has this seed, counted from 0. The first turn has the sample's own seed.

    Together with `derive_seed`, a random stream is identified by (seed, uid, sample number, turn).

    >>> turn_seed(5, 0), turn_seed(5, 1) == turn_seed(5, 2)
    (5, False)
    """
    return derive_seed(seed, "turn", turn) if turn else seed


def uniforms(seeds: Numbers, step: int | Numbers) -> Numbers:
    """Number ``step`` (one int for all rows, or ``(B,)``) of the streams of ``seeds (B,)``: ``(B,)`` float64 in [0, 1).

    SplitMix64 (Steele et al. 2014) in counter mode, for arrays, or for int64 tensors that hold the bits of the seeds.

    >>> draws = uniforms(np.array([1, 2], dtype=np.uint64), step=0)
    >>> bool(((draws >= 0) & (draws < 1)).all()), bool(draws[0] != draws[1])
    (True, True)
    >>> bool((uniforms(torch.tensor([1, 2]), 0).numpy() == draws).all())
    True
    """
    if isinstance(seeds, Tensor):
        return _bits(seeds, step).double() * 2.0**-53
    with np.errstate(over="ignore"):
        return _bits(seeds.astype(np.uint64).view(np.int64), np.asarray(step).astype(np.int64)) * 2.0**-53


def _bits(seeds: Numbers, step: int | Numbers) -> Numbers:
    """The upper 53 bits of a number of the streams."""
    return _shifted(_mix(_mix(seeds) + (step + 1) * _GOLDEN), 11)


def _mix(z: Numbers) -> Numbers:
    z = (z ^ _shifted(z, 30)) * _FACTORS[0]
    z = (z ^ _shifted(z, 27)) * _FACTORS[1]
    return z ^ _shifted(z, 31)


def _shifted(z: Numbers, bits: int) -> Numbers:
    """Numbers of 64 bits, shifted to the right and filled up with zeros."""
    return (z >> bits) & ((1 << 64 - bits) - 1)


def completes_stop_text(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the last token of a response completes one of the texts, if no token before it did.

    Texts of special tokens count. A token has at least one byte of text, so a few more tokens than the longest text has bytes are
    decoded.
    """
    length = max(len(text.encode()) for text in stop) + 4
    tail = tokenizer.decode(token_ids[-length:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(text in tail for text in stop)
