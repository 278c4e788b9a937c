"""What a process holds on its CUDA device: at one moment, at the peak of each phase of a step, and how torch allocates it.

Torch counts memory that is no longer there, so the device's own count is read too.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from dataproto.errors import ending


class DeviceMemory(NamedTuple):
    """Bytes at one moment."""

    reserved: int  # by torch, as torch counts
    used: int  # of the whole device
    total: int

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """Now."""
        free, total = torch.cuda.mem_get_info(device)
        return cls(torch.cuda.memory_reserved(device), total - free, total)

    @property
    def given_back(self) -> int:
        """Bytes that torch still counts and the device does not hold, at least; see `real_peak`."""
        return max(self.reserved - self.used, 0)


def real_peak(peak: int, *moments: DeviceMemory) -> int:
    """The most bytes that a process held on its device, from the peak that torch counted.

    vLLM allocates through torch, and when it sleeps it returns memory to the device without telling torch, which still counts
    it (a peak of 166 GiB on a device of 140). Such memory are the bytes ``reserved`` by torch beyond the ``used`` bytes of the
    whole device, at any moment of the time that the peak is of; at some moments other memory hides it, so the largest difference
    counts. ``used`` includes other memory of the device, such as CUDA's context; the result may be too large by that much, but is
    never more than the device has.

    >>> asleep, busy = DeviceMemory(reserved=80, used=30, total=140), DeviceMemory(reserved=130, used=130, total=140)
    >>> real_peak(150, asleep), real_peak(150, busy, asleep), real_peak(150, busy)
    (100, 100, 140)
    >>> real_peak(60, DeviceMemory(reserved=20, used=30, total=140))
    60
    """
    return min(peak - max(each.given_back for each in moments), *(each.total for each in moments))


GENERATION = "gen"
SCORES = {"old_log_probs": "old_log_prob", "ref_log_prob": "ref", "values": "values"}
"""The phase of a pass without gradients, by the column that it makes; named as in ``timing_s/<phase>``."""


class PhaseMemory:
    """Records the peak of each phase, and what is left at its end; nothing where no CUDA device is used."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._open = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase; one within another counts as part of that."""
        if self._open or not torch.cuda.is_initialized():
            yield
            return
        self._open = True
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.reset_peak_memory_stats(device)
        before = DeviceMemory.of(device)
        with ending(lambda: self._end(name, device, before)):
            yield

    def _end(self, name: str, device: torch.device, before: DeviceMemory) -> None:
        """Of an engine that was awake torch's count of the peak holds."""
        self._open = False
        after, peak = DeviceMemory.of(device), torch.cuda.max_memory_allocated(device)
        peak = min(peak, after.total) if name == GENERATION else real_peak(peak, before, after)
        metric = f"perf/memory_gb/{name}"
        self._found[metric] = max(peak, self._found.get(metric, 0))
        self._found[f"{metric}/left"] = max(torch.cuda.memory_allocated(device) - after.given_back, 0)

    def taken(self) -> dict[str, int]:
        """Metric to bytes, of the phases that have ended since the last call."""
        found, self._found = self._found, {}
        return found


PHASES = PhaseMemory()
"""Of this process, whose roles share the device."""


VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that configure torch's allocator. If one is set, nothing is changed here."""

TAKES_PAGES = torch.__version__ >= "2.13"  # compared as versions, not as text

PAGE, USUAL_PAGE = 128, 20
"""MB by which segments grow and shrink: within `expandable_segments`, and torch's own number outside of it.

Before each rollout an engine needs the memory that an update has used, and torch returns it page by page: 80 GB in pages of
20 MB took 0.6 s.
"""

_lock = threading.Lock()
_open = 0  # blocks of `expandable_segments` that this process is in


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Memory that is allocated in here comes in segments that grow and shrink by pages. Blocks may be nested.

    An update allocates what outlasts it, such as the optimizer's first state, among its activations. In segments of fixed size
    each such tensor keeps a whole segment, and an engine on the same device cannot have the rest of it. Outside of these blocks
    segments have fixed sizes: vLLM's memory pool and the all-reduce of its graphs do not work with others.

    Does nothing on a CPU, or if an environment variable configures torch's allocator (`VARIABLES`). Settings that a program has
    made at run time are lost, because torch resets some others with this one.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in VARIABLES):
        yield
        return
    _count(1)
    with ending(lambda: _count(-1)):
        yield


def _count(change: int) -> None:
    global _open
    with _lock:
        found = _open + change
        if bool(found) != bool(_open):
            page = f",large_segment_size_mb:{PAGE if found else USUAL_PAGE}" if TAKES_PAGES else ""
            torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{bool(found)}{page}")
        _open = found
