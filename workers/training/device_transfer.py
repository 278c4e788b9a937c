"""Batches to the device without waiting for it: the host prepares the next micro-batch while the device computes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dataproto import DataProto
from dataproto._ops.transfer import move


def to_device(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The values with tensors moved to ``device``; from the host to a CUDA device in the order of its stream."""
    return {name: move(value, device) if isinstance(value, Tensor) else value for name, value in values.items()}


def index_on(index: slice | Tensor, device: torch.device) -> slice | Tensor:
    """An index of rows for tensors on ``device``."""
    return move(index, device) if isinstance(index, Tensor) else index


def rows_to_device(rows: DataProto, device: torch.device) -> DataProto:
    """A batch with its dense columns on ``device``; the others are shared with ``rows``."""
    if device.type != "cuda" or rows.batch is None:
        return rows.to(device)
    moved = rows[:]
    moved.batch = rows.batch.apply(lambda column: move(column, device), device=device)
    return moved
