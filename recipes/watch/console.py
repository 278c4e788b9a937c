"""What a run shows on the console: the phases of its start, a table of steps with a bar below it, and a summary at its end."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import yaml
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from recipes.watch.pages import TEMPLATES, format_seconds
from recipes.watch.report import REPORT_FILE
from recipes.watch.signals import learning_problems, measured_step
from workers.training.checkpoint import latest_checkpoint


@contextmanager
def start_phase(
    name: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Names what the block does, and prints the seconds that it took.

    On a terminal the name stands next to a spinner and the time so far. Elsewhere (a log file, a CI job) it is a line before the
    block, so that the last line of the log names the phase that still runs.

    >>> import sys
    >>> ticks = iter([0.0, 2.5])
    >>> with start_phase("reading data", Console(file=sys.stdout, width=80), lambda: next(ticks)):
    ...     pass
    reading data ...
    reading data: 2.5 s
    """
    console = console or Console()
    start = clock()
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Bar(*columns, console=console, transient=True) as spinner:
            spinner.add_task(name, total=None)
            yield
    else:
        _say(console, f"{name} ...")
        yield
    _say(console, f"{name}: {clock() - start:.1f} s")


def start_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """The phases of a start as metrics.

    >>> start_metrics({"loading the actor": 24.0, "starting the engine (graphs)/KV cache": 1.5})
    {'perf/start_s/loading_the_actor': 24.0, 'perf/start_s/starting_the_engine/KV_cache': 1.5}
    """
    short = {re.sub(r" \(.*?\)", "", name).replace(" ", "_"): each for name, each in seconds.items()}
    return {f"perf/start_s/{name}": each for name, each in short.items()}


@dataclass(frozen=True)
class Column:
    """A column of numbers: the mean of the metrics whose name matches the first of ``patterns`` that any name matches."""

    title: str
    patterns: tuple[str, ...]
    form: str = ".3f"
    measured_apart: bool = False  # from training, by an evaluation: its row is never left out
    unless: str = "(?!)"  # shows nothing where a metric matches this
    in_summary: bool = False  # at the end of a run too, whatever ``unless`` says

    def heading(self, metrics: Mapping[str, float]) -> str:
        """The title, which says of how many metrics the number is the mean.

        >>> metrics = {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 1.0}
        >>> Column("accuracy", (r"val-core/.*/acc/mean@\\d+",)).heading(metrics)
        'accuracy (mean of 2)'
        """
        count = len(self._values(metrics))
        return f"{self.title} (mean of {count})" if count > 1 else self.title

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The number to show; ``None`` where the metrics have no finite one.

        >>> metrics = {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 1.0}
        >>> Column("accuracy", (r"val-core/.*/acc/mean@\\d+",)).value(metrics)
        0.75
        """
        return fmean(values) if (values := self._values(metrics)) else None

    def _values(self, metrics: Mapping[str, float]) -> list[float]:
        if any(re.fullmatch(self.unless, name) for name in metrics):
            return []
        found = (
            [value for name, value in metrics.items() if re.fullmatch(pattern, name) and math.isfinite(value)]
            for pattern in self.patterns
        )
        return next(filter(None, found), [])


COLUMNS = tuple(
    Column(**each | {"patterns": tuple(each["patterns"])})
    for each in yaml.safe_load((TEMPLATES / "columns.yaml").read_text(encoding="utf-8"))
)


class StepTable:
    """Rows of numbers under a header. A column appears with its first number, and stays."""

    def __init__(self, total: int, repeat: int = 20, further: Sequence[str] = ()) -> None:
        """``total``: steps of the run; ``repeat``: rows after which the header is printed again; ``further``: metrics by name."""
        self.total, self.repeat = total, repeat
        self.columns = (*COLUMNS, *(Column(name, (re.escape(name),)) for name in further))
        self.headings: dict[Column, str] = {}
        self._rows_since_header = repeat

    def lines(self, step: int, metrics: Mapping[str, float], left: str = "") -> list[str]:
        """The row of a step, below a header where one is due.

        >>> table = StepTable(10)
        >>> for line in table.lines(1, {"critic/score/mean": 0.25, "perf/throughput": 1234.5}, "0:09"):
        ...     print(line)
         step  reward tokens/s    left
         1/10   0.250    1,234    0:09
        >>> table.lines(2, {"critic/score/mean": 0.5, "perf/throughput": float("nan")})
        [' 2/10   0.500']
        """
        values = {column: column.value(metrics) for column in self.columns}
        new = {column: column.heading(metrics) for column, value in values.items() if value is not None}
        known = self.headings | new
        header = known != self.headings or self._rows_since_header == self.repeat
        self.headings = {column: known[column] for column in self.columns if column in known}
        self._rows_since_header = 1 if header else self._rows_since_header + 1
        cells = ["" if (value := values[column]) is None else f"{value:{column.form}}" for column in self.headings]
        row = self._line(f"{step}/{self.total}", cells, left)
        return [self._line("step", [*self.headings.values()], "left"), row] if header else [row]

    def _line(self, step: str, cells: Sequence[str], left: str) -> str:
        padded = [cell.rjust(max(len(title), 7)) for cell, title in zip(cells, self.headings.values(), strict=True)]
        width = max(len("step"), 2 * len(str(self.total)) + 1)
        return " ".join([step.rjust(width), *padded, left.rjust(7)]).rstrip()


class Progress:
    """Prints held-out accuracy, loss, reward, KL, rate, length, tokens per second and device, and the time left, in columns.

    A row is printed at the first step, at the last step, after each evaluation, and in between at most every ``interval``
    seconds; the header again every 20 rows. On a terminal a bar below the table changes at every step.

    >>> import sys
    >>> with Progress(2, console=Console(file=sys.stdout, width=100)) as progress:
    ...     progress.note("reading")
    ...     progress.update(2, {"critic/score/mean": 0.5, "perf/throughput": 12345.6})
    reading
    step  reward tokens/s    left
     2/2   0.500   12,346
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        further: Sequence[str] = (),
        console: Console | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``total``: steps of the run; ``done``: steps that an earlier process made; ``further``: metrics to show too."""
        self.total, self.done, self.interval, self.clock = total, done, interval, clock
        self.left = ""
        """The time that is left after the last step, at the pace of the steps so far."""
        self.console = console or Console()
        self.table, self.further = StepTable(total, further=further), further
        self._printed: float | None = None
        self._first: int | None = None
        self._since = done, clock()  # a step, and when it ended: the mean pace is of those after it
        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
        self._bar = Bar(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> "Progress":
        self._bar.start()
        self._since = self.done, self.clock()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows that ``step`` (counted from 1; 0 is the evaluation before) is done, with its metrics under verl's names."""
        now = self.clock()
        known, then = self._since
        seconds = (now - then) / max(step - known, 1) * (self.total - step)
        self.left = format_seconds(seconds) if 0 < step < self.total else ""
        if step and self._first is None:  # which is slower than the others
            self._first, self._since = step, (step, now)
        self._bar.update(self._task, completed=step, description=f"{self.left} left" if self.left else "")
        evaluated = any(column.measured_apart and column.value(metrics) is not None for column in COLUMNS)
        due = self._printed is None or now - self._printed >= self.interval
        if due or evaluated or step == self._first or step >= self.total:
            self._printed = now
            for line in self.table.lines(step, metrics, self.left):
                self.note(line)
        absent = [name for name in self.further if name not in metrics and not name.startswith("val")]
        if step == self._first and absent:
            self.note(f"console-columns: the steps measure no {', '.join(absent)}, but {', '.join(sorted(metrics))}")

    def note(self, text: str) -> None:
        """A line that stays, above the bar if there is one."""
        _say(self.console, text)


LIBRARIES_FILE = "libraries.log"
LONGEST_WINDOW = 10
"""Steps at each end of a run over which the numbers of training, which are noisy, are averaged; less than half of a short run."""


def run_summary(rows: Sequence[Mapping[str, float]]) -> list[tuple[Column, float, float]]:
    """Before and after: the first and the last evaluation, and means over the first and the last steps of training.

    Args:
        rows: of ``metrics.jsonl``; the one of step 0 is the evaluation before the first step.

    >>> rows = [{"step": 0, "val/loss": 4.0}, {"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.0, "val/loss": 1.0}]
    >>> for column, before, after in run_summary(rows):
    ...     print(column.title, before, after)
    held-out loss 4.0 1.0
    loss 3.0 2.0
    """
    changes = []
    for column in (replace(each, unless="(?!)") for each in COLUMNS if each.in_summary):
        values = [value for row in rows if (value := column.value(row)) is not None]
        window = 1 if column.measured_apart else min(LONGEST_WINDOW, len(values) // 2)
        if len(values) > 1:
            changes.append((column, fmean(values[:window]), fmean(values[-window:])))
    return changes


def show_summary(directory: Path, seconds: float, console: Console | None = None) -> None:
    """Prints the table of a run that has ended or was interrupted, and why it does not learn, if the last steps show that.

    Args:
        seconds: how long this process trained.
    """
    rows = read_metrics(directory / METRICS_FILE)
    if not rows:
        return
    changes, lines = run_summary(rows), list[tuple[str, str]]()
    for column, *values in changes:
        cells = (f"{value:{column.form}}".rjust(10) for value in values)
        lines.append((max((column.heading(row) for row in rows), key=len), "  ".join(cells)))
    checkpoint = latest_checkpoint(directory.absolute())
    lines += [
        ("steps", f"{rows[-1]['step']:.0f}"),
        ("time", format_seconds(seconds)),
        ("report", str(directory / REPORT_FILE)),
        ("metrics", str(directory / METRICS_FILE)),
        ("checkpoint", str(checkpoint[1]) if checkpoint else "none"),
    ]
    if (directory / LIBRARIES_FILE).exists():
        lines.append(("warnings of libraries", str(directory / LIBRARIES_FILE)))
    lines = [("", f"{'before':>10}  {'after':>10}"), *lines] if changes else lines
    widest = max(len(name) for name, _ in lines)
    text = [f"{name:{widest}}  {value}" for name, value in lines]
    if measured := measured_step(rows):
        text.append(measured)
    text += [f"warning: {problem}" for problem in learning_problems(rows).values()]
    _say(console or Console(), "\n".join(["", *text]))


def _say(console: Console, text: str) -> None:
    """Prints a text as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
