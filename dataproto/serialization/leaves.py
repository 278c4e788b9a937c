"""One encoder of leaves: a tensor, an array or an image as a plain description and bytes, and back.

The wire, the file and the collectives all use it. They differ in where the bytes go, not in how a leaf becomes bytes. The bytes
are the leaf's own memory wherever that is contiguous and on the right device; what is decoded lies in the memory it is given.

A ragged column is not a leaf: it is a tensor, which is one, and two whole numbers a row. Nothing here imports its class
(`RAGGED`).
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from dataproto.serialization.images import Palette, image_of, is_image, palette_of, pixels_of
from dataproto.tensordict_utils import memory_key

Description: TypeAlias = tuple[Any, ...]
"""The kind of a leaf (``"tensor"``, ``"trimmed"``, ``"array"``, ``"image"`` or ``"object"``) and what :func:`decode` needs in
addition to the bytes.
"""


def encode(leaf: Any) -> tuple[Description, np.ndarray | None]:
    """A leaf as a plain description and its bytes ``(n,)`` uint8.

    An object of any other type, and a tensor without strided memory, is ``("object", leaf)`` without bytes.

    >>> encode(torch.tensor([[1, 2]], dtype=torch.int8))
    (('tensor', 'int8', (1, 2), False, None), array([1, 2], dtype=uint8))
    """
    plain = type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_nested
    if plain and leaf.device.type != "meta":
        device = None if leaf.device.type == "cpu" else str(leaf.device)
        described = "tensor", dtype_name(leaf.dtype), tuple(leaf.shape), leaf.requires_grad, device
        return described, tensor_bytes(leaf).numpy()
    if is_array(leaf):
        return ("array", leaf.dtype, leaf.shape), array_bytes(leaf)
    if is_image(leaf):
        return ("image", leaf.mode, leaf.size, palette_of(leaf), leaf.info), pixels_of(leaf)
    return ("object", leaf), None


def encode_column(column: Any) -> tuple[Description, np.ndarray | None]:
    """As :func:`encode`, but a tensor ``(..., L)`` that is half padding or more comes without the padding of its rows."""
    described, bits = encode(column)
    if described[0] != "tensor" or bits is None:
        return described, bits
    found = trim(bits, column.shape, column.element_size())
    if found is None:
        return described, bits
    runs, inner = found
    return ("trimmed", *described[1:], runs.values.dtype, runs.bounds.tobytes(), runs.values.tobytes()), inner


def decode(description: Sequence[Any], data: np.ndarray) -> Any:
    """The inverse of :func:`encode` for tensors, arrays and images, over the memory of ``data``.

    A tensor goes to the device that it was on where this process has it, or else to the CPU.
    """
    kind, *described = description
    return _DECODERS[kind](*described, data)


def _tensor(dtype: str, shape: tuple[int, ...], requires_grad: bool, device: str | None, data: np.ndarray) -> Any:
    tensor = tensor_of(data, getattr(torch, dtype), shape)
    if device is not None and _is_here(torch.device(device)):
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor


def _trimmed(dtype: str, shape: tuple[int, ...], requires_grad: bool, device: str | None, *trimmed: Any) -> Any:
    """A tensor, of whose data runs were left out: their numpy dtype, bounds and values, then the rest of the data."""
    word, bounds, values, data = trimmed
    runs = Runs(np.frombuffer(bounds, np.int32).reshape(-1, 2), np.frombuffer(values, word).reshape(-1, 4))
    return _tensor(dtype, shape, requires_grad, device, untrim(runs, data, shape))


def _is_here(device: torch.device) -> bool:
    here = torch.accelerator.current_accelerator()
    return here is not None and here.type == device.type and (device.index or 0) < torch.accelerator.device_count()


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], data: np.ndarray) -> np.ndarray:
    return array_of(data, dtype, shape)


def _image(mode: str, size: tuple[int, int], palette: Palette, info: dict[Any, Any], data: np.ndarray) -> Any:
    image = image_of(data, mode, size, palette)
    image.info = dict(info)
    return image


_DECODERS: dict[str, Callable[..., Any]] = {"tensor": _tensor, "trimmed": _trimmed, "array": _array, "image": _image}


# Tensors and arrays, and their bytes


def tensor_bytes(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The elements of a dense tensor ``(n,)`` uint8 on a device (``None``: the CPU); no copy if they are there, contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = (plain.cpu() if device is None else plain.to(device)).contiguous().reshape(-1)
    return plain.view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8, device=device)


def tensor_of(data: torch.Tensor | np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of :func:`tensor_bytes`, over the memory of ``data``."""
    flat: Any = torch.from_numpy(data) if type(data) is np.ndarray else data
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype, device=flat.device)
    tensor: torch.Tensor = flat.view(dtype).view(tuple(shape))
    return tensor


def array_bytes(array: np.ndarray) -> np.ndarray:
    """The elements of an array ``(n,)`` uint8; no copy where they lie contiguously."""
    if not array.nbytes:
        return np.empty(0, dtype=np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def array_of(data: np.ndarray, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray:
    """The inverse of :func:`array_bytes`, over the memory of ``data``."""
    return (data.view(dtype) if data.size else np.empty(0, dtype=dtype)).reshape(shape)


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    """The name of a dtype or layout of torch without the module: ``"float32"``, ``"jagged"``."""
    return str(dtype).removeprefix("torch.")


# Which leaves are the same


def is_array(value: Any) -> bool:
    """Whether a value is a plain numpy array whose elements are not objects."""
    return type(value) is np.ndarray and not value.dtype.hasobject


def leaf_key(value: Any) -> Hashable:
    """Equal for two leaves that are one object, or tensors or arrays that read the same memory in the same way."""
    if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested:
        return memory_key(value)
    if is_array(value) and value.size:
        return value.__array_interface__["data"][0], value.dtype, value.shape, value.strides
    return id(value)


# Ragged columns


RAGGED: list[Any] = []
"""The class of ragged columns, which adds itself. Instances are written as their ``storage``, ``starts`` and ``lengths``."""


# A message holds of a padded column ``(..., L)``, one that is half padding or more, only the inner parts of its rows.
#
# A row begins and ends with a run of elements of which each differs from the one before by the same number: padding (by 0), or
# positions that continue after a response (by 1). A run is its first element, its step and its length. Elements are compared as
# whole numbers of the same bits, whose arithmetic wraps around, so every dtype comes back bit for bit, also NaNs.
#
# A few rows tell whether a column is worth a search, and a search reads each row from its ends, no further than its runs go.

# The keys are the bytes of an element.
_WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}
_LEAST = 1 << 16  # In a column of fewer bytes the message costs more than they do.
_NARROWEST = 64  # A row has at least so many elements; one that is all runs costs about eight.
_WORTH = 1 / 2  # A column of which more remains travels as it is, without a copy.
_ROWS = 64  # So many are compared at a time, and tell whether a search is worth its time.
_BLOCK = 1 << 16  # So many elements are compared at a time.


@dataclass(frozen=True)
class Runs:
    """The runs at both ends of N rows ``(N, L)``."""

    bounds: np.ndarray  # (N, 2) int32: where the inner part begins and ends; a row that is one run begins at L
    values: np.ndarray  # (N, 4) whole numbers: first element and step of the run before, and of the run after

    @property
    def nbytes(self) -> int:
        return self.bounds.nbytes + self.values.nbytes


def trim(bits: np.ndarray, shape: Sequence[int], item_bytes: int) -> tuple[Runs, np.ndarray] | None:
    """The runs of a column, and the bytes ``(n,)`` uint8 of its inner parts; ``None`` where they are more than half of it.

    Args:
        bits: the bytes of the column ``(n,)`` uint8.
        shape: of the column, rows in the last dimension.

    >>> column = np.pad(np.arange(640, dtype=np.int32)[:, None] ** 2 % 7, ((0, 0), (100, 50)), constant_values=9)
    >>> runs, inner = trim(column.view(np.uint8).reshape(-1), column.shape, 4)
    >>> runs.bounds[1].tolist(), column.nbytes, runs.nbytes + inner.nbytes
    ([100, 101], 386560, 17920)
    """
    if len(shape) < 2 or item_bytes not in _WORDS or bits.nbytes < _LEAST or shape[-1] < _NARROWEST:
        return None
    rows = bits.view(_WORDS[item_bytes]).reshape(-1, shape[-1])
    few = _inner(rows[:: -(-len(rows) // _ROWS)])
    if (few[:, 1] - few[:, 0]).mean() > _WORTH * rows.shape[1]:
        return None
    bounds = np.concatenate([_inner(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)])
    runs = Runs(bounds.astype(np.int32), _run_values(rows, bounds))
    if int((bounds[:, 1] - bounds[:, 0]).sum()) * item_bytes + runs.nbytes > _WORTH * bits.nbytes:
        return None
    inner = np.concatenate([row[begin:end] for row, (begin, end) in zip(rows, bounds.tolist(), strict=True)])
    return runs, inner.view(np.uint8)


def untrim(runs: Runs, inner: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The inverse of :func:`trim`: the bytes ``(n,)`` uint8 of the column, in new memory."""
    word, width = runs.values.dtype, shape[-1]
    rows, places = np.empty((math.prod(shape[:-1]), width), word), np.arange(width).astype(word)
    inner, taken = inner.view(word), 0
    for row, (begin, end), (first, step, last, last_step) in zip(rows, runs.bounds.tolist(), runs.values, strict=True):
        row[:begin] = first + step * places[:begin] if step else first
        row[begin:end] = inner[taken : (taken := taken + end - begin)]
        row[end:] = last + last_step * places[: width - end] if last_step else last
    return rows.reshape(-1).view(np.uint8)


def _inner(rows: np.ndarray) -> np.ndarray:
    """Begin and end ``(N, 2)`` of the inner part of each row."""
    width = rows.shape[1]
    begin = _run_lengths(rows, np.arange(len(rows)))
    after = _run_lengths(rows[:, ::-1], np.flatnonzero(begin < width))
    return np.stack([begin, np.where(begin < width, np.maximum(width - after, begin), width)], axis=1)


def _run_lengths(rows: np.ndarray, running: np.ndarray) -> np.ndarray:
    """The length ``(N,)`` of the run with which each of the rows ``running`` begins, two elements at least; ``L`` of others."""
    width, step = rows.shape[1], rows[:, 1:2] - rows[:, :1]
    lengths = np.full(len(rows), width)
    start, size = 2, 16
    while start < width and len(running):
        part = rows[running, start - 1 : start + size]
        turns = part[:, 1:] - part[:, :-1] != step[running]
        turn = turns.argmax(1)
        ends = turns[np.arange(len(running)), turn]
        lengths[running[ends]] = start + turn[ends]
        running, start = running[~ends], start + size
        size = min(4 * size, max(_BLOCK // max(len(running), 1), 16))
    return lengths


def _run_values(rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """First element and step ``(N, 4)`` of the runs before and after the inner parts at ``bounds (N, 2)``."""
    number, width = np.arange(len(rows)), rows.shape[1]
    last, after = np.minimum(bounds[:, 1], width - 1), np.minimum(bounds[:, 1] + 1, width - 1)
    start, end = rows[:, 0], rows[number, last]
    return np.stack([start, rows[:, 1] - start, end, rows[number, after] - end], axis=1)
