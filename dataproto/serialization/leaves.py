"""One encoder of leaves: a tensor, an array or an image as a plain description and bytes, and back.

The wire, the file and the collectives all use it. They differ in where the bytes go, not in how a leaf becomes bytes. The bytes
are the leaf's own memory wherever that is contiguous and on the right device; what is decoded lies in the memory it is given.

A ragged column is not a leaf: it is a tensor, which is one, and two whole numbers a row. Its class registers itself
(`register_ragged`), so that nothing here imports it.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import torch

from dataproto._ops.image_buffers import Palette, image_of, is_image, palette_of, pixels_of
from dataproto.serialization.trimming import Runs, trim, untrim
from dataproto.tensordict_utils import memory_key

Description: TypeAlias = tuple[Any, ...]
"""The kind of a leaf (``"tensor"``, ``"trimmed"``, ``"array"``, ``"image"`` or ``"object"``) and what :func:`decode` needs beside
the bytes.
"""


def encode(leaf: Any) -> tuple[Description, np.ndarray | None]:
    """A leaf as a plain description and its bytes ``(n,)`` uint8.

    An object of any other type, and a tensor without strided memory, is ``("object", leaf)`` without bytes.

    >>> encode(torch.tensor([[1, 2]], dtype=torch.int8))
    (('tensor', 'int8', (1, 2), False, None), array([1, 2], dtype=uint8))
    """
    if type(leaf) is torch.Tensor and leaf.layout == torch.strided and leaf.device.type != "meta":
        device = None if leaf.device.type == "cpu" else str(leaf.device)
        described = "tensor", dtype_name(leaf.dtype), tuple(leaf.shape), leaf.requires_grad, device
        return described, tensor_bytes(leaf).numpy()
    if is_array(leaf):
        fortran = bool(leaf.flags.f_contiguous and not leaf.flags.c_contiguous)
        return ("array", leaf.dtype, leaf.shape, fortran), array_bytes(leaf.T if fortran else leaf)
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


def _trimmed(
    dtype: str,
    shape: tuple[int, ...],
    requires_grad: bool,
    device: str | None,
    word: np.dtype[Any],
    bounds: bytes,
    values: bytes,
    data: np.ndarray,
) -> Any:
    runs = Runs(np.frombuffer(bounds, np.int32).reshape(-1, 2), np.frombuffer(values, word).reshape(-1, 4))
    return _tensor(dtype, shape, requires_grad, device, untrim(runs, data, shape))


def _is_here(device: torch.device) -> bool:
    here = torch.accelerator.current_accelerator()
    return here is not None and here.type == device.type and (device.index or 0) < torch.accelerator.device_count()


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool, data: np.ndarray) -> np.ndarray:
    return array_of(data, dtype, shape[::-1]).T if fortran else array_of(data, dtype, shape)


def _image(mode: str, size: tuple[int, int], palette: Palette, info: dict[Any, Any], data: np.ndarray) -> Any:
    image = image_of(data, mode, size, palette)
    image.info = dict(info)
    return image


_DECODERS: dict[str, Callable[..., Any]] = {
    "tensor": _tensor,
    "trimmed": _trimmed,
    "array": _array,
    "image": _image,
}


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


class RaggedColumn(Protocol):
    """B rows that are windows into one tensor, as far as serialization knows them."""

    @property
    def storage(self) -> torch.Tensor: ...
    @property
    def starts(self) -> torch.Tensor: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def distinct(self) -> Self:
        """The same rows over a storage that holds each distinct window once and nothing else."""

    def unbind(self) -> list[torch.Tensor]: ...
    @classmethod
    def windows(cls, storage: torch.Tensor, starts: Any, lengths: Any) -> Self: ...
    @classmethod
    def from_list(cls, rows: Sequence[Any]) -> Self: ...


Ragged = TypeVar("Ragged", bound=type[RaggedColumn])

RAGGED: dict[str, type[RaggedColumn]] = {}
"""Classes of ragged columns, by the name that messages and files know them by."""


def register_ragged(name: str) -> Callable[[Ragged], Ragged]:
    """A class decorator: instances are written as their ``storage``, ``starts`` and ``lengths``, under ``name``."""

    def register(kind: Ragged) -> Ragged:
        RAGGED[name] = kind
        ragged_name.cache_clear()
        return kind

    return register


@functools.cache
def ragged_name(kind: Any) -> str | None:
    """The name under which a class or a base of it is registered; ``None`` if it is not a class of ragged columns."""
    return next((name for name, registered in RAGGED.items() if issubclass(kind, registered)), None)
