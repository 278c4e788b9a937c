"""The speed of this CPU with a model, from the steps of a run, kept for the next run on the same machine.

It is in ``dataproto/cpu_speed`` of the user's cache directory (``$XDG_CACHE_HOME`` or ``~/.cache``), one small file for each
model, number of threads and release of PyTorch. The folder may be deleted at any time.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from recipes.forecast.calibration import cpu_memory
from recipes.forecast.devices import Device
from recipes.forecast.step_forecast import StepForecast, forecast
from recipes.forecast.step_time import prefill_seconds

SPEEDS = ("bandwidth", "language", "vision", "decode_overhead")
BANDWIDTH = 10e9  # bytes per second; what it adds to a step on a CPU is small


def unknown_cpu() -> Device:
    """This CPU with its memory, while its speed is not known: `Device.speed_known` is false."""
    return Device("cpu", cpu_memory(), math.inf, math.inf, math.inf, on_cpu=True)


def cpu_from_step(found: StepForecast, metrics: Mapping[str, float]) -> Device | None:
    """This CPU, from the seconds of a step whose operations were forecast; ``None`` if the step computed nothing.

    The passes of all roles share one rate of operations, and a decoding step of the engine takes a constant time.
    """
    seconds = {phase.name: metrics.get(f"timing_s/{phase.name}", 0.0) for phase in found.phases}
    passes = [phase for phase in found.phases if phase.name != "gen" and seconds[phase.name] > 0]
    if not passes:
        return None
    rate = sum(phase.flops for phase in passes) / sum(seconds[phase.name] for phase in passes)
    overhead = 0.0
    if generated := seconds.get("gen", 0.0):
        one_second_each = forecast(replace(found.setting, device=replace(unknown_cpu(), decode_overhead=1.0)))
        steps = next(phase.seconds for phase in one_second_each.phases if phase.name == "gen")
        filled = prefill_seconds(found.setting.batch, replace(unknown_cpu(), language=rate, vision=rate))
        overhead = max(generated - filled, 0.0) / max(steps, 1.0)
    return Device("cpu", cpu_memory(), BANDWIDTH, rate, rate, decode_overhead=overhead, on_cpu=True)


def known_cpu(config: Any) -> Device | None:
    """The speed that an earlier run has kept for a model with this config; ``None`` without one."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(_file(config).read_text(encoding="utf-8"))
        bandwidth, language, vision, overhead = (float(found[name]) for name in SPEEDS)
        return Device("cpu", cpu_memory(), bandwidth, language, vision, decode_overhead=overhead, on_cpu=True)
    return None


def keep_cpu(device: Device, config: Any) -> None:
    """Keeps the speed for later runs; does nothing where the cache directory cannot be written."""
    file = _file(config)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(json.dumps(asdict(device)), encoding="utf-8")
        draft.replace(file)


def _file(config: Any) -> Path:
    machine = (platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    digest = hashlib.sha256(repr((machine, config.to_json_string())).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dataproto" / "cpu_speed" / f"{digest}.json"
