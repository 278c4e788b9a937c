"""Rollouts of different widths, made equally wide: prompts are padded on the left, responses on the right.

Letters: B rows, P prompt tokens, R response tokens, L = P + R.
"""

from collections.abc import Collection, Sequence
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
_ROW_COLUMNS = ("attention_mask", "input_ids", "position_ids", "mm_token_type_ids")  # (B, L)
_RESPONSE_COLUMNS = ("response_mask", "responses")  # (B, R)


def token_widths(data: "DataProto") -> tuple[int, int]:
    """P and R of a batch, each 0 where it has no such tokens; only tensors of rows of one length count."""
    dense = _dense_columns(data)
    length = next((dense[name].shape[-1] for name in _ROW_COLUMNS if name in dense), 0)
    response = next((dense[name].shape[1] for name in _RESPONSE_COLUMNS if name in dense), 0)
    return max(length - response, 0), response


def other_response_columns(data: "DataProto") -> set[str]:
    """Names of the columns that `COLUMNS` does not know and whose second dimension is R: they may belong to responses."""
    response = token_widths(data)[1]
    return {
        name for name, column in _dense_columns(data).items() if name not in COLUMNS and column.shape[1] == response
    }


def widen(data: Batch, prompt: int, response: int, others: Collection[str] = ()) -> Batch:
    """The rows with prompts padded to ``prompt`` columns and responses to ``response``; the batch itself if it is as wide.

    What is added is what a wider batch would hold: the pad token (see `PAD_TOKEN`; else 0), positions that go on behind
    the response, and 0 everywhere else.

    Args:
        others: columns that `COLUMNS` does not know and that hold something for each response token ``(B, R, ...)``.

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
    for name, column in _dense_columns(data).items():
        letter = COLUMNS[name].shape[-1] if name in COLUMNS else "R" if name in others else "B"
        if name == "position_ids":
            following = column[..., -1:] + torch.arange(1, right + 1, device=column.device)
            wider[name] = torch.cat([pad(column, (left, 0)), following], dim=-1)
        elif letter in added:
            fill = data.meta_info.get(PAD_TOKEN, 0) if name in _TOKEN_COLUMNS else 0
            wider[name] = pad(column, (0, 0) * (column.ndim - 2) + added[letter], value=fill)
    return wider


def equally_wide(parts: Sequence[Batch]) -> list[Batch]:
    """The parts, each as wide as the widest prompt and the widest response of all of them.

    A column that `COLUMNS` does not know is taken for one of responses if its second dimension is R in every part. Parts that
    have columns of L tokens and none that tells R stay as they are: whether prompts or responses differ is not known.
    """
    if any(
        not (names := _dense_columns(part).keys()).isdisjoint(_ROW_COLUMNS) and names.isdisjoint(_RESPONSE_COLUMNS)
        for part in parts
    ):
        return list(parts)
    widths = [token_widths(part) for part in parts]
    prompt, response = (max(sizes) for sizes in zip(*widths)) if widths else (0, 0)
    others = set.intersection(*map(other_response_columns, parts)) if parts else set()
    return [widen(part, prompt, response, others) for part in parts]


def _dense_columns(data: "DataProto") -> dict[str, Tensor]:
    """The tensors ``(B, X, ...)`` whose rows have one length."""
    columns = {name: data[name] for name in data.names()}
    return {
        name: column
        for name, column in columns.items()
        if isinstance(column, Tensor) and not column.is_nested and column.ndim >= 2
    }
