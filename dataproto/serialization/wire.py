"""How batches are pickled, and how messages share images, tensors and arrays.

``pickle``, ``multiprocessing`` and Ray use this through ``__reduce_ex__``. With protocol 5 and a ``buffer_callback`` tensors,
arrays and images are passed as the memory they are in, without a copy; without it they are copied once, into the result.

- Each distinct image, tensor and array is written once, however many rows refer to it, and rows share it again after reading. A
  view is written without the rest of its storage; two tensors or arrays that read the same memory are written once.
- Within `shared_blobs`, whose messages cross processes, a column that is half padding or more is written without it
  (see `encode_column`) and arrives padded, equal to the last bit. Elsewhere columns are passed as they are.
- Tensors and arrays arrive contiguous, on the device they were on if the reader has it, or else on the CPU. Images arrive as
  plain ``PIL.Image.Image`` of the same mode, size, pixels, palette and ``info``.
- Received out-of-band buffers are borrowed: tensors, arrays and images are used where they lie, also in memory that others read.
  Over a read-only buffer arrays are read-only, and an image copies itself on the first write. torch has no read-only tensors: a
  write into a borrowed one would be seen by every reader, so no verb writes into one, and ``DataProto.writable()`` copies.
  In-band data are a copy of the reader's own.
"""

import contextvars
import dataclasses
import functools
import io
import math
import pickle
import uuid
import weakref
from collections import UserDict, UserList
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from dataproto.serialization.buffers import bytes_of, memory_of, same_bytes
from dataproto.serialization.images import is_image
from dataproto.serialization.leaves import RAGGED, Description, decode, encode, encode_column, is_array, leaf_key
from dataproto.tensordict_utils import same_value

Buffer: TypeAlias = Any  # It is bytes, bytearray, memoryview, PickleBuffer, or a uint8 array.
Encoded: TypeAlias = tuple[Description, np.ndarray | None]
Form: TypeAlias = tuple[Any, ...]  # The last item is the buffer of the leaf, and the others describe it.

_SMALL = 1024  # Leaves inside of objects below this many bytes are written in place.
_LARGE_ROW = 65536  # Ragged rows from this many bytes on are put into a store one by one.


class BlobStore(Protocol):
    """Where :func:`shared_blobs` keeps buffers. It is pickled along with the batches, so it must be cheap to pickle."""

    def put(self, buffer: np.ndarray) -> Any:
        """Stores the bytes ``(n,)`` uint8; returns a reference to them that can be pickled."""

    def get(self, ref: Any) -> Buffer:
        """The bytes of a reference, as any object with the buffer protocol, preferably without a copy."""


_sharing: contextvars.ContextVar["SharedBlobs | None"] = contextvars.ContextVar("dataproto_blobs", default=None)


def shared_blobs(store: BlobStore) -> AbstractContextManager[None]:
    """In this context, pickling puts each distinct image, tensor and array inside of objects and ragged rows into ``store``.

    So splits of a batch that are sent one by one send what they share once. Dense columns are sent with their split, without
    padding where that is half of a column or more. Do not write into the batch within the context: what was put is not compared
    again. To read, only the pickled batch is needed, which holds the store and the references. What was read from a store and
    is sent into an equal one (``==``) is compared with its content there, and put again only if it has changed; otherwise its
    reference is sent.

    ::

        with shared_blobs(store):
            sent = [pickle.dumps(part) for part in data.chunk(8)]
    """
    return SharedBlobs(store).open()


@dataclass(eq=False)
class SharedBlobs:
    """`shared_blobs` as a context that opens more than once and remembers what it has put. What has changed is put again.

    ::

        blobs = SharedBlobs(store)  # for one step of a recipe
        with blobs.open():
            sent = pickle.dumps(prompts)
        with blobs.open():
            sent = pickle.dumps(rollouts)  # refers to the same images
    """

    store: BlobStore
    forms: dict[Hashable, Form] = field(default_factory=dict, init=False, repr=False)
    leaves: list[Any] = field(default_factory=list, init=False, repr=False)
    """Those in the store. Keeping them alive keeps their keys unique."""
    compared: dict[Hashable, Form] = field(default_factory=dict, init=False, repr=False)
    """Forms that match the present content of their leaves."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """In this context, pickling shares; see `shared_blobs`."""
        self.compared = {}
        token = _sharing.set(self)
        try:
            yield
        finally:
            _sharing.reset(token)


def reduce_batch(data: Any, protocol: int) -> tuple[Any, ...]:
    """The value of ``__reduce_ex__`` for a batch or an item: its class and its three fields."""
    tensors = {} if data.batch is None else dict(data.batch.items())
    arrays = [array for array in data.non_tensor_batch.values() if isinstance(array, np.ndarray)]
    fields = type(data), plain_batch(data.batch), data.non_tensor_batch, data.meta_info
    return reduce_value(fields, [*tensors.values(), *arrays], protocol, _batch)


def _batch(fields: tuple[Any, ...]) -> Any:
    made = object.__new__(fields[0])
    _, made.batch, made.non_tensor_batch, made.meta_info = fields
    return made


def plain_batch(batch: Any) -> TensorDict | None:
    """Any tensor dict as an ordinary ``TensorDict``."""
    if batch is None or type(batch) is TensorDict:
        return batch
    return TensorDict(dict(batch.items()), batch_size=batch.batch_size, device=batch.device)


def reduce_value(
    value: Any, columns: Sequence[Any], protocol: int, make: Callable[[Any], Any] | None = None
) -> tuple[Any, ...]:
    """The value of ``__reduce_ex__`` for an object that is ``value``, or that ``make`` makes of it.

    Args:
        value: containers of any objects.
        columns: tensors and arrays in it that become buffers of any size, in `shared_blobs` without their padding, and are not
            put into a store.
    """
    blobs = _sharing.get()
    skeleton, leaves, ragged = take_apart(value, math.inf if blobs is None else _LARGE_ROW)
    dense: dict[Hashable, Callable[[Any], Encoded]] = {leaf_key(leaves[place]): encode for place in ragged}
    dense.update((leaf_key(column), encode if blobs is None else encode_column) for column in columns)
    forms = [_encode(leaf, protocol, blobs, dense.get(leaf_key(leaf))) for leaf in leaves]
    text = pickle.PickleBuffer(skeleton) if protocol >= 5 and len(skeleton) >= _SMALL else skeleton
    return _restore, (make, text, forms, None if blobs is None else blobs.store)


def _restore(make: Any, skeleton: Buffer, forms: list[Form], store: BlobStore | None) -> Any:
    reading = _Reading(store)
    value = put_together(skeleton, [reading.leaf(form) for form in forms])
    return value if make is None else make(value)


def copied(value: Any) -> Any:
    """A copy of the containers, and of their tensors, arrays and images, each distinct one once."""
    skeleton, leaves, _ = take_apart(value)
    return put_together(skeleton, [_copy(leaf) for leaf in leaves])


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if is_array(leaf) or is_image(leaf) else leaf


# Writing leaves


def _encode(leaf: Any, protocol: int, blobs: SharedBlobs | None, dense: Callable[[Any], Encoded] | None) -> Form:
    """Columns become buffers, by the encoder ``dense``. Leaves inside of objects are written in place if small, else put into the
    store if there is one.
    """
    blobs = blobs if dense is None else None
    if blobs is not None and (compared := _compared(leaf, blobs)):
        return compared
    described, bits = (dense or encode)(leaf)
    if bits is None:
        return described
    if bits.nbytes == 0 or (bits.nbytes < _SMALL and dense is None):
        return *described, bits.tobytes()
    if blobs is None:
        memory: Any = bits
        return *described, pickle.PickleBuffer(memory) if protocol >= 5 else bytes_of(bits)
    return _stored(leaf, described, bits, blobs)


def _compared(leaf: Any, blobs: SharedBlobs) -> Form | None:
    """The form of a leaf that was put into the store, or compared with its content there, since the context was opened."""
    key = leaf_key(leaf)
    form = blobs.compared.get(key)
    return form if form is blobs.forms.get(key) or form is _origin(key, blobs.store) else None


def _stored(leaf: Any, described: Description, bits: np.ndarray, blobs: SharedBlobs) -> Form:
    """The form of a leaf in the store; puts the leaf there unless the store has its present content."""
    key = leaf_key(leaf)
    for form in (blobs.forms.get(key), _origin(key, blobs.store)):
        if form is not None and _holds(form, described, bits, blobs.store):
            break
    else:
        blobs.leaves.append(leaf)
        form = blobs.forms[key] = (*described, _Stored(blobs.store.put(bits)))
    blobs.compared[key] = form  # A new leaf may be at the address of one that is gone.
    return form


def _holds(form: Form, described: Description, bits: np.ndarray, store: BlobStore) -> bool:
    """Whether the content in the store is the present content of the leaf."""
    return same_value(form[:-1], described) and same_bytes(bits, store.get(form[-1].ref))


@dataclass(frozen=True)
class _Stored:
    """A reference to a buffer in the store."""

    ref: Any
    put: bytes = field(default_factory=lambda: uuid.uuid4().bytes)
    """Identifies the call of ``put``: a store may return one reference for equal bytes."""


# Reading leaves


class _Reading:
    """Reads the leaves of one message. A leaf that was put into the store once becomes one object."""

    def __init__(self, store: BlobStore | None) -> None:
        self._store = store
        self._stored: dict[bytes, Any] = {}

    def leaf(self, form: Form) -> Any:
        *described, buffer = form
        if not isinstance(buffer, _Stored) or self._store is None:
            return self._made(described, buffer)
        if buffer.put not in self._stored:
            leaf = self._stored[buffer.put] = self._made(described, memoryview(self._store.get(buffer.ref)))
            _remember(leaf, (*described, buffer), self._store)  # The form is new: identical forms mean the same leaf.
        return self._stored[buffer.put]

    def _made(self, described: list[Any], buffer: Buffer) -> Any:
        if described[0] == "object":
            return buffer
        own = isinstance(buffer, bytes | bytearray)  # in the pickle itself, which no other reader shares
        bits = np.frombuffer(buffer, dtype=np.uint8)
        if isinstance(buffer, bytes) and len(buffer) < _SMALL:  # Python may share short bytes among equal ones.
            bits = bits.copy()
        elif own or described[0] != "array":
            bits = memory_of(buffer)
        leaf = decode(described, bits)
        if described[0] == "image" and not own:
            leaf.readonly = 1  # Others may use the memory: PIL copies it on the first write.
        return leaf


# These are the forms, by key, of leaves that were read from a store and still live: their references are sent again.
_origins: dict[Hashable, tuple["weakref.ref[Any]", Form, BlobStore]] = {}


def _remember(leaf: Any, form: Form, store: BlobStore) -> None:
    key = leaf_key(leaf)

    def forget(reference: "weakref.ref[Any]") -> None:
        if key in _origins and _origins[key][0] is reference:
            del _origins[key]

    _origins[key] = weakref.ref(leaf, forget), form, store


def _origin(key: Hashable, store: BlobStore) -> Form | None:
    """The form of a leaf that was read from an equal store. The leaf may have changed since."""
    _, form, its_store = _origins.get(key, (None, None, None))
    return form if form is not None and its_store == store else None


# Containers and leaves
#
# Containers (dicts, lists, tuples, sets, arrays of objects, ...) and plain values become bytes, written by pickle. Tensors,
# arrays, images and all other objects become a list of leaves. An object that occurs in many places is one leaf and, put together
# again, one object. The bytes can call the functions of this module in `_NAMES` and no others, whoever wrote them.

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
        if isinstance(value, tuple(RAGGED)):
            return self._ragged(value)
        if isinstance(value, torch.Tensor) and value.layout == torch.jagged:
            parts: Any = value
            return _jagged, (parts.values(), parts.offsets(), parts.lengths(), parts._ragged_idx)
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

    def _ragged(self, value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if len(value) and value.nbytes >= self._row_bytes * len(value):
            return _ragged_rows, (value.unbind(),)
        kept = value.distinct()
        self.ragged.add(self._place(kept.storage))
        return _ragged, (kept.storage, kept.starts.numpy(), kept.lengths.numpy())


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
    raise NotImplementedError  # It is only a name: the reader accesses its list of leaves instead.


def _objects(shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, dtype=object)


def _fill(array: np.ndarray, items: list[Any]) -> None:
    flat = array.reshape(-1)
    for place, item in enumerate(items):
        flat[place] = item


def _ragged(storage: torch.Tensor, starts: np.ndarray, lengths: np.ndarray) -> Any:
    return RAGGED[0].windows(storage, starts, lengths)


def _ragged_rows(rows: list[torch.Tensor]) -> Any:
    return RAGGED[0].from_list(rows)


def _tensordict(items: dict[str, Any], batch_size: tuple[int, ...], device: torch.Tensor | None) -> TensorDict:
    return TensorDict(items, batch_size=batch_size, device=None if device is None else device.device)


def _jagged(values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, dim: int) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim)


_NAMES = {made.__name__: made for made in (_leaf, _objects, _fill, _ragged, _ragged_rows, _tensordict, _jagged)}
_OWN = frozenset(_NAMES.values())
