"""The memory of a CUDA device as the device counts it, where torch counts memory that is no longer there."""

from typing import NamedTuple

import torch


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
