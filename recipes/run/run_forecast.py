"""What a run is expected to take: printed before the roles start, and shown beside what it took at its end.

It comes from the functions of ``dataproto plan``, so that both print the same numbers for the same options. A forecast that
cannot be made is told in one line and ends nothing; a run that cannot fit ends before it loads a model.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from dataproto.errors import InvalidConfig
from recipes.forecast import Setting, StepForecast, compared, forecast, forecast_lines, way_out
from recipes.forecast.calibration import cpu_memory
from recipes.forecast.devices import GIB
from recipes.forecast.fitting import ERROR
from recipes.forecast.forecast_table import figures
from workers.training.memory import begin_peak, resident_bytes

MEMORY = "perf/memory_gb/"  # metrics of `workers.training.memory`


class RunForecast:
    """The forecast of one run."""

    def __init__(self, make_setting: Callable[[], Setting], local: bool = True, here: bool = True) -> None:
        """
        Args:
            make_setting: what the forecast depends on; on a CPU this measures its speed, unless that is kept.
            local: whether all roles are in this process, so that its memory is theirs.
            here: whether the roles are on this machine, whose device the forecast is for.
        """
        self.make_setting, self.local, self.here = make_setting, local, here
        self.found: StepForecast | None = None

    def begin(self) -> None:
        """Prints the forecast. From now on the memory of this process counts.

        Raises:
            InvalidConfig: a GPU of this machine is too small, by more than `ERROR`.
        """
        with _told_only():
            self.found = forecast(self.make_setting())
            print("\n".join(forecast_lines(self.found)))
        if self.found is not None and self.here:
            check_fits(self.found)
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


def check_fits(found: StepForecast) -> None:
    """Warns if a forecast is for more memory than its GPU has, or its host.

    Raises:
        InvalidConfig: it is more by more than `ERROR`; the message has options with which it fits.
    """
    device = found.setting.device
    if device.on_cpu:
        return
    ranks, host = found.setting.layout.world_size, cpu_memory()
    if ranks * found.host > host:
        print(f"warning: {ranks} x {found.host / GIB:.0f} GiB of host memory are needed of {host / GIB:.0f} GiB")
    if found.memory <= device.memory:
        return
    needs = f"{found.problems[0]} from the second step on"
    if found.memory > (1 + ERROR) * device.memory:
        raise InvalidConfig(f"{needs}: {way_out(found.setting)}")
    print(f"warning: {needs}, by a forecast that may be wrong by {ERROR:.0%}; if memory ends: {way_out(found.setting)}")


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
