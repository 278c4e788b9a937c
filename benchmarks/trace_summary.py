"""What a device did in a traced step: computing, communicating beside that or alone, copying, nothing. One row a rank.

    torchrun --nproc-per-node 2 benchmarks/pass_levers.py --size 7b --compile --parts update --trace /tmp/traces
    python benchmarks/trace_summary.py /tmp/traces/*.json.gz

Reads traces in Chrome's format, as ``torch.profiler`` writes them. Communication is NCCL's kernels, which also wait for other
ranks; it is exposed while no other kernel runs. Compute, exposed communication, copies alone and idle time add up to the step.
"""

import gzip
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
COPIES = ("gpu_memcpy", "gpu_memset")
KINDS = ("AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Broadcast", "AllToAll")
"""Of NCCL's kernels, as parts of their names; others are "other"."""
MICROSECOND = 1e-6


@dataclass(frozen=True)
class DeviceTime:
    """Seconds of a step on one device."""

    step: float
    compute: float
    communication: float  # beside computation or alone
    exposed: float  # communication alone
    copies: float  # neither beside computation nor beside communication
    kinds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # communication and its exposed part

    @property
    def idle(self) -> float:
        return self.step - self.compute - self.exposed - self.copies


def device_time(events: Iterable[Mapping[str, Any]], seconds: float | None = None) -> DeviceTime:
    """Sums the events of a trace, of one device.

    Args:
        events: ``traceEvents``, with times in microseconds.
        seconds: of the step on the host; by default from the first kernel to the end of the last.

    Raises:
        ValueError: the trace has no kernels.

    Two products of 4 and 3 us, and a collective of 6 us between and beside them, of which 3 us are exposed:

    >>> def kernel(name, start, length):
    ...     return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length}
    >>> trace = [kernel("gemm", 0, 4), kernel("ncclDevKernel_AllGather_RING_LL", 3, 6), kernel("gemm", 7, 3)]
    >>> found = device_time(trace)
    >>> [round(each * 1e6) for each in (found.step, found.compute, found.communication, found.exposed, found.idle)]
    [10, 7, 6, 3, 0]
    """
    compute, copies, by_kind = [], [], {}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", *COPIES):
            continue
        interval = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if event["cat"] in COPIES:
            copies.append(interval)
        elif "nccl" in event["name"].lower():
            by_kind.setdefault(next((kind for kind in KINDS if kind in event["name"]), "other"), []).append(interval)
        else:
            compute.append(interval)
    communication = [each for intervals in by_kind.values() for each in intervals]
    everything = [*compute, *communication, *copies]
    if not everything:
        raise ValueError("the trace has no kernels: it must be of a CUDA device")
    span = max(end for _, end in everything) - min(start for start, _ in everything)
    busy = length(compute + communication)
    return DeviceTime(
        max(span * MICROSECOND, seconds or 0.0),
        length(compute) * MICROSECOND,
        length(communication) * MICROSECOND,
        (busy - length(compute)) * MICROSECOND,
        (length(everything) - busy) * MICROSECOND,
        {
            kind: (length(each) * MICROSECOND, (length(compute + each) - length(compute)) * MICROSECOND)
            for kind, each in sorted(by_kind.items())
        },
    )


def length(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals.

    >>> length([(5, 6), (0, 2), (1, 3)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def time_table(rows: Sequence[tuple[str, DeviceTime]]) -> str:
    """Rows by name, in seconds and percent of their step."""
    lines = [["", "step, s", "compute", "communication", "exposed", "copies alone", "idle", "exposed, by kind, ms"]]
    lines.append(["---"] * len(lines[0]))
    for name, found in rows:
        shares = [found.compute, found.communication, found.exposed, found.copies, found.idle]
        kinds = ", ".join(
            f"{kind} {alone * 1e3:.1f} of {whole * 1e3:.1f}" for kind, (whole, alone) in found.kinds.items()
        )
        lines.append([name, f"{found.step:.3f}", *(f"{share / found.step:.1%}" for share in shares), kinds])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def read_trace(path: Path) -> list[Mapping[str, Any]]:
    """The events of a file, packed by gzip or not."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[Mapping[str, Any]] = json.loads(text)["traceEvents"]
    return events


def main() -> None:
    print(time_table([(path.name, device_time(read_trace(path))) for path in map(Path, sys.argv[1:])]))


if __name__ == "__main__":
    main()
