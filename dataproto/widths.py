"""Rollouts of different widths, made equally wide: prompts are padded on the left, responses on the right.

Letters: B rows, P prompt tokens, R response tokens, L = P + R.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.columns import COLUMNS

if TYPE_CHECKING:
    from dataproto.protocol import DataProto

Batch = TypeVar("Batch", bound="DataProto")

MAX_TOKENS = "max_tokens"
"""The fact in ``meta_info`` that tells how long a response could have become; R is the length of the longest."""
PAD_TOKEN = "pad_token_id"
"""The fact in ``meta_info`` that tells what stands in ``input_ids`` where there is no token."""

_TOKEN_COLUMNS = ("prompts", "responses", "input_ids")


def token_widths(data: "DataProto") -> tuple[int, int]:
    """P and R of a batch, each 0 where it has no such tokens."""
    length = next((data[name].shape[-1] for name in ("attention_mask", "input_ids") if name in data), 0)
    response = next((data[name].shape[1] for name in ("response_mask", "responses") if name in data), 0)
    return max(length - response, 0), response


def widen(data: Batch, prompt: int, response: int) -> Batch:
    """The rows with prompts padded to ``prompt`` columns and responses to ``response``; the batch itself if it is as wide.

    What is added is what a wider batch would hold: the pad token (see `PAD_TOKEN`; else 0), positions that go on behind
    the response, and 0 everywhere else. Columns that `COLUMNS` does not know are taken for responses where their second dimension
    is R.

    >>> from dataproto import DataProto
    >>> data = DataProto.from_dict({"input_ids": torch.tensor([[5, 6]]), "response_mask": torch.tensor([[1]])})
    >>> wider = widen(data, prompt=2, response=3)
    >>> wider["input_ids"].tolist(), wider["response_mask"].tolist()
    ([[0, 5, 6, 0, 0]], [[1, 0, 0]])
    """
    before, now = token_widths(data)
    left, right = prompt - before, response - now
    if not left and not right:
        return data
    added = {"P": (left, 0), "R": (0, right), "L": (left, right)}
    wider = data[:]
    for name in data.names():
        column = data[name]
        if not isinstance(column, Tensor) or column.is_nested:
            continue
        letter = COLUMNS[name].shape[-1] if name in COLUMNS else "R" if column.shape[1:2] == (now,) else "B"
        if name == "position_ids":
            following = column[..., -1:] + torch.arange(1, right + 1, device=column.device)
            wider[name] = torch.cat([pad(column, (left, 0)), following], dim=-1)
        elif letter in added:
            fill = data.meta_info.get(PAD_TOKEN, 0) if name in _TOKEN_COLUMNS else 0
            wider[name] = pad(column, (0, 0) * (column.ndim - 2) + added[letter], value=fill)
    return wider


def equally_wide(parts: Sequence[Batch]) -> list[Batch]:
    """The parts, each as wide as the widest prompt and the widest response of all of them."""
    widths = [token_widths(part) for part in parts]
    prompt, response = (max(sizes) for sizes in zip(*widths)) if widths else (0, 0)
    return [widen(part, prompt, response) for part in parts]
