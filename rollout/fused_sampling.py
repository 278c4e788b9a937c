"""`rollout.sampling.sample` in one kernel of Triton, for tokens that are drawn from the whole distribution on CUDA.

Each of the 30 operations it takes the place of costs the host 15 to 40 us, and most of them read the logits again. A program
computes a row alone, so that its token does not depend on other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
"""Tokens of the vocabulary that a program reads at a time."""


def draw(logits: Tensor, temperature: float | Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens ``(B,)`` int64 for ``logits (B, V)`` and uniform ``numbers (B,)`` float64, and their log-probs ``(B,)`` float32.

    ``temperature``, one or ``(B,)`` of them: at 0 the likeliest token, and its log-prob at 1. Draws invert the distribution
    function as `rollout.sampling.draw_tokens` does.
    """
    rows, words = logits.shape
    tokens, log_probs = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
    chunks = triton.next_power_of_2(triton.cdiv(words, CHUNK))
    each = isinstance(temperature, Tensor)
    given = logits, logits.stride(0), numbers, temperature if each else float(temperature), tokens, log_probs, words
    _draw[(rows,)](*given, EACH=each, CHUNK=CHUNK, CHUNKS=chunks, num_warps=8)
    return tokens, log_probs


@triton.jit
def _draw(
    logits,
    stride,
    numbers,
    temperature,
    tokens,
    log_probs,
    words,
    EACH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    asked = tl.load(temperature + row) if EACH else temperature
    divisor = tl.where(asked > 0, asked, 1.0)
    lanes, chunks = tl.arange(0, CHUNK), tl.arange(0, CHUNKS)
    most, mass = tl.full([CHUNK], -3.0e38, tl.float32), tl.zeros([CHUNK], tl.float32)
    likeliest = tl.zeros([CHUNK], tl.int32)
    for start in range(0, words, CHUNK):
        found = tl.load(logits + start + lanes, mask=start + lanes < words, other=-float("inf")) / divisor
        likeliest = tl.where(found > most, start + lanes, likeliest)
        larger = tl.maximum(most, found)
        mass = mass * tl.exp(most - larger) + tl.exp(found - larger)
        most = larger
    largest = tl.max(most)
    log_total = largest + tl.log(tl.sum(mass * tl.exp(most - largest)))
    token = tl.min(tl.where(most == largest, likeliest, words - 1))
    if asked > 0:
        sums = tl.zeros([CHUNKS], tl.float64)  # of the probabilities of each chunk
        for start in range(0, words, CHUNK):
            found = tl.load(logits + start + lanes, mask=start + lanes < words, other=-float("inf")) / divisor
            part = tl.sum(tl.exp(found - log_total)).to(tl.float64)
            sums += tl.where(chunks == start // CHUNK, part, 0.0)
        target = tl.load(numbers + row) * tl.sum(sums)
        last = tl.max(tl.where(sums > 0, chunks, 0))  # no token without probability is drawn, however sums are rounded
        chosen = tl.minimum(tl.sum((tl.cumsum(sums) <= target).to(tl.int32)), last)
        rest = tl.maximum(target - tl.sum(tl.where(chunks < chosen, sums, 0.0)), 0.0)
        places = chosen * CHUNK + lanes
        found = tl.load(logits + places, mask=places < words, other=-float("inf")) / divisor
        probs = tl.exp(found - log_total).to(tl.float64)
        last = tl.max(tl.where(probs > 0, lanes, 0))
        token = chosen * CHUNK + tl.minimum(tl.sum((tl.cumsum(probs) <= rest).to(tl.int32)), last)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, tl.load(logits + token) / divisor - log_total)
