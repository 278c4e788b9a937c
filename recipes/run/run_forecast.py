"""What a run is expected to take: printed before the roles start, and shown beside what it took at its end.

A forecast that cannot be made is told in one line and ends nothing. It uses the first batch of the run, which is drawn anyway,
and, on a CPU whose speed no earlier run has kept, the seconds of the second step.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from dataproto import DataProto
from recipes.forecast import (
    Setting,
    StepForecast,
    compared,
    cpu_from_step,
    duration,
    forecast,
    forecast_lines,
    keep_cpu,
    known_cpu,
    this_gpu,
    unknown_cpu,
)
from recipes.forecast.devices import GIB, Device
from recipes.forecast.forecast_table import figures
from recipes.run.carried_rollouts import LookAhead
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout
from workers.training.memory.process_memory import LIBRARY_PAGES, resident_bytes

MEMORY = "perf/memory_gb/"  # metrics of `workers.training.memory.phase_memory`

MakeSetting = Callable[[DataProto, Device], Setting]
"""The first batch and the device -> what the forecast depends on."""


class RunForecast:
    """The forecast of one run."""

    def __init__(self, loader: LookAhead, make_setting: MakeSetting, config: object, local: bool = True) -> None:
        """
        Args:
            loader: of the run; its next batch is looked at.
            config: the checkpoint's.
            local: whether all roles are in this process, so that its memory is theirs.
        """
        self.loader, self.make_setting, self.config, self.local = loader, make_setting, config, local
        self.found: StepForecast | None = None
        self.process_memory: int | None = None  # bytes that are expected of this process at most, on a CPU
        self._observed = 0  # steps of this process
        self._begun = False

    def begin(self) -> None:
        """Prints the forecast, the first time; the loader's position stays."""
        if self._begun:
            return
        self._begun = True
        found = self._find()
        if found is not None:
            print("\n".join(forecast_lines(found)))
            if self.local and found.setting.device.on_cpu:
                self.process_memory = resident_bytes() + LIBRARY_PAGES + found.memory

    def resolved(self, compute: ModelConfig, layout: Layout) -> ModelConfig:
        """The options with what stays unsharded as the forecast chooses it; they stay open on a CPU and without a forecast."""
        if compute.unsharded != "auto" or layout.dp * layout.sp == 1 or self._device().on_cpu:
            return compute
        found = self.found or self._find()
        return compute if found is None else replace(compute, unsharded=found.setting.compute.unsharded)

    def _find(self) -> StepForecast | None:
        """Makes the forecast; the loader's position stays."""
        position = self.loader.state_dict()
        with _told_only() as failure:
            batch = self.loader.peek()
            self.found = forecast(self.make_setting(batch, self._device()))
        if failure:
            self.loader.load_state_dict(position)
        return self.found

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """Lines to show after a step: the time of the run, where the second step has told the speed of this CPU."""
        self._observed += 1
        if self.found is None or self._observed != 2 or not self.found.setting.device.on_cpu:
            return []
        with _told_only():
            device = self._keep_speed(metrics)
            if device is not None and not self.found.setting.device.speed_known:
                self.found = found = forecast(replace(self.found.setting, device=device))
                return [
                    f"forecast from this step: {found.seconds:.3g} s a step, {found.setting.steps} steps in "
                    f"{duration(found.run_seconds)}"
                ]
        return []

    def compared(self, rows: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
        """What was expected and what came, by name, for the table at the end of the run; see `recipes.forecast.compared`."""
        if self.found is None:
            return []
        with _told_only():
            if self.found.setting.device.on_cpu and (steps := [row for row in rows if row.get("step", 0) > 0][1:]):
                self._keep_speed({f"timing_s/{each.name}": _median(steps, each.name) for each in self.found.phases})
            beside = 0 if self.process_memory is None else self.process_memory - self.found.memory
            lines = [
                (_name(name), figures(value), figures(fact)) for name, value, fact in compared(self.found, rows, beside)
            ]
            lines += [(f"left after {name}, GiB", "", figures(fact)) for name, fact in _left(rows).items()]
            if self.process_memory is not None:
                peak = resident_bytes(peak=True)
                lines.append(("process memory, GiB", figures(self.process_memory / GIB), figures(peak / GIB)))
            return lines
        return []

    def _keep_speed(self, metrics: Mapping[str, float]) -> Device | None:
        """The speed of this CPU by these seconds, kept for the next run: of the second step, later the medians of all."""
        assert self.found is not None
        device = cpu_from_step(self.found, metrics)
        if device is not None:
            keep_cpu(device, self.config)
        return device

    def _device(self) -> Device:
        if torch.cuda.is_available():
            return this_gpu()
        return known_cpu(self.config) or unknown_cpu()


def _median(steps: Sequence[Mapping[str, float]], phase: str) -> float:
    return median([row.get(f"timing_s/{phase}", 0.0) for row in steps])


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
def _told_only() -> Iterator[list[str]]:
    """Tells in one line why there is no forecast, instead of an error; the list then holds the reason."""
    reasons: list[str] = []
    try:
        yield reasons
    except Exception as error:  # whatever it is, the run is worth more
        reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
        print(f"no forecast: {reasons[0]}")
