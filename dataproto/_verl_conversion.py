"""The fields of a batch to and from those of verl's class, without copying what is in them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from dataproto._ops.column_ops import object_array
from dataproto.errors import InvalidColumn, MissingPackage
from dataproto.ragged import RaggedTensor

Arrays = dict[str, np.ndarray | RaggedTensor]


def fields_of(data: Any) -> tuple[TensorDict | None, Arrays, dict[str, Any]]:
    """``batch``, ``non_tensor_batch`` and ``meta_info`` of a batch of verl's class, in containers of their own."""
    if absent := [name for name in ("batch", "non_tensor_batch", "meta_info") if not hasattr(data, name)]:
        raise InvalidColumn(f"a {type(data).__name__} is no batch of verl's: it has no {' and no '.join(absent)}")
    arrays: Arrays = dict(data.non_tensor_batch or {})
    facts = dict(data.meta_info or {})
    if data.batch is None:
        return None, arrays, facts
    nested = {name: column for name, column in data.batch.items() if RaggedTensor.holds(column)}
    arrays |= {name: RaggedTensor.from_nested(column) for name, column in nested.items()}
    return data.batch.exclude(*nested), arrays, facts


def arrays_of(columns: Mapping[str, np.ndarray | RaggedTensor]) -> dict[str, np.ndarray]:
    """Columns as numpy arrays; ragged ones as arrays of objects, one view a row."""
    return {name: _objects(column) if isinstance(column, RaggedTensor) else column for name, column in columns.items()}


def _objects(column: RaggedTensor) -> np.ndarray:
    return object_array([_as_numpy(row) for row in column.unbind()])


def _as_numpy(row: torch.Tensor) -> Any:
    """The same memory as a numpy array. (Pickle writes a numpy view alone, but a tensor's with the whole storage.)"""
    try:
        return row.numpy()
    except (TypeError, RuntimeError):  # a dtype that numpy lacks; another device, or a gradient
        return row


def verl_class() -> Callable[..., Any]:
    """``verl.protocol.DataProto``, imported now."""
    try:
        return import_module("verl.protocol").DataProto  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise MissingPackage(f"verl cannot be imported ({error}): pip install verl, or give to_verl a class") from error
