"""What of a worker's metrics is the same every time."""

from collections.abc import Mapping


def learned(metrics: Mapping[str, float]) -> dict[str, float]:
    """All but times and what follows from them."""
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))}
