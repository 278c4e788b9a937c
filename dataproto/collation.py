"""Supervised rows as columns: token lists padded to one width.

Rows are lists of numbers, arrays, tensors, or one :class:`RaggedTensor`, which needs no conversion.

Dimension letters: B rows, L tokens of the longest row, R = L - 1.
"""

import struct
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidColumn, InvalidRow, RowCountMismatch
from dataproto.protocol import DataProto
from dataproto.ragged import RaggedTensor

Rows: TypeAlias = Sequence[Any] | RaggedTensor
Code: TypeAlias = Literal["q", "B", "f"]
_DTYPES = {"q": torch.int64, "B": torch.uint8, "f": torch.float32}


def ragged_rows(rows: Rows, code: Code = "q", name: str = "rows") -> RaggedTensor:
    """Rows of numbers as one column of int64 (``"q"``), uint8 (``"B"``) or float32 (``"f"``), without a Python loop over tokens.

    Raises:
        InvalidRow: a row holds anything else.
        InvalidColumn: ``rows`` is a ragged tensor of another dtype.

    >>> ragged_rows([[5, 6], [], [7]]).values
    tensor([5, 6, 7])
    """
    if isinstance(rows, RaggedTensor):
        if rows.dtype != _DTYPES[code] or rows.tail:
            raise InvalidColumn(f"{name} are {_DTYPES[code]}, one a token, not {rows!r}")
        return rows
    parts = []
    for row, numbers in enumerate(rows):
        try:
            parts.append(_packed(numbers, code))
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            raise InvalidRow(row, f"{name} are {_DTYPES[code]}, one a token: {error}") from error
    values = np.frombuffer(bytearray().join(parts), dtype=code)
    return RaggedTensor(torch.from_numpy(values), np.fromiter(map(len, rows), np.int64, len(parts)))


def _packed(numbers: Any, code: str) -> Any:
    """The bytes of a row; of a list by the fastest way that refuses other numbers."""
    if isinstance(numbers, list | tuple):
        return bytes(numbers) if code == "B" else struct.pack(f"{len(numbers)}{code}", *numbers)
    if np.ndim(numbers) != 1:
        raise ValueError(f"shape {np.shape(numbers)}")
    return np.ascontiguousarray(np.asarray(numbers).astype(code, casting="same_kind", copy=False))


def pad_rows(rows: RaggedTensor, width: int, fill: float) -> tuple[Tensor, Tensor]:
    """Pads rows on the right to ``(B, width)``; also returns which cells hold tokens, ``(B, width)`` bool.

    Raises:
        InvalidRow: a row is longer than ``width``.

    >>> pad_rows(ragged_rows([[5, 6], [7]]), 3, 0)[0].tolist()
    [[5, 6, 0], [7, 0, 0]]
    """
    lengths = rows.lengths.numpy()
    if (long := np.flatnonzero(lengths > width)).size:
        raise InvalidRow(int(long[0]), f"{lengths[long[0]]} tokens do not fit into {width}")
    filled = np.arange(width) < lengths[:, None]
    padded = torch.full(filled.shape, fill, dtype=rows.dtype)
    padded.numpy()[filled] = rows.values.numpy()
    return padded, torch.from_numpy(filled)


def collate_supervised(
    input_ids: Rows,
    loss_mask: Rows | None = None,
    token_types: Rows | None = None,
    *,
    pad_token_id: int,
    width: int | None = None,
) -> DataProto:
    """Puts supervised rows, padded on the right, into the columns of a rollout: every token but the first is a response.

    The columns are ``input_ids``, ``attention_mask`` and ``position_ids`` ``(B, L)``, ``response_mask`` ``(B, R)`` with
    R = L - 1, and with ``token_types`` also ``mm_token_type_ids`` ``(B, L)``, from which, with the media of the rows, a model
    family makes the m-RoPE ``position_ids`` ``(B, 4, L)``.

    Args:
        loss_mask: 1 on tokens to learn, 0 elsewhere; default: all. The first token of a row is never learnt.
        token_types: 0 text, 1 image, 2 video, 3 sound placeholder.
        width: L; default: the length of the longest row.

    Raises:
        InvalidRow: a row is longer than ``width``, holds other values, or differs in length between the arguments.

    >>> data = collate_supervised([[5, 6, 7], [8, 9]], [[0, 0, 1], [0, 1]], pad_token_id=0)
    >>> data["input_ids"].tolist(), data["response_mask"].tolist()
    ([[5, 6, 7], [8, 9, 0]], [[0, 1], [1, 0]])
    """
    ids = ragged_rows(input_ids, name="input_ids")
    length = int(ids.lengths.max()) if width is None and len(ids) else width or 0
    padded, filled = pad_rows(ids, length, pad_token_id)
    attention = filled.to(torch.int64)
    learnt = (
        attention[:, 1:] if loss_mask is None else pad_rows(_alike(loss_mask, ids, "loss_mask", 1), length, 0)[0][:, 1:]
    )
    columns = {
        "input_ids": padded,
        "attention_mask": attention,
        "position_ids": torch.arange(length).mul(attention),
        "response_mask": learnt.to(torch.int64),
    }
    if token_types is not None:
        columns["mm_token_type_ids"] = pad_rows(_alike(token_types, ids, "token_types", 3), length, 0)[0].to(torch.int8)
    return DataProto.from_dict(columns)


def _alike(rows: Rows, like: RaggedTensor, name: str, most: int) -> RaggedTensor:
    """Numbers from 0 to ``most`` as a column of uint8 with the lengths of the rows ``like``."""
    if isinstance(rows, RaggedTensor) and not rows.dtype.is_floating_point:
        storage = rows.storage.to(torch.uint8)
        # A number that uint8 cannot hold must not wrap around to 0 or 1.
        if rows.dtype not in (torch.bool, torch.uint8):
            storage[storage != rows.storage] = 255
        rows = RaggedTensor.windows(storage, rows.starts, rows.lengths)
    made = ragged_rows(rows, "B", name)
    if len(made) != len(like):
        raise RowCountMismatch(f"{len(like)} rows of input_ids, but {len(made)} of {name}")
    for row in (made.lengths != like.lengths).nonzero().flatten().tolist():
        raise InvalidRow(row, f"{int(like.lengths[row])} input_ids, but {int(made.lengths[row])} of {name}")
    if len(made.storage) and int(made.storage.max()) > most:  # The storage may hold more than the rows.
        for row, numbers in enumerate(made):
            if (numbers > most).any():
                raise InvalidRow(row, f"{name} are numbers from 0 to {most}, not {numbers.tolist()}")
    return made
