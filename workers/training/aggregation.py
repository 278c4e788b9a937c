"""From a loss per token to one number, the same number however the rows were split.

Every mode is a weighted sum over tokens, ``loss = (token_weights(mask, ...) * loss).sum()``. The weights depend on one
number of the whole mini-batch, its `denominator`. With that number passed in, the sums over micro-batches, and over
ranks, add up to the loss of the unsplit mini-batch. `denominator` is a sum over rows, so ranks add theirs up.

Dimension letters: B rows, R response tokens.
"""

from typing import get_args

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig
from workers.model.model_config import AggregationMode

MODES: tuple[str, ...] = get_args(AggregationMode)


def denominator(mask: Tensor, mode: str) -> Tensor:
    """The divisor of the whole mini-batch: tokens for ``token-mean``, rows with at least one token otherwise.

    Additive: that of a batch is the sum of those of its parts. Inert rows (mask all 0) add nothing.

    Args:
        mask: (B, R) of any dtype, not zero where the policy sampled the token.
        mode: one of `MODES`.

    Returns:
        () int64 on the device of ``mask``.

    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    >>> int(denominator(mask, "token-mean")), int(denominator(mask, "seq-mean-token-mean"))
    (4, 2)
    """
    check_mode(mode)
    sampled = mask != 0
    return sampled.sum() if mode == "token-mean" else sampled.any(-1).sum()


def token_weights(
    mask: Tensor, mode: str, total: Tensor | float | None = None, max_length: int | None = None
) -> Tensor:
    """The weight of each token in the loss.

    With m = mask, N = tokens in the mini-batch, S = rows in the mini-batch that hold a token:

    - ``token-mean``: m / N, each token counts the same (DAPO, arXiv:2503.14476, eq. 8).
    - ``seq-mean-token-mean``: m / (S * the row's own tokens), each row counts the same (GRPO, arXiv:2402.03300, eq. 3).
    - ``seq-mean-token-sum``: m / S, each row counts as its number of tokens.
    - ``seq-mean-token-sum-norm``: m / (S * max_length), no bias by length (Dr. GRPO, arXiv:2503.20783, section 3.2).

    Args:
        mask: (B, R) of any dtype, not zero where the policy sampled the token.
        mode: one of `MODES`.
        total: `denominator` of the whole mini-batch when ``mask`` is a part of it; by default that of ``mask``.
        max_length: the constant of ``seq-mean-token-sum-norm``; by default R, which is right only as long as every
            part has the same width.

    Returns:
        (B, R) float32; all zero if nothing was sampled.

    Raises:
        InvalidConfig: an unknown mode, or a ``max_length`` below 1.

    >>> loss, mask = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> [round(float((token_weights(mask, mode) * loss).sum()), 4) for mode in MODES]
    [2.75, 3.5, 5.5, 1.8333]
    >>> token_weights(torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), "seq-mean-token-mean")
    tensor([[0.2500, 0.2500, 0.0000, 0.0000],
            [0.5000, 0.0000, 0.0000, 0.0000]])
    """
    if max_length is not None and max_length < 1:
        raise InvalidConfig(f"max_length must be at least 1, got {max_length}")
    check_mode(mode)
    divisor = torch.as_tensor(denominator(mask, mode) if total is None else total, device=mask.device)
    sampled = (mask != 0).float()
    if mode == "seq-mean-token-mean":
        sampled = sampled / sampled.sum(-1, keepdim=True).clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        sampled = sampled / (mask.shape[-1] if max_length is None else max_length)
    return sampled / divisor.clamp(min=1)


def check_mode(mode: str) -> None:
    """`InvalidConfig` unless the mode is one of `MODES`."""
    if mode not in MODES:
        raise InvalidConfig(f"unknown aggregation mode {mode!r}; the modes are {', '.join(MODES)}")
