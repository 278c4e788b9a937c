"""Text that describes a batch: its columns, their dtypes and shapes."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from dataproto.ragged import RaggedTensor

Arrays: TypeAlias = Mapping[str, np.ndarray | RaggedTensor]


def data_info(batch: Any, non_tensor_batch: Arrays, meta_info: Mapping[str, Any]) -> str:
    """One line for each column and key of ``meta_info``: name, shape, dtype, device or type."""
    lines = ["batch"]
    for name, value in () if batch is None else batch.items():
        dtype = f" ({value.dtype})" if hasattr(value, "dtype") and value.dtype is not None else ""
        lines.append(f"  {name}: {tuple(value.shape)}{dtype}{'' if value.device is None else f' {value.device}'}")
    lines.append("non_tensor_batch")
    lines += [f"  {name}: {type_name(array)}" for name, array in non_tensor_batch.items()]
    lines.append("meta_info")
    lines += [f"  {name}: {type_name(value)}" for name, value in meta_info.items()]
    return "\n".join(lines)


def type_name(value: Any) -> str:
    """The type of a value and of its contents.

    >>> type_name({"a": [1, 2.0]}), type_name((1, "x"))
    ('dict[str: list[float|int]]', 'tuple(int, str)')
    """
    if isinstance(value, list):
        return f"list[{'|'.join(sorted({type_name(item) for item in value[:3]})) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(type_name, value))})"
    if isinstance(value, dict):
        if not value:
            return "dict"
        key, item = next(iter(value.items()))
        return f"dict[{type_name(key)}: {type_name(item)}]"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    if isinstance(value, RaggedTensor):
        return repr(value)
    return type(value).__name__


def size_info(batch: Any, non_tensor_batch: Arrays, prefix: str = "") -> str:
    """The size of tensors and arrays in GB; of objects only the references count."""
    tensors = 0 if batch is None else sum(value.numel() * value.element_size() for value in batch.values(True, True))
    arrays = sum(array.nbytes for array in non_tensor_batch.values())
    message = f"Size of tensordict: {tensors / 1024**3} GB, size of non_tensor_batch: {arrays / 1024**3} GB"
    return f"{prefix}, {message}" if prefix else message
