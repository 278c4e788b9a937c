"""Reproducible metrics of a worker or a run."""

from collections.abc import Mapping


def learned(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without times, rates and memory."""
    return {name: value for name, value in metrics.items() if not name.startswith(("timing", "perf/"))}
