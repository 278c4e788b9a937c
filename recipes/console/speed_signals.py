"""Signs in the metrics of a run that a step was slower than it has to be, by name, since nobody finds a slow step otherwise."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from workers.model.model_config import UNSHARDED

FIRST_STEPS = 2
"""Steps of a process in which compilation is expected."""
SLOW = 1.5
"""A phase is slow that takes this many times the median of the steps before."""
MIN_EXCESS_S = 1.0
"""A phase that takes less than this many seconds more is not worth a warning."""
PHASE = "timing_s/"


class SpeedSignals:
    """Remembers the seconds of each phase, and tells of each kind of problem, and of each phase, once.

    >>> signals = SpeedSignals()
    >>> [signals.new_signs({"timing_s/update_actor": seconds}) for seconds in (30.0, 10.0, 11.0)]
    [[], [], []]
    >>> signals.new_signs({"timing_s/update_actor": 22.0, "perf/allocator_retries": 0})
    ['warning: update_actor took 22.0 s, 2.1 times its median']
    """

    def __init__(self) -> None:
        self._steps = 0
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._told: set[str] = set()

    def new_signs(self, metrics: Mapping[str, float]) -> list[str]:
        """Lines for the console, from the metrics of one more step; those of the first step of a process, which compiles, are
        not compared.
        """
        self._steps += 1
        found = {name: text for name, text in self._signs(metrics) if name not in self._told}
        self._told |= found.keys()
        if self._steps > 1:
            for name, seconds in phases(metrics).items():
                self._seconds[name].append(seconds)
        return list(found.values())

    def _signs(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        if retries := metrics.get("perf/allocator_retries"):
            yield (
                "allocator_retries",
                f"warning: a device had no memory left {retries:.0f} times in the update, and torch freed its cache each time, "
                "which slows it down; try a smaller --token-budget, --activation-checkpointing full or --unsharded weights",
            )
        if self._steps > FIRST_STEPS and (graphs := metrics.get("perf/compilations")):
            yield (
                "compilations",
                f"warning: torch.compile compiled {graphs:.0f} graphs again in step {self._steps} of this process; "
                "TORCH_LOGS=recompiles prints why",
            )
        for name, level in metrics.items():
            if name.startswith("perf/unsharded/") and level:
                role, kept = name.removeprefix("perf/unsharded/"), UNSHARDED[int(level)]
                yield (
                    f"{name} {kept}",
                    f"unsharded between micro-batches of the {role} from now on: {kept} (--unsharded)",
                )
        for name, seconds in phases(metrics).items():
            if is_slow(seconds, self._seconds[name]):
                times = seconds / median(self._seconds[name])
                yield name, f"warning: {name} took {seconds:.1f} s, {times:.1f} times its median"


def phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase of a step, not those of its parts.

    >>> phases({"timing_s/gen": 2.0, "timing_s/update_actor/forward": 1.0, "perf/throughput": 3.0})
    {'gen': 2.0}
    """
    named = {name.removeprefix(PHASE): value for name, value in metrics.items() if name.startswith(PHASE)}
    return {name: value for name, value in named.items() if "/" not in name}


def is_slow(seconds: float, earlier: Sequence[float]) -> bool:
    """Whether a phase took much more than the median of ``earlier`` steps.

    >>> is_slow(3.2, [2.0, 2.0, 9.0]), is_slow(2.9, [2.0]), is_slow(0.3, [0.1]), is_slow(9.0, [])
    (True, False, False, False)
    """
    return bool(earlier) and seconds > SLOW * median(earlier) and seconds - median(earlier) > MIN_EXCESS_S
