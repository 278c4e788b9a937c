"""Buffers of other objects as numpy arrays, and fast copies of them."""

import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Memory:
    """Memory that numpy reads, kept alive by ``owner``. It claims to be writable: torch has no read-only tensors."""

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
    """The bytes ``(n,)`` uint8 of any buffer without a copy, also of a read-only one."""
    read = np.frombuffer(buffer, dtype=np.uint8)
    if read.flags.writeable:
        return read
    return Memory(buffer, read.__array_interface__["data"][0], read.size).bits()


def bytes_of(bits: np.ndarray) -> bytes:
    """``bits.tobytes()``. Most of its time is spent on new pages of memory, so that large copies ask for huge pages."""
    if sys.platform != "linux" or bits.nbytes < _LARGE:
        return bits.tobytes()
    made = bytes(bits.nbytes)  # These zeros are not yet backed by memory.
    fresh = memory_of(made)
    ask_for_large_pages(fresh.ctypes.data, fresh.size)
    fresh[:] = bits
    return made


def ask_for_large_pages(address: int, size: int) -> None:
    """Asks for huge pages for new memory, if it is large and the system has them."""
    if sys.platform == "linux" and size >= _LARGE:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(start, (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)


def same_bytes(left: np.ndarray, right: Any) -> bool:
    """Whether bytes ``(n,)`` uint8 and a buffer are equal, by ``memcmp`` where there is one."""
    other = np.frombuffer(right, dtype=np.uint8)
    if left.size != other.size:
        return False
    addresses = [each.__array_interface__["data"][0] for each in (left, other)]
    if addresses[0] == addresses[1]:
        return True
    return not _memcmp(*addresses, left.size) if sys.platform == "linux" else np.array_equal(left, other)


_LARGE = 4 << 20  # Numpy asks for huge pages from this size on, too.
if sys.platform == "linux":
    _madvise = ctypes.CDLL(None).madvise  # It is only advice: its result does not matter.
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _memcmp = ctypes.CDLL(None).memcmp
    _memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
