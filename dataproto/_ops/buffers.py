"""Bytes of others as numpy and torch take them, and copies of bytes that are made fast."""

import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Memory:
    """Memory as numpy takes it, kept alive by ``owner``. Says that it may be written: torch knows no other memory."""

    owner: Any
    address: int
    size: int

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.address, False)}

    def bits(self) -> np.ndarray:
        """The memory itself, ``(size,)`` uint8."""
        return np.asarray(self)


def memory_of(buffer: Any) -> np.ndarray:
    """The bytes ``(n,)`` uint8 of any buffer, not copied, also where it may only be read."""
    read = np.frombuffer(buffer, dtype=np.uint8)
    if read.flags.writeable:
        return read
    return Memory(buffer, read.__array_interface__["data"][0], read.size).bits()


def bytes_of(bits: np.ndarray) -> bytes:
    """``bits.tobytes()``. Most of its time goes into memory that comes page by page: large copies ask for large pages."""
    if sys.platform != "linux" or bits.nbytes < _LARGE:
        return bits.tobytes()
    made = bytes(bits.nbytes)  # zeros that take no memory yet
    fresh = memory_of(made)
    ask_for_large_pages(fresh.ctypes.data, fresh.size)
    fresh[:] = bits
    return made


def ask_for_large_pages(address: int, size: int) -> None:
    """Lets fresh memory come in large pages, where it is large and the system has them."""
    if sys.platform == "linux" and size >= _LARGE:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(start, (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)


def same_bytes(left: np.ndarray, right: Any) -> bool:
    """Whether bytes ``(n,)`` uint8 and a buffer are equal, at the speed of memory."""
    other = np.frombuffer(right, dtype=np.uint8)
    if left.size != other.size:
        return False
    addresses = [each.__array_interface__["data"][0] for each in (left, other)]
    if addresses[0] == addresses[1]:
        return True
    return not _memcmp(*addresses, left.size) if sys.platform == "linux" else np.array_equal(left, other)


_LARGE = 4 << 20  # from here on numpy asks for large pages, too
if sys.platform == "linux":
    _madvise = ctypes.CDLL(None).madvise  # only advice: what it answers does not matter
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _memcmp = ctypes.CDLL(None).memcmp
    _memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
