"""Tokens drawn for rows whose requests may have different settings."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dataproto.transfer import move
from rollout.hf.open_requests import OpenRequest
from rollout.sampling import sample, uniforms


def draw(
    rows: Sequence[OpenRequest],
    logits: Tensor,
    drawn: np.ndarray,
    banned_ids: Sequence[int],
    undrawn_ids: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Tokens ``(N,)`` and their log-probs ``(N,)`` for ``logits (N, V)``; one call of `sample` for rows with the same settings.

    Args:
        rows: N requests; the same request may appear more than once.
        drawn: ``(N,)``, which number of its request's random stream each place draws with.
    """
    seeds = np.array([row.request.seed for row in rows], dtype=np.uint64)
    numbers = move(torch.from_numpy(uniforms(seeds, drawn)), logits.device)
    groups: dict[tuple[float, float, int, float], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.policy, []).append(place)
    if len(groups) == 1:
        return sample(logits, rows[0].sampling, numbers, banned_ids, undrawn_ids)
    tokens, values = torch.empty_like(numbers, dtype=torch.int64), torch.empty_like(numbers, dtype=logits.dtype)
    for places in groups.values():
        sampling = rows[places[0]].sampling
        tokens[places], values[places] = sample(logits[places], sampling, numbers[places], banned_ids, undrawn_ids)
    return tokens, values
