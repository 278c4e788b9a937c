"""Making the number of rows divide: by repeating rows (as verl does), or with inert rows that change no result."""

import logging
import os
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dataproto._ops.column_ops import Column, cut, join, object_array
from dataproto.columns import COLUMNS
from dataproto.errors import IndivisibleBatch, InvalidColumn, InvalidIndex
from dataproto.ragged import RaggedTensor

if TYPE_CHECKING:
    from dataproto.protocol import DataProto

Batch = TypeVar("Batch", bound="DataProto")

logger = logging.getLogger(__name__)


class _Switches(type):
    """Class-level properties of :class:`DataProtoConfig`."""

    auto_padding_key = "_verl_auto_padding"
    _auto_padding = False

    @property
    def auto_padding(cls) -> bool:
        """Whether every batch may be split unevenly; also on where ``VERL_AUTO_PADDING`` is ``TRUE`` or ``1``."""
        return cls._auto_padding or os.getenv("VERL_AUTO_PADDING", "FALSE").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise InvalidColumn(f"auto_padding is True or False, not {enabled!r}")
        cls._auto_padding = enabled


class DataProtoConfig(metaclass=_Switches):
    """Process-wide switches, under verl's names."""


def pad_dataproto_to_divisor(data: Batch, size_divisor: int) -> tuple[Batch, int]:
    """Repeats rows from the front until the number of rows divides.

    Returns:
        The padded batch (``data`` itself where nothing is missing) and the number of rows added.

    Raises:
        IndivisibleBatch: ``size_divisor`` is not positive.

    >>> from dataproto import DataProto
    >>> padded, added = pad_dataproto_to_divisor(DataProto.from_dict(non_tensors={"name": ["a", "b", "c"]}), 7)
    >>> padded["name"].tolist(), added
    (['a', 'b', 'c', 'a', 'b', 'c', 'a'], 4)
    """
    if size_divisor < 1:
        raise IndivisibleBatch(f"rows cannot be divided into {size_divisor} parts")
    rows = len(data)
    added = -rows % size_divisor
    if rows == 0:
        logger.warning("a batch without rows has nothing to repeat and is not padded")
    if added == 0:
        return data, 0
    sizes = [rows] * (added // rows) + [added % rows] * (added % rows > 0)
    return data._map(
        rows + added, lambda name, column: join([column, *(cut(column, slice(0, size, 1)) for size in sizes)], name)
    ), added


def unpad_dataproto(data: Batch, pad_size: int) -> Batch:
    """Takes off the last ``pad_size`` rows; ``data`` itself where there are none to take off."""
    _check_pad(data, pad_size)
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def pad_inert(data: Batch, rows: int) -> Batch:
    """Adds ``rows`` inert rows at the end: all masks 0, no media, in no group and in no denominator.

    Columns of tensors and numbers are 0 there (strings and ragged rows empty). Columns of objects hold what ``columns.py`` calls
    inert (no media, no prompt tokens, a ``uid`` shared with nobody); other objects are the last row's, so that code that only
    looks at their form keeps working. Take the rows off with :func:`unpad_inert`.

    Raises:
        InvalidIndex: ``rows`` is negative.

    >>> import torch
    >>> from dataproto import DataProto
    >>> data = DataProto.from_dict({"response_mask": torch.ones(1, 2)}, {"multi_modal_inputs": [{"pixel_values": 1}]})
    >>> pad_inert(data, 1)["response_mask"].tolist(), pad_inert(data, 1)["multi_modal_inputs"].tolist()
    ([[1.0, 1.0], [0.0, 0.0]], [{'pixel_values': 1}, {}])
    """
    if rows < 0:
        raise InvalidIndex(f"cannot add {rows} rows")
    if rows == 0:
        return data
    return data._map(len(data) + rows, lambda name, column: join([column, _inert(name, column, rows)], name))


def unpad_inert(data: Batch, rows: int) -> Batch:
    """Takes off the last ``rows`` rows, which :func:`pad_inert` added; ``data`` itself where there are none to take off."""
    return unpad_dataproto(data, rows)


def _inert(name: str, column: Column, rows: int) -> Column:
    if isinstance(column, RaggedTensor):
        return RaggedTensor.windows(column.storage, [0] * rows, [0] * rows)
    if not isinstance(column, np.ndarray):
        return column.new_zeros((rows, *column.shape[1:]))
    if column.dtype != object:
        return np.zeros((rows, *column.shape[1:]), dtype=column.dtype)
    if name in COLUMNS and COLUMNS[name].inert is not None:
        return object_array([COLUMNS[name].inert_row(row) for row in range(rows)])
    return np.repeat(column[-1:], rows, axis=0) if len(column) else object_array([None] * rows)


def _check_pad(data: Batch, pad_size: int) -> None:
    if not 0 <= pad_size <= len(data):
        raise InvalidIndex(f"cannot take {pad_size} rows off a batch of {len(data)} rows")
