"""Memory of each phase of a step, in this process: of its device, or on a CPU of the process itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dataproto.errors import ending
from workers.training.memory.device_memory import DeviceMemory, real_peak
from workers.training.memory.process_memory import begin_peak, peak_bytes, resident_bytes

GENERATION = "gen"
SCORES = {"old_log_probs": "old_log_prob", "ref_log_prob": "ref", "values": "values"}
"""The phase of a pass without gradients, by the column that it makes; named as in ``timing_s/<phase>``."""


class PhaseMemory:
    """Records the peak of each phase, and what is left at its end.

    >>> memory = PhaseMemory()
    >>> with memory.phase("gen"):
    ...     pass
    >>> sorted(memory.taken()), memory.taken()
    (['perf/memory_gb/gen', 'perf/memory_gb/gen/left'], {})
    """

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._open = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase; one within another counts as part of that."""
        if self._open:
            yield
            return
        self._open = True
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        before = _begin(device)
        with ending(lambda: self._end(name, device, before)):
            yield

    def _end(self, name: str, device: torch.device | None, before: DeviceMemory | None) -> None:
        self._open = False
        peak, left = _end(device, before, awake=name == GENERATION)
        metric = f"perf/memory_gb/{name}"
        self._found[metric] = max(peak, self._found.get(metric, 0))
        self._found[f"{metric}/left"] = left

    def taken(self) -> dict[str, int]:
        """Metric to bytes, of the phases that have ended since the last call."""
        found, self._found = self._found, {}
        return found


def _begin(device: torch.device | None) -> DeviceMemory | None:
    if device is None:
        begin_peak()
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return DeviceMemory.of(device)


def _end(device: torch.device | None, before: DeviceMemory | None, awake: bool) -> tuple[int, int]:
    """Peak and rest. Of an engine that was ``awake`` torch's count of the peak holds."""
    if device is None or before is None:
        return peak_bytes(), resident_bytes()
    after = DeviceMemory.of(device)
    peak = torch.cuda.max_memory_allocated(device)
    left = max(torch.cuda.memory_allocated(device) - after.given_back, 0)
    return (min(peak, after.total) if awake else real_peak(peak, before, after)), left


PHASES = PhaseMemory()
"""Of this process: all its roles share the device."""
