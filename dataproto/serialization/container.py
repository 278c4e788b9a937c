"""The container: named sections of bytes in one safetensors file, each with a checksum.

Every safetensors reader finds the tensors under their names. Three things are added to the format: ``format`` and ``version`` in
the metadata; a first section ``checksums`` ``(S,)`` uint32 with the CRC-32 of the file's head and of every later section, in the
order of the file; and an order of sections in which each is aligned to its elements, so that it can be used where it lies.

The ``safetensors`` package (0.8) reads these files but cannot replace this module. Its writer decides the order of sections, so
checksums cannot come first and be filled in last: they would cost a second pass over all bytes. It needs all tensors contiguous
and on the CPU at once, where this module converts one section at a time, and refuses complex128. Its reader copies numpy arrays
and accepts duplicate names, misaligned sections and shapes such as (2**40, 0).
"""

import json
import math
import mmap
import os
import stat
import sys
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from dataproto.errors import FileFormatError
from dataproto.serialization.leaves import array_bytes, array_of, tensor_bytes, tensor_of

FORMAT, VERSION = "dataproto", "1"
Path: TypeAlias = str | os.PathLike[str]
Content: TypeAlias = torch.Tensor | np.ndarray | bytes

# These are the names of dtypes in safetensors files.
CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ITEM_BYTES = {code: dtype.itemsize for dtype, code in CODES.items()}

_MAX_HEAD = 100_000_000  # This is the limit of safetensors.
_MAX_DIMS = 32
_MAX_EMPTY = 2**31  # No dimension of a shape without elements may be larger.
_ALIGNMENT = 64
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # Python names it from 3.13 on.


@dataclass(frozen=True)
class Section:
    """A section to be written: its dtype and shape as a safetensors file names them, and what its bytes are taken from."""

    code: str
    shape: tuple[int, ...]
    content: Content
    alignment: int = 1  # It is 1, 2, 4, 8 or 16, and divides the number of bytes.

    @property
    def size(self) -> int:
        return _ITEM_BYTES[self.code] * math.prod(self.shape)

    def data(self) -> Any:
        """The bytes, without a copy where the memory is contiguous and on the CPU."""
        if isinstance(self.content, bytes):
            return self.content
        if isinstance(self.content, np.ndarray):
            return array_bytes(self.content)
        return tensor_bytes(self.content).numpy()


def write_sections(path: Path, sections: Mapping[str, Section]) -> None:
    """Writes a file, and replaces an earlier one of that name when all is written. Does not wait for the disk (``fsync``)."""
    names = sorted(sections, key=lambda name: -sections[name].alignment)
    words = -(-(1 + len(names)) // 16) * 16
    checksums = np.zeros(words, dtype="<u4")
    ordered = {"checksums": Section("U32", (words,), checksums, 16), **{name: sections[name] for name in names}}
    head = _head(ordered)
    checksums[0] = zlib.crc32(head)
    temporary = f"{os.fspath(path)}.{uuid.uuid4().hex}.tmp"
    with open(temporary, "xb") as file:
        try:
            file.write(head)
            file.write(checksums.tobytes())
            for number, name in enumerate(names, start=1):
                if sections[name].size:
                    data = sections[name].data()
                    checksums[number] = zlib.crc32(data)
                    file.write(data)
            file.seek(len(head))
            file.write(checksums.tobytes())
            file.close()
            os.replace(temporary, path)
        except BaseException:
            os.remove(temporary)
            raise


def _head(sections: Mapping[str, Section]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": VERSION}}
    end = 0
    for name, section in sections.items():
        start, end = end, end + section.size
        described[name] = {"dtype": section.code, "shape": section.shape, "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _MAX_HEAD:
        raise FileFormatError(f"{len(sections) - 1} distinct objects are more than one file can hold: split the batch")
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Entry:
    """A section of an open file: its dtype and shape, and its place in the file's sections."""

    code: str
    shape: tuple[int, ...]
    start: int
    end: int
    number: int


class Sections:
    """An open file. Tensors and arrays lie in mapped memory: pages are read when touched, and private once written.

    Args:
        path: the file.
        verify: compare every section with its checksum now.

    Raises:
        FileFormatError: the file is not what :func:`write_sections` wrote.
        OSError: there is no such file, or it cannot be opened.
    """

    def __init__(self, path: Path, verify: bool = False) -> None:
        with open(path, "rb", opener=_open) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEAD):
                raise FileFormatError("it is cut short, or of another format")
            text = file.read(length)
            self._entries = _entries(text, size - 8 - length)
            kind = mmap.MAP_PRIVATE | _NO_RESERVE  # Writes stay with this process.
            self._memory = mmap.mmap(file.fileno(), size, flags=kind, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._base = 8 + length
        self._checksums = self._find_checksums()
        if zlib.crc32(length.to_bytes(8, "little") + text) != self._checksums[0]:
            raise FileFormatError("its head does not match its checksum")
        if verify:
            for name in self._entries:
                self.bytes(name)
        self._untaken = self._entries.keys() - {"checksums"}

    def _find_checksums(self) -> np.ndarray:
        entry = self._entries.get("checksums")
        fits = (
            entry is not None and entry.code == "U32" and len(entry.shape) == 1 and entry.shape[0] >= len(self._entries)
        )
        if entry is None or entry.number != 0 or not fits:
            raise FileFormatError("it has no checksums")
        return np.frombuffer(self._memory, dtype="<u4", count=entry.shape[0], offset=self._base)

    def take(self, name: str) -> Entry:
        """A section by its name, at most once: rows that share an object refer to the object, not to its section.

        Raises:
            FileFormatError: there is no such section, or it was taken before.
        """
        if name not in self._untaken:
            raise FileFormatError(f"section {name!r} is absent or used twice")
        self._untaken.remove(name)
        return self._entries[name]

    def finish(self) -> None:
        """Raises FileFormatError if sections are left that were not taken."""
        if self._untaken:
            raise FileFormatError(f"nothing uses section {min(self._untaken)!r}")

    def checked(self, entry: Entry) -> memoryview:
        """The bytes of a section; FileFormatError where they do not match their checksum."""
        data = memoryview(self._memory)[self._base + entry.start : self._base + entry.end]
        if entry.number and zlib.crc32(data) != self._checksums[entry.number]:
            raise FileFormatError("a section does not match its checksum")
        return data

    def bytes(self, name: str) -> memoryview:
        """The checked bytes of a section by its name; does not take it."""
        return self.checked(self._entries[name])

    def tensor(self, entry: Entry, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A section as a tensor, in the mapped memory; FileFormatError where dtype and shape do not fit its bytes."""
        return tensor_of(self._fitting(entry, dtype.itemsize, shape), dtype, shape)

    def array(self, entry: Entry, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        """A section as an array, in the mapped memory; FileFormatError where dtype and shape do not fit its bytes."""
        return array_of(self._fitting(entry, dtype.itemsize, shape), dtype, shape)

    def _fitting(self, entry: Entry, item_bytes: int, shape: tuple[int, ...]) -> np.ndarray:
        """The mapped bytes of a section ``(n,)`` uint8, which are those of a shape and aligned to its elements."""
        size, offset = entry.end - entry.start, self._base + entry.start
        if check_shape(shape) * item_bytes != size:
            raise FileFormatError(f"{size} bytes do not make a shape {shape}")
        if offset % math.gcd(item_bytes, 16):
            raise FileFormatError("a section is not aligned to its elements")
        return np.frombuffer(self._memory, np.uint8, size, offset) if size else np.empty(0, np.uint8)


def _open(path: str, flags: int) -> int:
    """Opens ordinary files only: a pipe would block, and a device would never end."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileFormatError("it is not an ordinary file")
    return descriptor


def _entries(text: bytes, size: int) -> dict[str, Entry]:
    """The sections that a head describes: one directly after the other, and nothing else, in ``size`` bytes."""
    described = parse(text)
    metadata = described.pop("__metadata__", None) if isinstance(described, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise FileFormatError("it was not written by save_to_disk")
    if metadata.get("version") != VERSION:
        raise FileFormatError(f"it has version {metadata.get('version')!r}; this library reads {VERSION!r}")
    entries: dict[str, Entry] = {}
    end = 0
    for name, section in described.items():
        code, shape, (start, stop) = section["dtype"], tuple(section["shape"]), section["data_offsets"]
        if start != end or stop - start != check_shape(shape) * _ITEM_BYTES[code] or stop > size:
            raise FileFormatError(f"section {name!r} is not where it must be")
        entries[name] = Entry(code, shape, start, end := stop, len(entries))
    if end != size:
        raise FileFormatError(f"it holds {size} bytes after its head, not {end}")
    return entries


def check_shape(shape: Sequence[Any]) -> int:
    """The number of elements of a shape that a file claims; FileFormatError where it is no shape, or absurd."""
    if len(shape) > _MAX_DIMS or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise FileFormatError(f"{shape!r:.200} is not a shape")
    if 0 in shape and max(shape) > _MAX_EMPTY:
        raise FileFormatError(f"shape {shape} is too large to be true")
    return math.prod(shape)


def parse(text: bytes) -> Any:
    """Reads JSON in which no object has a name twice; ValueError for anything else."""
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FileFormatError("a name occurs twice")
    return found


def _refuse(constant: str) -> None:
    raise FileFormatError(f"{constant} is not JSON")
