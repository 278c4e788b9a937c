"""A batch as one file that loads without running code.

The file is torch's (``torch.save``): plain values and tensors, which `torch.load` reads with ``weights_only``. What they do not
hold is a tuple of a tag and plain values in the file: arrays, ragged tensors, images (as PNG), and tuples themselves. An object
that many rows share is written once and shared again after loading. Objects of other types need pickle, when saving and when
loading.

Tensors and arrays stay in the file until they are used. Every load compares the description of the batch with its CRC-32; with
``verify=True`` all of the file. A checksum finds damage but not malice.
"""

import base64
import os
import pickle
import re
import stat
import uuid
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from dataproto.errors import FileFormatError
from dataproto.serialization import images
from dataproto.serialization.buffers import memory_of
from dataproto.serialization.leaves import RAGGED, array_bytes, array_of, leaf_key, ragged_name, tensor_bytes
from dataproto.tensordict_utils import nested_tensor_from_tensor_list, object_array

Made = TypeVar("Made")
Path: TypeAlias = str | os.PathLike[str]

FORMAT, VERSION = "dataproto", "3"
_PLAIN = {type(None), bool, int, float, str}
_ARRAY_KINDS = "biufSU"
_ARRAY_DTYPE = re.compile(rf"[<>|][{_ARRAY_KINDS}]\d{{1,9}}")


def save(
    path: Path,
    batch: TensorDict | None,
    non_tensor_batch: Mapping[str, Any],
    meta_info: Mapping[str, Any],
    allow_pickle: bool = False,
) -> None:
    """Writes a batch; replaces an earlier file of that name when all is written. Does not wait for the disk (``fsync``).

    Raises:
        FileFormatError: an object is of a type that only pickle can store; names its place.
    """
    writer = _Writer(allow_pickle)
    temporary = f"{os.fspath(path)}.{uuid.uuid4().hex}.tmp"
    try:
        written = {
            "format": FORMAT,
            "version": VERSION,
            "batch": writer.node(batch),
            "columns": {name: writer.at("column", name, column) for name, column in non_tensor_batch.items()},
            "meta_info": writer.at("field", "meta_info", dict(meta_info)),
        }
        with open(temporary, "xb") as file:
            torch.save(written, file)
        os.replace(temporary, path)
    except RecursionError as error:
        raise FileFormatError("a value contains itself, or is nested too deeply to be written") from error
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def load(path: Path, make: Callable[[Any, Any, Any], Made], allow_pickle: bool = False, verify: bool = False) -> Made:
    """Reads a file of :func:`save` and returns ``make(batch, non_tensor_batch, meta_info)``.

    Tensors and arrays are in mapped memory: they are read when they are used, and writes into them are private to the process and
    never reach the file. While they are in use the file may be replaced (as :func:`save` does), but not truncated.

    Args:
        allow_pickle: also read pickled objects, which may run code; only for trusted files.
        verify: read everything now and compare it with the checksums.

    Raises:
        FileFormatError: the file is damaged, of another format or version, or has pickled objects without ``allow_pickle``.
        OSError: the file cannot be opened.
    """
    try:
        found = _read(path, verify)
        reader = _Reader(allow_pickle)
        columns = {name: reader.value(node) for name, node in found["columns"].items()}
        return make(reader.value(found["batch"]), columns, dict(reader.value(found["meta_info"])))
    except FileFormatError as error:
        raise FileFormatError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        if error.filename is not None:
            raise
        raise FileFormatError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # A damaged or hostile file may cause anything.
        reason = str(error).partition("\n")[0][:300]
        hint = "only files written by save_to_disk can be read (not pickles, which would run code)"
        raise FileFormatError(
            f"{path} is damaged or of another format: {type(error).__name__}: {reason}; {hint}"
        ) from error


def _read(path: Path, verify: bool) -> dict[str, Any]:
    """The plain values and tensors of a file, whose checksums hold."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # A pipe would block, and a device would never end.
        raise FileFormatError("it is not an ordinary file")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist() if verify else [name for name in archive.namelist() if name.endswith("/data.pkl")]
        for name in names:
            with archive.open(name) as section:
                while section.read(1 << 20):  # Raises at its end if its CRC-32 is another one.
                    pass
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FileFormatError("it was not written by save_to_disk")
    if (version := found.get("version")) != VERSION:
        raise FileFormatError(f"it has version {version!r}; this library reads {VERSION!r}")
    return found


# Values as nodes, and back
#
# A node is a plain value, a list or a dict of nodes, a dense tensor, or for any other value a tuple of a tag and what it is made
# of. The node of an object that occurs again is the same object, so that the file has it once.


class _Writer:
    """Values to nodes."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._nodes: dict[Any, Any] = {}  # The node of each value, by its identity.
        self._alive: list[Any] = []  # The values: while they live, identities stay unique.
        self._path: list[Any] = []

    def node(self, value: Any) -> Any:
        """The node of a value. Raises FileFormatError for an object that only pickle can store; names its place."""
        if type(value) in _PLAIN:
            return value
        if (key := leaf_key(value)) not in self._nodes:
            self._nodes[key] = self._made(value)
            self._alive.append(value)
        return self._nodes[key]

    def at(self, kind: str, name: Any, value: Any) -> Any:
        """The node of a value one step deeper. The path, for messages, is not reset on an error."""
        self._path.append((kind, name))
        node = self.node(value)
        self._path.pop()
        return node

    def _made(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind is list:
            return [self.at("item", place, item) for place, item in enumerate(value)]
        if kind is dict:
            return {self._key(key): self.at("key", key, item) for key, item in value.items()}
        if kind is tuple:
            return "tuple", *(self.at("item", place, item) for place, item in enumerate(value))
        if kind is bytes or (isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS):
            return self._key(value)
        if isinstance(value, Tensor) and value.layout == torch.jagged:
            return "nested", [self.at("row", *each) for each in enumerate(value.unbind())]
        if isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_nested or value.is_meta):
            return _stored(value)
        if (name := ragged_name(kind)) is not None and kind is RAGGED[name]:
            kept = value.distinct()
            return name, self.node(kept.storage), _stored(kept.starts), _stored(kept.lengths)
        if kind is TensorDict:
            columns = {name: self.at("column", name, column) for name, column in value.items()}
            return "tensordict", columns, list(value.batch_size), value.device is not None
        if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS and value.dtype.itemsize:
            return "array", value.dtype.str, list(value.shape), torch.from_numpy(array_bytes(value).copy())
        if kind is np.ndarray and value.dtype == object:
            items = [self.at("row", row, item) for row, item in enumerate(value.reshape(-1).tolist())]
            return "objects", list(value.shape), items
        if images.is_image(value):
            described, data, info = images.encode_image(value)
            return "image", described, self.node(info), _bytes_tensor(data)
        if self._allow_pickle:
            return "pickle", _bytes_tensor(pickle.dumps(value, protocol=5))
        raise self._refusal(value, f"of dtype {value.dtype}" if isinstance(value, np.ndarray) else "")

    def _key(self, value: Any) -> Any:
        """The node of a key of a dict, which can be hashed."""
        if type(value) in _PLAIN:
            return value
        if type(value) is tuple:
            return "tuple", *map(self._key, value)
        if type(value) is bytes:
            return "bytes", base64.b64encode(value).decode()
        if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            return "scalar", value.dtype.str, base64.b64encode(value.tobytes()).decode()
        raise self._refusal(value, "as a key")

    def _refusal(self, value: Any, role: str) -> FileFormatError:
        where = ", ".join(f"{kind} {name!r}" for kind, name in self._path) or "the batch"
        what = f"{type(value).__name__} {role}".rstrip()
        return FileFormatError(f"{where} holds a {what}, which only pickle can store: give allow_pickle=True")


def _stored(tensor: Tensor) -> Tensor:
    """The tensor as it is written: torch would write all of the memory that it is a part of."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(memory_of(data)) if data else torch.empty(0, dtype=torch.uint8)


class _Reader:
    """The inverse of `_Writer`; raises FileFormatError, or what Python, numpy and torch raise for invalid nodes."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._made: dict[int, Any] = {}  # The value of each list, dict and tuple, by the identity of its node.

    def value(self, node: Any) -> Any:
        """The value of a node."""
        if type(node) not in (list, dict, tuple):
            return node
        if id(node) not in self._made:
            self._made[id(node)] = self._value(node)
        return self._made[id(node)]

    def _value(self, node: Any) -> Any:
        if type(node) is list:
            return [self.value(item) for item in node]
        if type(node) is dict:
            return {self.value(key): self.value(item) for key, item in node.items()}
        tag, *parts = node
        if tag == "tuple":
            return tuple(self.value(part) for part in parts)
        if tag == "bytes":
            return base64.b64decode(parts[0])
        if tag == "scalar":
            data = np.frombuffer(base64.b64decode(parts[1]), dtype=np.uint8)
            return _array(parts[0], data, [])[()] if len(data) else np.zeros((), _dtype(parts[0]))[()]
        if tag == "nested":
            return nested_tensor_from_tensor_list([self.value(row) for row in parts[0]])
        if tag == "objects":
            return object_array([self.value(item) for item in parts[1]]).reshape(parts[0])
        if tag == "tensordict":
            columns, size, on_device = parts
            return TensorDict(self.value(columns), batch_size=size, device="cpu" if on_device else None)
        return self._large(tag, parts)

    def _large(self, tag: Any, parts: list[Any]) -> Any:
        if tag in RAGGED:
            return RAGGED[tag].windows(*parts)
        if tag == "array":
            dtype, shape, data = parts
            return _array(dtype, tensor_bytes(data).numpy(), shape)
        if tag == "image":
            described, info, data = parts
            return images.decode_image(described, tensor_bytes(data).numpy().data, self.value(info))
        if tag == "pickle":
            if not self._allow_pickle:
                raise FileFormatError(
                    "it holds pickled objects, which may run code: give allow_pickle=True to trust it"
                )
            return pickle.loads(tensor_bytes(parts[0]).numpy().data)
        raise FileFormatError(f"unknown kind of value {tag!r:.100}")


def _array(name: Any, data: np.ndarray, shape: list[int]) -> np.ndarray:
    """An array over ``data (n,)`` uint8; FileFormatError for elements without bytes, and characters that Python refuses."""
    dtype = _dtype(name)
    if not dtype.itemsize:  # Numpy would allocate one byte for each claimed element.
        raise FileFormatError("elements of an array take no bytes")
    if dtype.kind == "U" and len(data) and data.view(f"{dtype.str[0]}u4").max() > 0x10FFFF:
        raise FileFormatError("a text array holds an invalid character")
    return array_of(data, dtype, shape)


def _dtype(name: Any) -> np.dtype[Any]:
    """A plain numpy dtype from its name: never one of objects."""
    if not _ARRAY_DTYPE.fullmatch(name):
        raise FileFormatError(f"{name!r:.100} is not a plain array's dtype")
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype
