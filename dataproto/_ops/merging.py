"""The rules by which batches are merged: their columns side by side (union), and their ``meta_info``."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from tensordict import TensorDict

from dataproto._ops.column_ops import first_difference
from dataproto._ops.equality import same_value
from dataproto.errors import ColumnConflict, InvalidColumn, RowCountMismatch
from dataproto.packing import MAX_TOKENS
from dataproto.ragged import RaggedTensor

Array: TypeAlias = np.ndarray | RaggedTensor


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Adds the columns of the second to the first, in place, and returns the first; on an error the first is unchanged.

    Raises:
        RowCountMismatch: the batch sizes differ.
        ColumnConflict: both have a name with different values.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise RowCountMismatch(f"two tensor dicts must have identical batch sizes, not {sizes}")
    new = _new_columns(dict(tensor_dict1.items()), dict(tensor_dict2.items()))
    for key in new:
        tensor_dict1.set(key, tensor_dict2.get(key))
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, Array], tensor_dict2: Mapping[str, Array]) -> dict[str, Array]:
    """Adds the arrays of the second to the first, in place, and returns the first; on an error the first is unchanged.

    Raises:
        InvalidColumn: a value of a name that both have is neither an array nor a ragged tensor.
        ColumnConflict: both have a name with different values (NaN equals NaN, objects are compared deeply).
    """
    for key in tensor_dict1.keys() & tensor_dict2.keys():
        for side in (tensor_dict1, tensor_dict2):
            if not isinstance(side[key], np.ndarray | RaggedTensor):
                raise InvalidColumn(f"`{key}` is a {type(side[key]).__name__}, not a numpy array")
    new = _new_columns(tensor_dict1, tensor_dict2)
    tensor_dict1.update(new)
    return tensor_dict1


def _new_columns(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that ``right`` adds to ``left``; raises ColumnConflict if both have a name with different values."""
    for key in left.keys() & right.keys():
        if not same_value(left[key], right[key]):
            detail = first_difference(left[key], right[key])
            raise ColumnConflict(f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object: {detail}")
    return {key: value for key, value in right.items() if key not in left}


def union_meta_info(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The ``meta_info`` of both; raises ColumnConflict if a key has two values."""
    for key in left.keys() & right.keys():
        if not same_value(left[key], right[key]):
            raise ColumnConflict(f"Conflicting values for meta_info key '{key}': {left[key]!r} and {right[key]!r}")
    return {**left, **right}


def concat_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ``meta_info`` of a batch that is joined from parts.

    ``metrics`` (a dict or a list of dicts a part) become one dict of lists. Keys with ``timing`` in them differ between workers
    and keep the largest value of each number, since a step waits for its slowest part. ``max_tokens`` (see `dataproto.packing`)
    becomes the largest of all parts. Any other key must agree.

    Raises:
        ColumnConflict: a key has two values.

    >>> concat_meta_info([{"metrics": {"loss": 1.0}, "timing": {"gen": 2.0}}, {"metrics": {"loss": 3.0}, "timing": {"gen": 5.0}}])
    {'timing': {'gen': 5.0}, 'metrics': {'loss': [1.0, 3.0]}}
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for part in parts:
        for key, value in part.items():
            if key == "metrics":
                metrics += value if isinstance(value, list) else [] if value is None else [value]
            elif key not in merged or same_value(merged[key], value):
                merged.setdefault(key, value)
            elif key == MAX_TOKENS and isinstance(value, int) and isinstance(merged[key], int):
                merged[key] = max(merged[key], value)
            elif "timing" in str(key):
                merged[key] = _slowest(key, merged[key], value)
            else:
                raise ColumnConflict(f"Conflicting values for meta_info key '{key}': {merged[key]!r} and {value!r}")
    if metrics:
        names = dict.fromkeys(name for part in metrics for name in part)
        merged["metrics"] = {name: [part[name] for part in metrics if name in part] for name in names}
    return merged


def _slowest(key: str, left: Any, right: Any) -> Any:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        both = left.keys() & right.keys()
        return {**left, **right, **{name: _slowest(key, left[name], right[name]) for name in both}}
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left if right != right else right if left != left else max(left, right)
    if same_value(left, right):
        return left
    raise ColumnConflict(f"Conflicting values for meta_info key '{key}': {left!r} and {right!r}")
