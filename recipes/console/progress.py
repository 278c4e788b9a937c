"""The progress of a run: a table of steps, and on a terminal a bar below it."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from recipes.console.step_table import COLUMNS, StepTable
from recipes.report.charts import format_seconds


class Progress:
    """Prints held-out accuracy, reward, KL, length, tokens per second and device, and the time left, in aligned columns.

    A row is printed at the first step, at the last step, after each evaluation, and in between at most every ``interval``
    seconds; the header again every 20 rows. On a terminal a bar below the table is redrawn at every step.

    >>> import sys
    >>> with Progress(2, console=Console(file=sys.stdout, width=100)) as progress:
    ...     progress.note("reading")
    ...     progress.update(2, {"critic/score/mean": 0.5, "perf/throughput": 12345.6})
    reading
    step    reward  tokens/s/device      left
     2/2     0.500           12,346
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        console: Console | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``total``: steps of the run; ``done``: steps that an earlier process made."""
        self.total, self.done, self.interval, self.clock = total, done, interval, clock
        self.console = console or Console()
        self.table = StepTable(total)
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
        """Shows that ``step`` (counted from 1; 0 is the evaluation before) is done, with its metrics under verl's names."""
        now = self.clock()
        left = f"{format_seconds(self._left(step, now))}" if 0 < step < self.total else ""
        if step and self._first is None:
            self._first, self._first_ended = step, now
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=f"{left} left" if left else "")
        evaluated = any(column.measured_apart and column.value(metrics) is not None for column in COLUMNS)
        due = self._printed is None or now - self._printed >= self.interval
        if due or evaluated or step == self._first or step >= self.total:
            self._printed = now
            for line in self.table.lines(step, metrics, left):
                self._line(line)

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
