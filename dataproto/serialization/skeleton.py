"""Separates the containers of a value from its leaves, and puts both together again.

Containers (dicts, lists, tuples, sets, arrays of objects, ...) and plain values become bytes, written by pickle. Tensors, arrays,
images and all other objects become a list of leaves. An object that occurs in many places is one leaf and, put together again,
one object. The bytes can call the functions of this module and no others, whoever wrote them.
"""

import dataclasses
import functools
import io
import math
import pickle
from collections import UserDict, UserList
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from dataproto.serialization.leaves import RAGGED, RaggedColumn, leaf_key, ragged_name

_CONTAINERS = (dict, list, tuple, set, frozenset, UserDict, UserList)


class Apart(NamedTuple):
    """A value taken apart: its containers, its leaves, and which leaves are the storage of a ragged tensor."""

    skeleton: bytes
    leaves: list[Any]
    ragged: set[int]


def take_apart(value: Any, row_bytes: float = math.inf) -> Apart:
    """The containers of a value as bytes, and its leaves; tensors and arrays that read the same memory are one leaf.

    Args:
        row_bytes: each distinct row of a ragged tensor is a leaf where its rows have at least this many bytes on average.

    >>> image = torch.zeros(2)
    >>> skeleton, leaves, _ = take_apart([{"image": image, "n": 1}, {"image": image}])
    >>> len(leaves), put_together(skeleton, ["leaf"])
    (1, [{'image': 'leaf', 'n': 1}, {'image': 'leaf'}])
    """
    file = io.BytesIO()
    writer = _Writer(file, row_bytes)
    writer.dump(value)
    return Apart(file.getvalue(), writer.leaves, writer.ragged)


def put_together(skeleton: "bytes | memoryview", leaves: Sequence[Any]) -> Any:
    """The inverse of :func:`take_apart`."""
    return _Reader(io.BytesIO(skeleton), leaves).load()


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, row_bytes: float) -> None:
        super().__init__(file, protocol=5)
        self.leaves: list[Any] = []
        self.ragged: set[int] = set()
        self._places: dict[Hashable, int] = {}
        self._row_bytes = row_bytes

    def reducer_override(self, value: Any) -> Any:
        """How pickle writes a value that is not of an exact builtin type."""
        kind: Any = type(value)
        if kind is torch.Tensor and not value.is_nested:
            return self._set_aside(value)
        if kind is np.ndarray and value.dtype == object:
            return _objects, (value.shape,), value.reshape(-1).tolist(), None, None, _fill
        if (name := ragged_name(kind)) is not None:
            return self._ragged(name, value)
        if isinstance(value, torch.Tensor) and value.is_nested:
            return _nested(value) or self._set_aside(value)
        if kind is TensorDict:
            device = None if value.device is None else torch.empty(0, device=value.device)
            return _tensordict, (dict(value.items()), tuple(value.batch_size), device)
        if kind is FunctionType and value in _OWN:
            return NotImplemented
        if _holds_values(kind):
            return NotImplemented
        return self._set_aside(value)

    def _set_aside(self, leaf: Any) -> tuple[Callable[..., Any], tuple[int]]:
        return _leaf, (self._place(leaf),)

    def _place(self, leaf: Any) -> int:
        place = self._places.setdefault(leaf_key(leaf), len(self.leaves))
        if place == len(self.leaves):
            self.leaves.append(leaf)
        return place

    def _ragged(self, name: str, value: RaggedColumn) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if len(value) and value.nbytes >= self._row_bytes * len(value):
            return _ragged_rows, (name, value.unbind())
        kept = value.distinct()
        self.ragged.add(self._place(kept.storage))
        return _ragged, (name, kept.storage, kept.starts.numpy(), kept.lengths.numpy())


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, leaves: Sequence[Any]) -> None:
        super().__init__(file)
        self._leaves = leaves

    def find_class(self, module: str, name: str) -> Any:
        if module != __name__ or name not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is not one of the functions that containers are made by")
        return self._leaves.__getitem__ if name == _leaf.__name__ else _NAMES[name]


@functools.cache
def _holds_values(kind: Any) -> bool:
    """Whether instances of a class only hold values, and the receiver can import it; instances of others are leaves."""
    if kind.__module__ == "__main__" or "<" in kind.__qualname__:
        return False
    ordinary = all(getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__"))
    return issubclass(kind, _CONTAINERS) or (ordinary and dataclasses.is_dataclass(kind))


# The functions that the bytes may call


def _leaf(place: int) -> Any:
    raise NotImplementedError  # only a name: the reader replaces it by an access to its list of leaves


def _objects(shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, dtype=object)


def _fill(array: np.ndarray, items: list[Any]) -> None:
    flat = array.reshape(-1)
    for place, item in enumerate(items):
        flat[place] = item


def _ragged(name: str, storage: torch.Tensor, starts: np.ndarray, lengths: np.ndarray) -> RaggedColumn:
    return RAGGED[name].windows(storage, starts, lengths)


def _ragged_rows(name: str, rows: list[torch.Tensor]) -> RaggedColumn:
    return RAGGED[name].from_list(rows)


def _tensordict(items: dict[str, Any], batch_size: tuple[int, ...], device: torch.Tensor | None) -> TensorDict:
    return TensorDict(items, batch_size=batch_size, device=None if device is None else device.device)


def _nested(value: torch.Tensor) -> Any:
    parts: Any = value
    if value.layout == torch.jagged:
        return _jagged, (parts.values(), parts.offsets(), parts.lengths(), parts._ragged_idx)
    return (_strided, (list(value.unbind()),)) if value.layout == torch.strided else None


def _jagged(values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, dim: int) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim)


def _strided(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.strided)


_NAMES = {
    made.__name__: made for made in (_leaf, _objects, _fill, _ragged, _ragged_rows, _tensordict, _jagged, _strided)
}
_OWN = frozenset(_NAMES.values())
