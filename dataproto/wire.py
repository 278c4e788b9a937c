"""Batches as bytes: how they are pickled, and how parts of one batch share what they hold.

Pickle finds this by itself, whoever calls it (``pickle``, ``multiprocessing``, Ray). The large parts of a batch are handed over
as the memory they are in: with protocol 5 and a ``buffer_callback`` nothing is copied, without one, once, into the result.

- Each distinct image, tensor and array is written once however many rows hold it, and rows share it again after reading. A tensor
  or array is written alone, not with the storage it looks into; two that show the same memory are written once.
- Tensors and arrays arrive contiguous, on the device they were on where the reader has it, or else on the CPU. Images arrive
  as plain ``PIL.Image.Image`` of the same mode, size, pixels, palette and ``info``.
- What is read out of band is *borrowed*: it is the sender's, or everybody's, memory. No verb writes into it;
  ``DataProto.writable`` makes a copy that may be written.
"""

import contextvars
import math
import pickle
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from dataproto.memory import bytes_of, memory_of
from dataproto.pixels import Palette, image_of, is_image, palette_of, pixels_of
from dataproto.skeleton import is_array, leaf_key, put_together, take_apart

Buffer: TypeAlias = Any  # bytes, bytearray, memoryview, PickleBuffer, or a uint8 array
Form: TypeAlias = tuple[Any, ...]  # a kind of leaf, what describes it, and last its buffer

_SMALL = 1024  # bytes below which what stands inside of objects is written among the containers
_LARGE_ROW = 65536  # bytes from which on rows of ragged tensors are put into a store one by one


class BlobStore(Protocol):
    """Where :func:`shared_blobs` keeps buffers. It is pickled along with the batches, so it must be cheap to pickle."""

    def put(self, buffer: np.ndarray) -> Any:
        """Stores the bytes ``(n,)`` uint8; returns what finds them again, which can be pickled."""

    def get(self, ref: Any) -> Buffer:
        """The bytes that :meth:`put` stored: any object with the buffer protocol, and best without a copy."""


@dataclass
class _Blobs:
    """What has been put into a store: forms by leaf, and the leaves, so that their keys stay theirs."""

    store: BlobStore
    forms: dict[Hashable, Form] = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)


_sharing: contextvars.ContextVar[_Blobs | None] = contextvars.ContextVar("dataproto_blobs", default=None)


@contextmanager
def shared_blobs(store: BlobStore) -> Iterator[None]:
    """Inside, pickling puts each distinct image, tensor and array that stands in objects or ragged rows into ``store``.

    So parts of one batch that are sent one by one send what they share once. Dense columns belong to one part each and travel
    with it. What is put once is not looked at again: it must not be written while this is open. Reading needs nothing but the
    pickled batch, which holds the store and the references. What was read from a store and is sent on into an equal one
    (``==``) is not put again: the reference travels back.

    ::

        with shared_blobs(store):
            sent = [pickle.dumps(part) for part in data.chunk(8)]
    """
    with SharedBlobs(store).open():
        yield


class SharedBlobs:
    """`shared_blobs` that opens more than once, and remembers from one time to the next what has been put.

    ::

        blobs = SharedBlobs(store)  # for one step of a recipe
        with blobs.open():
            sent = pickle.dumps(prompts)
        with blobs.open():
            sent = pickle.dumps(rollouts)  # shows the same images
    """

    def __init__(self, store: BlobStore) -> None:
        self._blobs = _Blobs(store)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, pickling shares; see `shared_blobs`."""
        token = _sharing.set(self._blobs)
        try:
            yield
        finally:
            _sharing.reset(token)


def reduce_batch(data: Any, protocol: int) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns for a batch or an item of one: its class and its three fields."""
    tensors = {} if data.batch is None else dict(data.batch.items())
    arrays = [array for array in data.non_tensor_batch.values() if isinstance(array, np.ndarray)]
    fields = type(data), plain_batch(data.batch), data.non_tensor_batch, data.meta_info
    return reduce_value(fields, [*tensors.values(), *arrays], protocol, _batch)


def _batch(fields: tuple[Any, ...]) -> Any:
    made = object.__new__(fields[0])
    _, made.batch, made.non_tensor_batch, made.meta_info = fields
    return made


def plain_batch(batch: Any) -> TensorDict | None:
    """A batch of any kind of tensor dict as an ordinary one."""
    if batch is None or type(batch) is TensorDict:
        return batch
    return TensorDict(dict(batch.items()), batch_size=batch.batch_size, device=batch.device)


def reduce_value(
    value: Any, columns: Sequence[Any], protocol: int, make: Callable[[Any], Any] | None = None
) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns for an object that is ``value``, or that ``make`` makes of it.

    Args:
        value: containers of anything.
        columns: the tensors and arrays among it that are handed over as buffers however small, and put into no store.
    """
    blobs = _sharing.get()
    skeleton, leaves, ragged = take_apart(value, math.inf if blobs is None else _LARGE_ROW)
    dense = {leaf_key(column) for column in columns} | {leaf_key(leaves[place]) for place in ragged}
    forms = [_encode(leaf, protocol, blobs, leaf_key(leaf) in dense) for leaf in leaves]
    text = pickle.PickleBuffer(skeleton) if protocol >= 5 and len(skeleton) >= _SMALL else skeleton
    return _restore, (make, text, forms, None if blobs is None else blobs.store)


def _restore(make: Any, skeleton: Buffer, forms: list[Form], store: BlobStore | None) -> Any:
    value = put_together(skeleton, [_decode(form, store) for form in forms])
    return value if make is None else make(value)


def copied(value: Any) -> Any:
    """The same containers with tensors, arrays and images in memory of their own, each distinct one copied once."""
    skeleton, leaves, _ = take_apart(value)
    return put_together(skeleton, [_copy(leaf) for leaf in leaves])


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if is_array(leaf) or is_image(leaf) else leaf


# Leaves out


def _encode(leaf: Any, protocol: int, blobs: _Blobs | None, dense: bool) -> Form:
    """Columns are handed over; what stands inside of objects is written in place where small, else put into the store if any."""
    if blobs is not None and not dense and (known := blobs.forms.get(leaf_key(leaf)) or _origin(leaf, blobs.store)):
        return known
    *described, bits = _described(leaf)
    if described == ["object"]:
        return "object", leaf
    if bits.nbytes == 0 or (bits.nbytes < _SMALL and not dense):
        return *described, bits.tobytes()
    if blobs is None or dense:
        return *described, pickle.PickleBuffer(bits) if protocol >= 5 else _Own(bytes_of(bits))
    blobs.leaves.append(leaf)
    return blobs.forms.setdefault(leaf_key(leaf), (*described, _Stored(blobs.store.put(bits))))


@dataclass(frozen=True)
class _Stored:
    """Stands where a buffer would, which is in the store instead."""

    ref: Any


@dataclass(frozen=True)
class _Own:
    """Bytes that were read along with the batch, so that nobody else has them: before protocol 5, all of them."""

    data: bytes


def _described(leaf: Any) -> Form:
    """The form of a leaf, with its bytes ``(n,)`` uint8 in the buffer's place."""
    if type(leaf) is torch.Tensor and leaf.layout == torch.strided and leaf.device.type != "meta":
        return _described_tensor(leaf)
    if is_array(leaf):
        return _described_array(leaf)
    return _described_image(leaf) if is_image(leaf) else ("object", leaf)


def _described_tensor(tensor: torch.Tensor) -> Form:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    bits = plain.view(torch.uint8).numpy() if plain.numel() else np.empty(0, dtype=np.uint8)
    device = None if tensor.device.type == "cpu" else str(tensor.device)
    return "tensor", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.requires_grad, device, bits


def _described_array(array: np.ndarray) -> Form:
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    plain = np.ascontiguousarray(array.T if fortran else array).reshape(-1)
    bits = plain.view(np.uint8) if plain.nbytes else np.empty(0, dtype=np.uint8)
    return "array", array.dtype, array.shape, fortran, bits


def _described_image(image: Any) -> Form:
    return "image", image.mode, image.size, palette_of(image), image.info, pixels_of(image)


# Leaves in


def _decode(form: Form, store: BlobStore | None) -> Any:
    kind, *described, buffer = form
    if not isinstance(buffer, _Stored) or store is None:
        return _MAKERS[kind](*described, buffer)
    leaf = _MAKERS[kind](*described, store.get(buffer.ref))
    _remember(leaf, form, store)
    return leaf


# Leaves that were read from a store, by key, as long as they live: how they are written when they are sent on.
_origins: dict[Hashable, tuple["weakref.ref[Any]", Form, BlobStore]] = {}


def _remember(leaf: Any, form: Form, store: BlobStore) -> None:
    key = leaf_key(leaf)

    def forget(reference: "weakref.ref[Any]") -> None:
        if key in _origins and _origins[key][0] is reference:
            del _origins[key]

    _origins[key] = weakref.ref(leaf, forget), form, store


def _origin(leaf: Any, store: BlobStore) -> Form | None:
    """The form of a leaf that came out of an equal store and is still what it was then."""
    _, form, its_store = _origins.get(leaf_key(leaf), (None, None, None))
    if form is None or its_store != store:
        return None
    if is_image(leaf) and not (leaf.readonly and form[1:-1] == (leaf.mode, leaf.size, palette_of(leaf), leaf.info)):
        return None  # PIL copies a borrowed image when it is written
    return form


def _tensor(
    dtype: str, shape: tuple[int, ...], requires_grad: bool, device: str | None, buffer: Buffer
) -> torch.Tensor:
    bits = _bits(buffer)
    kind: torch.dtype = getattr(torch, dtype)
    tensor = (torch.from_numpy(bits).view(kind) if bits.size else torch.empty(0, dtype=kind)).view(shape)
    if device is not None and _is_here(torch.device(device)):
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor


def _is_here(device: torch.device) -> bool:
    here = torch.accelerator.current_accelerator()
    return here is not None and here.type == device.type and (device.index or 0) < torch.accelerator.device_count()


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool, buffer: Buffer) -> np.ndarray:
    bits = _bits(buffer)
    flat = bits.view(dtype) if bits.size else np.empty(0, dtype=dtype)
    if bits.size and not _is_own(buffer):
        flat.flags.writeable = not memoryview(buffer).readonly
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def _image(mode: str, size: tuple[int, int], palette: Palette, info: dict[Any, Any], buffer: Buffer) -> Any:
    image = image_of(_bits(buffer), mode, size, palette, borrowed=not _is_own(buffer))
    image.info = info
    return image


_MAKERS: dict[str, Callable[..., Any]] = {
    "tensor": _tensor,
    "array": _array,
    "image": _image,
    "object": lambda leaf: leaf,
}


def _is_own(buffer: Buffer) -> bool:
    """Whether bytes came along with the batch, so that nobody else has them; others are borrowed."""
    return isinstance(buffer, _Own) or (isinstance(buffer, bytes) and len(buffer) < _SMALL)


def _bits(buffer: Buffer) -> np.ndarray:
    """The bytes ``(n,)`` uint8 of a buffer, without a copy unless they were written among the containers."""
    if isinstance(buffer, bytes) and _is_own(buffer):
        return np.frombuffer(bytearray(buffer), dtype=np.uint8)
    return memory_of(buffer.data if isinstance(buffer, _Own) else buffer)
