"""What a run is expected to take: printed before the roles start, and shown beside what it took at its end.

It comes from the functions of ``dataproto plan``, so that both print the same numbers for the same options. A forecast that
cannot be made is told in one line and ends nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from recipes.forecast import Setting, StepForecast, compared, forecast, forecast_lines
from recipes.forecast.devices import GIB
from recipes.forecast.forecast_table import figures
from workers.training.memory.process_memory import begin_peak, resident_bytes

MEMORY = "perf/memory_gb/"  # metrics of `workers.training.memory.phase_memory`


class RunForecast:
    """The forecast of one run."""

    def __init__(self, make_setting: Callable[[], Setting], local: bool = True) -> None:
        """
        Args:
            make_setting: what the forecast depends on; on a CPU this measures its speed, unless that is kept.
            local: whether all roles are in this process, so that its memory is theirs.
        """
        self.make_setting, self.local = make_setting, local
        self.found: StepForecast | None = None

    def begin(self) -> None:
        """Prints the forecast. From now on the memory of this process counts."""
        with _told_only():
            self.found = forecast(self.make_setting())
            print("\n".join(forecast_lines(self.found)))
        begin_peak(anew=True)

    def compared(self, rows: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
        """What was expected and what came, by name, for the table at the end of the run; see `recipes.forecast.compared`."""
        if self.found is None:
            return []
        with _told_only():
            on_cpu = self.local and self.found.setting.device.on_cpu
            beside = self.found.beside if on_cpu else 0
            found = compared(self.found, rows, beside)
            lines = [(_name(name), figures(value), figures(fact)) for name, value, fact in found]
            lines += [(f"left after {name}, GiB", "", figures(fact)) for name, fact in _left(rows).items()]
            if on_cpu:
                expected, peak = self.found.memory / GIB, resident_bytes(peak=True) / GIB
                lines.append(("process memory, GiB", figures(expected), figures(peak)))
            return lines
        return []


def _name(metric: str) -> str:
    names = {"perf/total_num_tokens": "tokens of a step", "perf/max_memory_allocated_gb": "device memory, GiB"}
    if metric.startswith(MEMORY):
        return f"memory of {metric.removeprefix(MEMORY)}, GiB"
    return names.get(metric) or f"seconds of {metric.removeprefix('timing_s/')}"


def _left(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What each phase left in memory, in GiB: medians over the steps."""
    metrics = dict.fromkeys(name for row in rows for name in row if name.startswith(MEMORY) and name.endswith("/left"))
    return {
        name.removeprefix(MEMORY).removesuffix("/left"): median([row[name] for row in rows if name in row])
        for name in metrics
    }


@contextlib.contextmanager
def _told_only() -> Iterator[None]:
    """Tells in one line why there is no forecast, instead of an error."""
    try:
        yield
    except Exception as error:  # whatever it is, the run is worth more
        print(f"no forecast: {type(error).__name__}: {' '.join(str(error).split())}")
