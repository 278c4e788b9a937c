"""Private, writable memory for received buffers: a write never reaches another reader.

A writable buffer is used as it is. A large read-only buffer in a shared file mapping (Ray's object store, shared memory) is
mapped a second time with ``MAP_PRIVATE``: the kernel copies a page on its first write, and nothing else. All other read-only
buffers (small ones, ``bytes``, and all on systems without ``/proc``) are copied at once.
"""

import bisect
import ctypes
import mmap
import os
import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from dataproto._ops.buffers import Memory

_LARGE = 128 << 10  # from this many bytes on a mapping is cheaper than a copy
_MOST = 4096  # simultaneous mappings, of the 65,530 that the kernel allows a process; buffers beyond are copied
_mappings: set[int] = set()  # start addresses of live mappings


class OwnMemory:
    """Makes the buffers of one message private; reads the list of mappings at most once."""

    def __init__(self) -> None:
        self._regions: list[_Region] | None = None
        self._refused: set[tuple[int, int]] = set()  # files that were not found

    def bits(self, buffer: Any) -> np.ndarray:
        """The bytes ``(n,)`` uint8 of any buffer, as writable memory."""
        read = np.frombuffer(buffer, dtype=np.uint8)
        if read.flags.writeable:
            return read
        large = read.size >= _LARGE and len(_mappings) < _MOST
        own = self._mapped(read) if large and sys.platform == "linux" else None
        return read.copy() if own is None else own

    def _mapped(self, read: np.ndarray) -> np.ndarray | None:
        """A private mapping of the pages of ``read``, or ``None`` if that is not possible."""
        if self._regions is None:
            self._regions = _shared_regions()
        address = read.__array_interface__["data"][0]
        number = bisect.bisect(self._regions, address, key=lambda region: region.start) - 1
        if number < 0 or address + read.size > self._regions[number].end:
            return None
        region = self._regions[number]
        if region.file in self._refused:
            return None
        if (descriptor := _opened(region)) is None:
            self._refused.add(region.file)
            return None
        try:
            return _private(descriptor, region, read, address)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class _Region:
    """A part of a file that this process has mapped as shared memory."""

    start: int
    end: int
    offset: int  # of the start, within the file
    file: tuple[int, int]  # device and inode
    path: str


_MAPPING = re.compile(rb"^(\w+)-(\w+) ...s (\w+) (\w+):(\w+) ([1-9]\d*) *(.*)$", re.MULTILINE)


def _shared_regions() -> list[_Region]:
    """All shared mappings of files, in order of address."""
    try:
        with open("/proc/self/maps", "rb") as file:
            maps = file.read()
    except OSError:  # not every Linux has /proc
        return []
    regions = []
    for *numbers, inode, path in _MAPPING.findall(maps):
        start, end, offset, major, minor = (int(number, 16) for number in numbers)
        regions.append(_Region(start, end, offset, (os.makedev(major, minor), int(inode)), os.fsdecode(path)))
    return regions


def _private(descriptor: int, region: _Region, read: np.ndarray, address: int) -> np.ndarray | None:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = address + read.size - start
    base = _mmap(None, size, _RIGHTS, _FLAGS, descriptor, region.offset + start - region.start)
    if base in (None, ctypes.c_void_p(-1).value):
        return None
    _mappings.add(base)
    # `read` stays alive: unwritten pages are shared with it.
    memory = Memory(read, base + address - start, read.size)
    weakref.finalize(memory, _unmap, base, size).atexit = False
    return memory.bits()


def _unmap(base: int, size: int) -> None:
    _mappings.discard(base)  # first, since a new mapping may get the address after munmap
    _munmap(base, size)


# The file behind a mapping

_places: dict[tuple[int, int], str] = {}  # where files without a name were found


def _opened(region: _Region) -> int | None:
    """A descriptor of the file of a region, for reading; ``None`` if this process cannot open it."""
    direct = f"/proc/self/map_files/{region.start:x}-{region.end:x}"  # only privileged processes may open it
    for place in (direct, region.path):
        if (descriptor := _open_if(place, region.file)) is not None:
            return descriptor
    for place in chain((_places.get(region.file, ""),), _descriptors()):
        if _target(place) == region.path and (descriptor := _open_if(place, region.file)) is not None:
            _places[region.file] = place
            return descriptor
    return None


def _open_if(place: str, file: tuple[int, int]) -> int | None:
    """A descriptor of the file at ``place`` if it is ``file``. Does not block if a pipe has replaced it."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    found = os.fstat(descriptor)
    if (found.st_dev, found.st_ino) == file:
        return descriptor
    os.close(descriptor)
    return None


def _target(place: str) -> str | None:
    """The path of a descriptor, without access to the file system of the file, which may hang."""
    try:
        return os.readlink(place)
    except OSError:
        return None


def _descriptors() -> Iterator[str]:
    """Open files of the processes of this user, nearest processes first. A file without a name is open in its creator."""
    near = [os.getpid(), os.getppid()]
    for process in [*near, *(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in near)]:
        try:
            yield from (f"/proc/{process}/fd/{name}" for name in os.listdir(f"/proc/{process}/fd"))
        except OSError:  # of another user, or gone
            continue


if sys.platform == "linux":
    _RIGHTS = mmap.PROT_READ | mmap.PROT_WRITE
    _FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
    _mmap, _munmap = ctypes.CDLL(None).mmap, ctypes.CDLL(None).munmap
    _mmap.restype, _munmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    _mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
