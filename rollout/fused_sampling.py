"""`rollout.sampling.sample` in one kernel of Triton, for tokens that are drawn from the whole distribution on CUDA.

Each of the 30 operations it takes the place of costs the host as much as a step of a small model can spare, and most of them read
the logits again. A row is computed alone, so that its token does not depend on other rows.
"""


import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
"""Tokens of the vocabulary that a program reads at a time."""


@triton.jit
def _draw(logits, stride, numbers, temperature, tokens, log_probs, words, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    lanes, chunks = tl.arange(0, CHUNK), tl.arange(0, CHUNKS)
    most, mass = tl.full([CHUNK], -3.0e38, tl.float32), tl.zeros([CHUNK], tl.float32)
    for start in range(0, words, CHUNK):
        found = tl.load(logits + start + lanes, mask=start + lanes < words, other=-float("inf")) / temperature
        larger = tl.maximum(most, found)
        mass = mass * tl.exp(most - larger) + tl.exp(found - larger)
        most = larger
    largest = tl.max(most)
    log_total = largest + tl.log(tl.sum(mass * tl.exp(most - largest)))
    sums = tl.zeros([CHUNKS], tl.float64)
    for start in range(0, words, CHUNK):
        found = tl.load(logits + start + lanes, mask=start + lanes < words, other=-float("inf")) / temperature
        part = tl.sum(tl.exp(found - log_total)).to(tl.float64)
        sums += tl.where(chunks == start // CHUNK, part, 0.0)
    target = tl.load(numbers + row) * tl.sum(sums)
    last = tl.max(tl.where(sums > 0, chunks, 0))
    chosen = tl.minimum(tl.sum((tl.cumsum(sums) <= target).to(tl.int32)), last)
    rest = tl.maximum(target - tl.sum(tl.where(chunks < chosen, sums, 0.0)), 0.0)
    places = chosen * CHUNK + lanes
    found = tl.load(logits + places, mask=places < words, other=-float("inf")) / temperature
    probs = tl.exp(found - log_total).to(tl.float64)
    last = tl.max(tl.where(probs > 0, lanes, 0))
    place = tl.minimum(tl.sum((tl.cumsum(probs) <= rest).to(tl.int32)), last)
    tl.store(tokens + row, (chosen * CHUNK + place).to(tl.int64))
    tl.store(log_probs + row, tl.load(logits + chosen * CHUNK + place) / temperature - log_total)


def draw(logits: Tensor, temperature: float, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens ``(B,)`` int64 and their log-probs ``(B,)`` float32 for ``logits (B, V)`` float32 and ``numbers (B,)`` float64."""
    rows, words = logits.shape
    tokens, log_probs = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
    chunks = triton.next_power_of_2(triton.cdiv(words, CHUNK))
    _draw[(rows,)](
        logits,
        logits.stride(0),
        numbers,
        temperature,
        tokens,
        log_probs,
        words,
        CHUNK=CHUNK,
        CHUNKS=chunks,
        num_warps=8,
    )
    return tokens, log_probs
