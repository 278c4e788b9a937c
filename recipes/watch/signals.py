"""Signs in the metrics of a run that the policy cannot learn from its samples, or that a step is slower than it has to be."""

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import yaml

from recipes.watch.pages import TEMPLATES
from workers.model.model_config import UNSHARDED

Metrics = Mapping[str, float]


STEPS = 5
"""In a row that must show a sign that nothing can be learned."""
REWARD_SPREAD = 1e-6
"""Highest minus lowest reward of steps whose reward is constant."""
SIGNS, STEP_SIGNS = yaml.safe_load_all((TEMPLATES / "signs.yaml").read_text(encoding="utf-8"))
"""The other signs: metrics, of which the first that all of the last steps have counts, the values that are a sign, a message; and
those of one step that is slow.
"""


def learning_problems(steps: Sequence[Metrics]) -> dict[str, str]:
    """What keeps the policy from learning, by the metrics of the last `STEPS` steps; empty for fewer steps.

    Args:
        steps: metrics under the names of ``metrics.jsonl``, the last step last. A metric that a step lacks is no sign.

    Returns:
        A message by the name of the problem: ``constant_reward``, ``equal_groups`` (unless the reward is constant),
        ``cut_responses``, ``one_answer``, ``no_entropy`` or ``engine_difference``.

    >>> list(learning_problems(5 * [{"actor/entropy": 0.002}]))
    ['no_entropy']
    """
    last = steps[-STEPS:]
    return dict(_problems(last)) if len(last) == STEPS else {}


def _problems(last: Sequence[Metrics]) -> Iterator[tuple[str, str]]:
    highest, lowest = _values(last, "critic/score/max"), _values(last, "critic/score/min")
    constant = highest and lowest and max(highest) - min(lowest) <= REWARD_SPREAD
    if constant:
        yield (
            "constant_reward",
            f"every response of the last {STEPS} steps has the reward {highest[-1]:g}: there is nothing to learn from; "
            "look at the responses in the report, and try the reward function on a right and on a wrong answer",
        )
    for name, sign in SIGNS.items():
        values = next(filter(None, (_values(last, metric) for metric in sign["metrics"])), None)
        if values is None or (name == "equal_groups" and constant):
            continue
        if min(values) >= sign["at_least"] if "at_least" in sign else max(values) < sign["below"]:
            yield name, sign["message"].format(steps=STEPS, least=min(values), last=values[-1])


def _values(last: Sequence[Metrics], name: str) -> list[float]:
    """The metric in each of the steps; empty where a step lacks it or it is not finite."""
    values = [metrics.get(name, math.nan) for metrics in last]
    return values if all(map(math.isfinite, values)) else []


SLOW = 1.5
"""A phase is slow that takes this many times the median of the steps before."""
MIN_EXCESS_S = 1.0
"""A phase that takes less than this many seconds more is not worth a warning."""
MEASURED_STEPS = 3
"""Steps of a process after which it says what a step takes. The first one compiles, and has no optimizer state yet."""
PHASE, MEMORY = "timing_s/", "perf/memory_gb/"


def measured_step(rows: Sequence[Metrics]) -> str:
    """What a step takes, in one line: medians of seconds, and the most memory of any phase; empty without a measured step.

    The first step is left out, if there are others: it compiles, and its passes have no optimizer state yet.

    >>> row = {"step": 2, "timing_s/step": 3.0, "timing_s/gen": 2.0, "perf/memory_gb/gen": 1.5}
    >>> measured_step([{"step": 1, "timing_s/step": 9.0}, row])
    'measured: a step takes 3 s (gen 2), at most 1.5 GiB of memory (gen)'
    """
    steps, seconds = [row for row in rows if "timing_s/step" in row], defaultdict[str, list[float]](list)
    if not steps:
        return ""
    memory: list[tuple[float, str]] = []
    for row in steps[1:] or steps:
        for name, value in phases(row).items():
            seconds[name].append(value)
        held = {name for name in row if name.startswith(MEMORY) and not name.endswith("/left")}
        memory += [(row[name], name.removeprefix(MEMORY)) for name in held]
    took = {name: median(each) for name, each in seconds.items()}
    step = took.pop("step")
    parts = ", ".join(f"{name} {each:.3g}" for name, each in took.items() if each > 0.01 * step)
    line = f"measured: a step takes {step:.3g} s{f' ({parts})' if parts else ''}"
    if memory:
        most, fullest = max(memory)
        line += f", at most {most:.1f} GiB of memory ({fullest})"
    return line


class Signals:
    """Remembers the last steps and the seconds of each phase, and tells of each kind of problem, and of each phase, once.

    >>> signals = Signals()
    >>> [signals.new_signs({"timing_s/update_actor": seconds}) for seconds in (30.0, 10.0, 11.0)]
    [[], [], []]
    >>> signals.new_signs({"timing_s/update_actor": 22.0, "perf/allocator_retries": 0})
    ['warning: update_actor took 22.0 s, 2.1 times its median']
    """

    def __init__(self) -> None:
        self._steps = 0
        self._last: deque[Metrics] = deque(maxlen=STEPS)
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._first: list[Mapping[str, float]] = []
        self._told: set[str] = set()

    def new_signs(self, metrics: Mapping[str, float], left: str = "") -> list[str]:
        """Lines for the console, from the metrics of one more step; those of the first step of a process, which compiles, are
        not compared. ``left`` is the time that is left.
        """
        self._steps += 1
        self._last.append(metrics)
        problems = {name: f"warning: {text}" for name, text in learning_problems(list(self._last)).items()}
        signs = problems | dict(self._signs(metrics))
        found = {name: text for name, text in signs.items() if name not in self._told}
        self._told |= found.keys()
        if self._steps > 1:
            for name, seconds in phases(metrics).items():
                self._seconds[name].append(seconds)
        if self._steps > MEASURED_STEPS:
            return [*found.values()]
        self._first.append(metrics)
        measured = measured_step(self._first) if self._steps == MEASURED_STEPS else ""
        return [*([f"{measured}{f'; about {left} left' if left else ''}"] if measured else []), *found.values()]

    def _signs(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for name, sign in STEP_SIGNS.items():
            if self._steps > sign["after"] and (count := metrics.get(f"perf/{name}")):
                yield name, f"warning: {sign['message'].format(count=count, step=self._steps)}"
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
    return {name.removeprefix(PHASE): value for name, value in metrics.items() if re.fullmatch(f"{PHASE}[^/]+", name)}


def is_slow(seconds: float, earlier: Sequence[float]) -> bool:
    """Whether a phase took much more than the median of ``earlier`` steps.

    >>> is_slow(3.2, [2.0, 2.0, 9.0]), is_slow(2.9, [2.0]), is_slow(0.3, [0.1]), is_slow(9.0, [])
    (True, False, False, False)
    """
    return bool(earlier) and seconds > SLOW * median(earlier) and seconds - median(earlier) > MIN_EXCESS_S
