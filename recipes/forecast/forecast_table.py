"""A forecast as text: the table before a run, and forecast beside fact after it."""

from collections.abc import Mapping, Sequence
from statistics import median

from recipes.forecast.devices import GIB
from recipes.forecast.settings import Setting
from recipes.forecast.step_forecast import StepForecast

ACTIVITY = ("activations", "tower", "logits", "kv_cache", "features", "routes", "other")
MEMORY = ("weights", "copies", "gradients", "moments", *ACTIVITY, "device")
"""The columns of the table of memory: fields of `RoleMemory`."""


def forecast_lines(found: StepForecast) -> list[str]:
    """Memory by phase and role, operations and seconds by phase, and the run, as lines of text."""
    setting = found.setting
    layout = ", ".join(f"{name} {degree}" for name, degree in vars(setting.layout).items() if degree > 1) or "alone"
    scale, unit = (GIB, "GiB") if found.memory > GIB else (2**20, "MiB")
    roles = [(phase, number, role) for phase in found.phases for number, role in enumerate(phase.roles)]
    columns = [name for name in MEMORY if any(getattr(role, name) for _, _, role in roles)]
    lines = [
        f"forecast: {setting.layout.world_size} x {setting.device.name} ({layout}), {count(setting.size.total)} parameters, "
        f"{count(setting.size.trained)} trained",
        *host_lines(setting),
        "",
        f"{unit + ' on the fullest device':25}{''.join(f'{name:>12}' for name in columns)}",
    ]
    for phase, number, role in roles:
        cells = "".join(f"{getattr(role, each) / scale:12.1f}" for each in columns)
        lines.append(f"{phase.name if not number else '':14}{role.role:11}{cells}")
    lines += ["", f"{'phase':14}{'TFLOP':>12}{'seconds':>10}{unit:>10}"]
    for phase in found.phases:
        lines.append(
            f"{phase.name:14}{figures(phase.flops / 1e12):>12}{phase.seconds:10.3g}{phase.memory / scale:10.1f}"
        )
    if found.evaluation:
        memory = sum(role.device for role in found.evaluation)
        lines.append(f"{'testing':14}{'':>12}{found.evaluation_seconds:10.3g}{memory / scale:10.1f}")
    rate = found.tokens / found.seconds / setting.layout.world_size
    lines += [
        f"{'step':14}{figures(found.flops / 1e12):>12}{found.seconds:10.3g}{found.memory / scale:10.1f} of "
        f"{setting.device.memory / scale:,.1f} with reserve; {found.tokens:,} tokens, {rate:,.0f} tokens/s/device",
        f"run: {setting.steps} steps in {duration(found.run_seconds)}, {found.disk / GIB:.3g} GiB on disk in checkpoints of "
        f"{found.checkpoint / GIB:.3g} GiB, {found.host / GIB:.3g} GiB of host memory a process",
    ]
    return [*lines, *(f"does not fit: {problem}" for problem in found.problems)]


def host_lines(setting: Setting) -> list[str]:
    """The host that vLLM's Python was forecast for, if there is some."""
    if setting.engine != "vllm" or setting.device.on_cpu:
        return []
    if setting.device.host is None:
        return ["host of vLLM: the reference one, as no such GPU is here; others took 0.4 to 1.5 of its time"]
    return [
        f"host of vLLM: this one, which takes {setting.device.host:.2f} of the time of the reference one (measured)"
    ]


def count(number: int) -> str:
    """
    >>> count(638_976), count(8_292_166_656)
    ('0.639 M', '8.29 B')
    """
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def figures(value: float) -> str:
    """Four digits, or all of a larger whole number.

    >>> figures(0.35012), figures(16_710.2)
    ('0.3501', '16,710')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(600), duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def compared(
    found: StepForecast, rows: Sequence[Mapping[str, float]], beside: int = 0
) -> list[tuple[str, float, float]]:
    """Metrics of a step with their forecast and fact: of the steps of ``metrics.jsonl`` but the first one, the median, and of
    memory the most.

    A fact that the run did not measure is left out, and on a CPU the memory of phases if it is not known what the process holds
    otherwise.

    Args:
        beside: bytes of the process beside its roles, on a CPU.
    """
    steps = [row for row in rows if row.get("step", 0) > 0]
    steps = steps[1:] or steps
    expected = {f"timing_s/{phase.name}": phase.seconds for phase in found.phases}
    expected |= {"timing_s/step": found.seconds}
    expected |= {"perf/total_num_tokens": float(found.tokens)}
    if beside or not found.setting.device.on_cpu:
        expected |= {f"perf/memory_gb/{phase.name}": (phase.memory + beside) / GIB for phase in found.phases}
    expected |= {"perf/max_memory_allocated_gb": max(phase.memory for phase in found.phases) / GIB}
    facts = {name: [row[name] for row in steps if name in row] for name in expected}
    typical = {name: max if "memory" in name else median for name in expected}
    return [(name, value, typical[name](facts[name])) for name, value in expected.items() if facts[name]]


def beside_fact(found: StepForecast, rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Forecast beside fact, as lines of a table; see `compared`."""
    lines = []
    for name, value, fact in compared(found, rows):
        ratio = f"{value / fact:10.2f}" if fact else f"{'':10}"
        lines.append(f"{name:32}{figures(value):>12}{figures(fact):>12}{ratio}")
    return [f"{'':32}{'forecast':>12}{'fact':>12}{'ratio':>10}", *lines] if lines else []
