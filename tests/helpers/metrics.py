"""Reproducible metrics of a worker."""

from collections.abc import Mapping


def learned(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without times and rates."""
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))}
