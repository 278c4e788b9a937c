"""What this process holds in memory, on a CPU: the interpreter and libraries beside the tensors of the roles."""

import contextlib
import resource
import sys
from pathlib import Path

_highest = 0  # before the last `begin_peak`


def resident_bytes(peak: bool = False) -> int:
    """Bytes of this process in memory, or their peak so far."""
    if peak:
        return max(_highest, _counted_peak())
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return _counted_peak()


def _counted_peak() -> int:
    """The peak as the system counts it: since its start, or since `begin_peak`."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def begin_peak(anew: bool = False) -> None:
    """Lets `peak_bytes` count from now on, where the system can do that (Linux), and with ``anew`` `resident_bytes` too."""
    global _highest
    _highest = 0 if anew else max(_highest, _counted_peak())
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most bytes of this process in memory since `begin_peak`, or since its start where that did nothing."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resident_bytes(peak=True)
