"""A batch as one file that loads without running code.

The format is safetensors. Tensors, arrays, images (as PNG) and long byte strings are sections; the section ``header`` is JSON: a
tree of plain values that describes the batch and names its sections. An object that many rows share is written once and shared
again after loading. Objects of other types need pickle, when saving and when loading.

The metadata of the file holds a CRC-32 of each section, and one of all names, dtypes and shapes. Every load checks the latter and
those of the header, images, byte strings and the lengths of ragged rows. Tensors and arrays stay in the file until they are used;
with ``verify=True`` their CRC-32 is checked too. A checksum finds damage but not malice. Therefore each claim of the header is
checked before memory is allocated for it: loading takes at most about 350 times the size of the file (for blank images, and far
less for other content).
"""

import base64
import json
import math
import os
import pickle
import re
import stat
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor

from dataproto.errors import FileFormatError, undoing
from dataproto.serialization import images
from dataproto.serialization.buffers import memory_of
from dataproto.serialization.leaves import RAGGED, array_bytes, array_of, dtype_name, leaf_key, tensor_bytes
from dataproto.tensordict_utils import nested_tensor_from_tensor_list, object_array

Made = TypeVar("Made")
Path: TypeAlias = str | os.PathLike[str]

FORMAT, VERSION = "dataproto", "2"
_JSON = {type(None), bool, int, str}
_ARRAY_KINDS = "biufSU"
_ARRAY_DTYPE = re.compile(rf"[<>|][{_ARRAY_KINDS}]\d{{1,9}}")
_INLINE_BYTES = 64
_RESERVED = {"", "__metadata__", "header"}
_MOST_SECTIONS = 300_000
"""Of which the names and checksums fit into the head of a safetensors file, which may have 100 MB."""
_NUMBERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
_NUMBERS += [torch.uint64, torch.float16, torch.float32, torch.float64]
_DTYPES = {*_NUMBERS, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
"""Those of safetensors files."""
_OF_ARRAYS = {np.dtype(dtype_name(dtype)).newbyteorder("<") for dtype in _NUMBERS}
"""Those in which an array is a section; another one is a section of bytes."""


def save(
    path: Path,
    batch: TensorDict | None,
    non_tensor_batch: Mapping[str, Any],
    meta_info: Mapping[str, Any],
    allow_pickle: bool = False,
) -> None:
    """Writes a batch; replaces an earlier file of that name when all is written.

    Raises:
        FileFormatError: an object is of a type that only pickle can store; names its place.
    """
    writer = Writer(allow_pickle)
    try:
        header = {
            "batch": writer.tree(batch),
            "non_tensor_batch": [
                [name, writer.at("column", name, column)] for name, column in non_tensor_batch.items()
            ],
            "meta_info": writer.at("field", "meta_info", dict(meta_info)),
        }
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    except RecursionError as error:
        raise FileFormatError("a value contains itself, or is nested too deeply to be written") from error
    except ValueError as error:  # An integer has more digits than Python converts.
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"a value cannot be written: {error}") from error
    write_sections(path, {"header": _bytes_tensor(text), **writer.sections})


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
        opened = Sections(path, verify)
        header = json.loads(opened.checked("header").tobytes())
        reader = Reader(opened, allow_pickle)
        batch = reader.tree(header["batch"])
        arrays = reader.columns(header["non_tensor_batch"])
        meta_info = reader.tree(header["meta_info"])
        opened.finish()
        if not isinstance(meta_info, dict):
            raise FileFormatError("meta_info is not a dict")
        return make(batch, arrays, meta_info)
    except (FileFormatError, OSError) as error:
        if getattr(error, "filename", None) is not None:
            raise
        raise FileFormatError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # A damaged or hostile file may cause anything.
        hint = "only files written by save_to_disk can be read (not pickles, which would run code)"
        raise FileFormatError(
            f"{path} is damaged or of another format: {type(error).__name__}: {str(error)[:300]}; {hint}"
        ) from error


# Sections: tensors by their names in a safetensors file


def write_sections(path: Path, sections: Mapping[str, Tensor]) -> None:
    """Writes a file, and replaces an earlier one of that name when all is written. Does not wait for the disk (``fsync``)."""
    if len(sections) > _MOST_SECTIONS:
        raise FileFormatError(f"{len(sections)} distinct objects are more than one file can hold: split the batch")
    checksums = {name: zlib.crc32(tensor_bytes(each).numpy().data) for name, each in sections.items()}
    metadata = {"format": FORMAT, "version": VERSION, "checksums": json.dumps([_described(sections), checksums])}
    temporary = f"{os.fspath(path)}.{uuid.uuid4().hex}.tmp"
    with open(temporary, "xb"), undoing(lambda: os.remove(temporary)):
        save_file(dict(sections), temporary, metadata)
        os.replace(temporary, path)


def _described(sections: Mapping[str, Tensor]) -> int:
    """The CRC-32 of all names, dtypes and shapes."""
    described = [f"{name} {each.dtype} {tuple(each.shape)}" for name, each in sorted(sections.items())]
    return zlib.crc32("\n".join(described).encode())


class Sections:
    """An open file. Its tensors lie in mapped memory: pages are read when touched, and private once written."""

    def __init__(self, path: Path, verify: bool) -> None:
        """Raises FileFormatError for what `write_sections` did not write, and with ``verify`` where a section has changed."""
        if not stat.S_ISREG(os.stat(path).st_mode):  # A pipe would block, and a device would never end.
            raise FileFormatError("it is not an ordinary file")
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise FileFormatError("it was not written by save_to_disk")
            if (version := metadata.get("version")) != VERSION:
                raise FileFormatError(f"it has version {version!r}; this library reads {VERSION!r}")
            self._tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            described, self._checksums = json.loads(metadata["checksums"])
            if described != _described(self._tensors):
                raise FileFormatError("its head does not match its checksum")
        for name in list(self._tensors) if verify else ():
            self._check(name, self._tensors[name])

    def _check(self, name: str, section: Tensor) -> np.ndarray:
        data = tensor_bytes(section).numpy()
        if zlib.crc32(data.data) != self._checksums[name]:
            raise FileFormatError("a section does not match its checksum")
        return data

    def take(self, name: str) -> Tensor:
        """A section by its name, at most once: rows that share an object refer to the object, not to its section.

        Raises:
            FileFormatError: there is no such section, or it was taken before.
        """
        if name not in self._tensors:
            raise FileFormatError(f"section {name!r} is absent or used twice")
        return self._tensors.pop(name)

    def checked(self, name: str) -> np.ndarray:
        """The bytes ``(n,)`` uint8 of a section; FileFormatError also where they do not match their checksum."""
        return self._check(name, self.take(name))

    def finish(self) -> None:
        """Raises FileFormatError if sections are left that were not taken."""
        if self._tensors:
            raise FileFormatError(f"nothing uses section {min(self._tensors)!r}")


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(memory_of(data)) if data else torch.empty(0, dtype=torch.uint8)


# Values as nodes of JSON, and back
#
# A node is a plain JSON value, or ``{"$": kind, ...}`` for values that JSON lacks. Tensors, arrays, images and long byte strings
# are sections of the file, which the node names. Every value that is not a scalar gets a number when it is complete, in reading
# as in writing; ``{"$": "ref", "n": number}`` refers to it where the same object occurs again.


class Writer:
    """Values to nodes. Large values go to ``sections``."""

    def __init__(self, allow_pickle: bool) -> None:
        self.sections: dict[str, Tensor] = {}
        self._storages: set[int] = set()
        self._allow_pickle = allow_pickle
        self._numbers: dict[Any, int] = {}  # The number of each value, by its identity.
        self._alive: list[Any] = []  # The values by number: while they live, identities stay unique.
        self._path: list[Any] = []

    def tree(self, value: Any) -> Any:
        """The node of a value.

        Raises:
            FileFormatError: an object in it is of a type that only pickle can store; names its place.
        """
        kind = type(value)
        if kind in _JSON:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if (kind is bytes and len(value) <= _INLINE_BYTES) or _is_plain_scalar(value):
            return _scalar_node(value)
        if (number := self._numbers.get(identity := leaf_key(value))) is not None:
            return {"$": "ref", "n": number}
        node = self._node(value)
        self._numbers[identity] = len(self._alive)
        self._alive.append(value)
        return node

    def _node(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            kinds = set(map(type, value))
            if kinds <= _JSON or (kinds == {float} and all(map(math.isfinite, value))):
                return value
            return [self.at("item", number, item) for number, item in enumerate(value)]
        if kind is dict:
            if all(type(key) is str for key in value) and "$" not in value:
                return {key: self.at("key", key, item) for key, item in value.items()}
            items = [[self._key(key), self.at("key", key, item)] for key, item in value.items()]
            return {"$": "dict", "items": items}
        if kind is tuple:
            return {"$": "tuple", "items": [self.at("item", number, item) for number, item in enumerate(value)]}
        return self._large(value)

    def at(self, kind: str, name: Any, value: Any) -> Any:
        """The node of a value one step deeper. The path, for messages and names, is not reset on an error."""
        if type(value) in _JSON:
            return value
        self._path.append((kind, name))
        node = self.tree(value)
        self._path.pop()
        return node

    def _key(self, value: Any) -> Any:
        """The node of a key: complete, without references, so that it is cheap to hash."""
        kind = type(value)
        if kind is tuple:
            return {"$": "tuple", "items": [self._key(item) for item in value]}
        if kind in _JSON or kind is float:
            return self.tree(value)
        if kind is bytes or _is_plain_scalar(value):
            return _scalar_node(value)
        raise self._refusal(value, "as a key")

    def _large(self, value: Any) -> dict[str, Any]:
        kind: Any = type(value)
        if isinstance(value, torch.Tensor) and value.layout == torch.jagged:
            rows = [self.at("row", *each) for each in enumerate(value.unbind())]
            return {"$": "nested", "layout": "jagged", "rows": rows}
        plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
        if plain and not value.is_meta and value.dtype in _DTYPES:
            return {"$": "tensor", "data": self._add(value)}
        if kind in RAGGED:
            return self._ragged(value)
        if kind is TensorDict:
            columns = [[name, self.at("column", name, column)] for name, column in value.items()]
            size = list(value.batch_size)
            return {"$": "tensordict", "size": size, "on_device": value.device is not None, "columns": columns}
        if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS and value.dtype.itemsize:
            return self._array(value)
        if kind is np.ndarray and value.dtype == object:
            items = [self.at("row", row, item) for row, item in enumerate(value.reshape(-1).tolist())]
            return {"$": "objects", "shape": list(value.shape), "items": items}
        if images.is_image(value):
            described, data, info = images.encode_image(value)
            return {"$": "image", **described, "info": self.tree(info), "data": self._add_bytes(data)}
        if kind is bytes:
            return {"$": "bytes", "data": self._add_bytes(value)}
        if self._allow_pickle:
            return {"$": "pickle", "data": self._add_bytes(pickle.dumps(value, protocol=5))}
        raise self._refusal(value, f"of dtype {value.dtype}" if isinstance(value, torch.Tensor | np.ndarray) else "")

    def _ragged(self, value: Any) -> dict[str, Any]:
        kept = value.distinct()
        node = {"$": "ragged", "values": self.tree(kept.storage)}
        for name in ("starts", "lengths"):
            node[name] = self._add(getattr(kept, name), name)
        return node

    def _array(self, value: np.ndarray) -> dict[str, Any]:
        kept = np.ascontiguousarray(value) if value.dtype in _OF_ARRAYS else array_bytes(value)
        data = self._add(torch.from_numpy(kept if kept.flags.writeable else kept.copy()))
        return {"$": "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}

    def _add_bytes(self, data: bytes) -> str:
        return self._add(_bytes_tensor(data))

    def _add(self, value: Tensor, suffix: str | None = None) -> str:
        """Adds a section, named after its column or else numbered, and returns the name."""
        name = "/".join(filter(None, [*(str(step) for _, step in self._path), suffix]))
        is_column = all(kind == "column" for kind, _ in self._path) and name.isprintable() and name not in _RESERVED
        if not is_column or name in self.sections or name.startswith("objects/"):
            name = f"objects/{len(self.sections)}"
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in self._storages:
            plain = plain.clone()  # Sections of a safetensors file may share no memory.
        self._storages.add(plain.untyped_storage().data_ptr())
        self.sections[name] = plain
        return name

    def _refusal(self, value: Any, role: str = "") -> FileFormatError:
        where = ", ".join(f"{kind} {name!r}" for kind, name in self._path) or "the batch"
        what = " ".join(filter(None, [type(value).__name__, role]))
        return FileFormatError(f"{where} holds a {what}, which only pickle can store: give allow_pickle=True")


def _is_plain_scalar(value: Any) -> bool:
    return isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS


def _scalar_node(value: Any) -> dict[str, Any]:
    if type(value) is bytes:
        return {"$": "bytes", "value": base64.b64encode(value).decode()}
    return {"$": "scalar", "dtype": value.dtype.str, "value": base64.b64encode(value.tobytes()).decode()}


class Reader:
    """The inverse of :class:`Writer`; checks each claim of a node before it allocates memory."""

    def __init__(self, sections: Sections, allow_pickle: bool) -> None:
        self._sections = sections
        self._allow_pickle = allow_pickle
        self._made: list[Any] = []  # The values by number.

    def tree(self, node: Any) -> Any:
        """The value of a node; raises FileFormatError, or what Python, numpy and torch raise for invalid values."""
        kind = type(node)
        if kind is not list and kind is not dict:
            return node
        tag = node.get("$") if kind is dict else None
        if tag in _SCALARS and "data" not in node:
            return _scalar(tag, node["value"], node)
        if tag == "ref":
            if type(node["n"]) is not int or node["n"] < 0:
                raise FileFormatError("a reference to nothing")
            return self._made[node["n"]]
        value = self._value(tag, node)
        self._made.append(value)
        return value

    def columns(self, nodes: Any) -> dict[str, Any]:
        """The values of pairs of a name and a node; raises FileFormatError if a name occurs twice or is not a string."""
        found = {name: self.tree(node) for name, node in nodes}
        if len(found) != len(nodes) or not all(type(name) is str for name in found):
            raise FileFormatError("the name of a column occurs twice, or is not a string")
        return found

    def _value(self, tag: Any, node: Any) -> Any:
        if type(node) is list:
            return [item if type(item) in _JSON else self.tree(item) for item in node]
        if "$" not in node:
            return {key: item if type(item) in _JSON else self.tree(item) for key, item in node.items()}
        if tag == "dict":
            keys = [_key(key) for key, _ in node["items"]]
            _check_keys(keys)
            return dict(zip(keys, [self.tree(item) for _, item in node["items"]]))
        if tag == "tuple":
            return tuple(self.tree(item) for item in node["items"])
        if tag == "objects":
            return object_array([self.tree(item) for item in node["items"]]).reshape(_shape(node["shape"]))
        if tag == "tensordict":
            columns = self.columns(node["columns"])
            if not all(isinstance(column, torch.Tensor | TensorDict) for column in columns.values()):
                raise FileFormatError("a column of the batch is not a tensor")
            return TensorDict(columns, batch_size=_shape(node["size"]), device="cpu" if node["on_device"] else None)
        return self._large(tag, node)

    def _large(self, tag: Any, node: dict[str, Any]) -> Any:
        if tag == "tensor":
            return self._sections.take(node["data"])
        if tag == "nested" and node["layout"] == "jagged":
            return nested_tensor_from_tensor_list([self.tree(row) for row in node["rows"]])
        if tag == "ragged":
            return self._ragged(node)
        if tag == "array":
            dtype = _dtype(node["dtype"])
            if dtype.itemsize == 0:  # Numpy would allocate one byte for each claimed element.
                raise FileFormatError("elements of an array take no bytes")
            data = self._bytes(node) if dtype.kind == "U" else tensor_bytes(self._sections.take(node["data"])).numpy()
            _check_text(data, dtype)
            return array_of(data, dtype, _shape(node["shape"]))
        if tag == "image":
            return images.decode_image(node, self._bytes(node).data, self.tree(node["info"]))
        if tag == "bytes":
            return bytes(self._bytes(node))
        if tag == "pickle":
            if not self._allow_pickle:
                raise FileFormatError(
                    "it holds pickled objects, which may run code: give allow_pickle=True to trust it"
                )
            return pickle.loads(self._bytes(node).data)
        raise FileFormatError(f"unknown kind of value {tag!r:.100}")

    def _bytes(self, node: dict[str, Any]) -> np.ndarray:
        return self._sections.checked(node["data"])

    def _ragged(self, node: dict[str, Any]) -> Any:
        values = self.tree(node["values"])
        starts, lengths = (self._sections.checked(node[name]).view("<i8") for name in ("starts", "lengths"))
        return RAGGED[0].windows(values, starts, lengths)


def _shape(given: Sequence[Any]) -> tuple[int, ...]:
    """A shape that a file claims; FileFormatError where it is none."""
    if not all(type(dim) is int and dim >= 0 for dim in given):
        raise FileFormatError(f"{given!r:.200} is not a shape")
    return tuple(given)


_SCALARS = {"float", "bytes", "scalar"}


def _scalar(tag: str, value: Any, node: dict[str, Any]) -> Any:
    if tag == "float":
        return float(value)
    raw = base64.b64decode(value)
    if tag == "bytes":
        return raw
    dtype = _dtype(node["dtype"])
    if len(raw) != dtype.itemsize:
        raise FileFormatError(f"{len(raw)} bytes do not make a {dtype}")
    _check_text(raw, dtype)
    return np.frombuffer(raw, dtype=dtype)[0] if raw else np.zeros((), dtype)[()]


def _key(node: Any) -> Any:
    if type(node) in _JSON or type(node) is float:
        return node
    if node["$"] == "tuple":
        return tuple(_key(item) for item in node["items"])
    if node["$"] not in _SCALARS:
        raise FileFormatError("a key of a dict is not plain")
    return _scalar(node["$"], node["value"], node)


def _check_keys(keys: list[Any]) -> None:
    """Raises FileFormatError if keys repeat, or if so many share a hash that a dict would take very long."""
    if len(keys) > 1000 and 4 * len(set(map(hash, keys))) < len(keys):
        raise FileFormatError("too many keys have the same hash")
    if len(set(keys)) != len(keys):
        raise FileFormatError("a key occurs twice")


def _check_text(data: bytes | np.ndarray, dtype: np.dtype[Any]) -> None:
    if dtype.kind == "U" and len(data) and np.frombuffer(data, dtype=f"{dtype.str[0]}u4").max() > 0x10FFFF:
        raise FileFormatError("a text array holds an invalid character")


def _dtype(text: Any) -> np.dtype[Any]:
    """A plain numpy dtype from its name: never one of objects."""
    if type(text) is not str or not _ARRAY_DTYPE.fullmatch(text):
        raise FileFormatError(f"{text!r:.100} is not a plain array's dtype")
    return np.dtype(text)
