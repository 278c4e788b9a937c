"""`rollout.sampling.sample` in two kernels of Triton, for tokens that are drawn from the whole distribution on CUDA.

Each of the 30 operations it takes the place of costs the host some 15 us, and most of them read the logits again. A program reads
one row alone, so that its token does not depend on others.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.sampling import ids_on, policy_logits_

CHUNK = 4096
"""Tokens of the vocabulary that a program reads, so that few rows keep a whole device busy."""


def draw(
    logits: Tensor, temperature: float | Tensor, numbers: Tensor, banned_ids: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row. Inverts the distribution function, as `rollout.sampling.draw_tokens` does.

    Args:
        logits: ``(B, V)`` float32 on CUDA; those of ``banned_ids``, which have no probability, are overwritten.
        temperature: one number, or ``(B,)`` float32. At 0 a row has its likeliest token, and the log-prob at temperature 1.
        numbers: ``(B,)`` float64, uniform in [0, 1).

    Returns:
        Tokens ``(B,)`` int64 and their log-probs ``(B,)`` float32, which are not finite if a row's logits are not.
    """
    if banned_ids:
        policy_logits_(logits, 1.0, ids_on(tuple(banned_ids), logits.device))
    rows, words = logits.shape
    chunks = triton.cdiv(words, CHUNK)
    tokens, log_probs = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
    largest, masses = logits.new_empty(2, rows, chunks)
    likeliest = logits.new_empty(rows, chunks, dtype=torch.int32)
    each = isinstance(temperature, Tensor)
    given = logits, logits.stride(0), temperature if each else float(temperature), words, largest, masses, likeliest
    _sum_chunks[(rows, chunks)](*given, EACH=each, CHUNK=CHUNK)
    lanes = triton.next_power_of_2(chunks)
    _choose[(rows,)](*given, chunks, numbers, tokens, log_probs, EACH=each, CHUNK=CHUNK, CHUNKS=lanes, num_warps=8)
    return tokens, log_probs


@triton.jit
def _tempered(logits, stride, temperature, words, row, chunk, EACH: tl.constexpr, CHUNK: tl.constexpr):
    """The logits of a chunk of a row, divided by the row's temperature."""
    asked = tl.load(temperature + row) if EACH else temperature
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    found = tl.load(logits + row.to(tl.int64) * stride + places, mask=places < words, other=-float("inf"))
    return found / tl.where(asked > 0, asked, 1.0)


@triton.jit
def _sum_chunks(
    logits, stride, temperature, words, largest, masses, likeliest, EACH: tl.constexpr, CHUNK: tl.constexpr
):
    """Of each chunk of a row the largest logit, the first token that has it, and the sum of exponentials beside it."""
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    found = _tempered(logits, stride, temperature, words, row, chunk, EACH, CHUNK)
    most = tl.maximum(tl.max(found), -3.0e38)
    place = row * chunks + chunk
    tl.store(largest + place, most)
    tl.store(masses + place, tl.sum(tl.exp(found - most)))
    lanes = tl.arange(0, CHUNK)
    tl.store(likeliest + place, chunk * CHUNK + tl.min(tl.where(found == most, lanes, CHUNK - 1)))


@triton.jit
def _choose(
    logits,
    stride,
    temperature,
    words,
    largest,
    masses,
    likeliest,
    count,
    numbers,
    tokens,
    log_probs,
    EACH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A token of a row, and its log-prob, for the ``count`` chunks that `_sum_chunks` has summed."""
    row, chunks, lanes = tl.program_id(0), tl.arange(0, CHUNKS), tl.arange(0, CHUNK)
    there = chunks < count
    mosts = tl.load(largest + row * count + chunks, mask=there, other=-3.0e38)
    parts = tl.load(masses + row * count + chunks, mask=there, other=0.0)
    most = tl.max(mosts)
    log_total = most + tl.log(tl.sum(parts * tl.exp(mosts - most)))
    firsts = tl.load(likeliest + row * count + chunks, mask=there, other=0)
    token = tl.min(tl.where(there & (mosts == most), firsts, words - 1))
    asked = tl.load(temperature + row) if EACH else temperature
    if asked > 0:
        sums = (parts * tl.exp(mosts - log_total)).to(tl.float64)  # the probabilities of the chunks
        target = tl.load(numbers + row) * tl.sum(sums)
        last = tl.max(tl.where(sums > 0, chunks, 0))  # no token without probability is drawn, however sums are rounded
        chosen = tl.minimum(tl.sum((tl.cumsum(sums) <= target).to(tl.int32)), last)
        found = _tempered(logits, stride, temperature, words, row, chosen, EACH, CHUNK)
        probs = tl.exp(found - log_total).to(tl.float64)
        rest = tl.maximum(target - tl.sum(tl.where(chunks < chosen, sums, 0.0)), 0.0)
        rest *= tl.sum(probs) / tl.sum(tl.where(chunks == chosen, sums, 0.0))  # the two round the same sum differently
        last = tl.max(tl.where(probs > 0, lanes, 0))
        token = chosen * CHUNK + tl.minimum(tl.sum((tl.cumsum(probs) <= rest).to(tl.int32)), last)
    drawn = tl.load(logits + row.to(tl.int64) * stride + token) / tl.where(asked > 0, asked, 1.0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, drawn - log_total)
