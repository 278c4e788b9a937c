"""The progress of a run: a live bar on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from recipes.report.charts import format_seconds

REWARD = "critic/score/mean"
LOSS = "train/loss"
THROUGHPUT = "perf/throughput"


class Progress:
    """Shows step, reward, tokens per second and device, and the time left.

    On a terminal this is one bar that is redrawn. Elsewhere (a log file, a CI job) it is a plain line at the first step, at
    the last step, and in between at most every ``interval`` seconds.

    >>> import sys
    >>> with Progress(2, console=Console(file=sys.stdout, width=100)) as progress:
    ...     progress.note("held-out accuracy 0.25")
    ...     progress.update(2, {"critic/score/mean": 0.5, "perf/throughput": 12345.6})
    held-out accuracy 0.25
    step 2/2 · reward 0.500 · 12,346 tokens/s per device
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        console: Console | None = None,
        interval: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``total``: steps of the run; ``done``: steps that an earlier process made."""
        self.total, self.done, self.interval, self.clock = total, done, interval, clock
        self.console = console or Console()
        self._printed: float | None = None
        self._started = self._first_ended = clock()
        self._first: int | None = None
        self._bar: Bar | None = None
        if self.console.is_terminal:
            columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=self.console)
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        self._started = self.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows that ``step`` (counted from 1) is done, with its metrics under verl's names."""
        now = self.clock()
        parts = _parts(metrics)
        if step < self.total:
            parts.append(f"{format_seconds(self._left(step, now))} left")
        if self._first is None:
            self._first, self._first_ended = step, now
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=" · ".join(parts))
        elif self._printed is None or step >= self.total or now - self._printed >= self.interval:
            self._printed = now
            self._line(" · ".join([f"step {step}/{self.total}", *parts]))

    def doing(self, text: str) -> None:
        """Shows what the current step is doing: beside the bar; elsewhere as a line, at most every ``interval`` seconds."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif self._printed is None or self.clock() - self._printed >= self.interval:
            self._printed = self.clock()
            self._line(text)

    def note(self, text: str) -> None:
        """A line that stays, above the bar if there is one."""
        self._line(text)

    def _left(self, step: int, now: float) -> float:
        """Seconds to the end at the mean pace of the steps after the first one, which is slower than the others."""
        if self._first is not None and step > self._first:
            pace = (now - self._first_ended) / (step - self._first)
        else:
            pace = (now - self._started) / max(step - self.done, 1)
        return pace * (self.total - step)

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _parts(metrics: Mapping[str, float]) -> list[str]:
    reward, loss, throughput = (metrics.get(name, math.nan) for name in (REWARD, LOSS, THROUGHPUT))
    parts = [f"reward {reward:.3f}"] if math.isfinite(reward) else []
    parts += [f"loss {loss:.3f}"] if math.isfinite(loss) else []
    return parts + ([f"{throughput:,.0f} tokens/s per device"] if math.isfinite(throughput) else [])
