"""The table at the end of a run: before and after, time in all, and where the files are."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from recipes.console.step_table import HELD_OUT_ACCURACY, HELD_OUT_LOSS, HELD_OUT_REWARD, LENGTH, LOSS, REWARD, Column
from recipes.report.charts import format_seconds
from recipes.report.metrics_file import METRICS_FILE, read_metrics
from recipes.report.page import REPORT_FILE
from workers.training.checkpoint import latest_checkpoint

EVALUATED = (HELD_OUT_ACCURACY, HELD_OUT_REWARD, HELD_OUT_LOSS)
TRAINED = (LOSS, REWARD, LENGTH)
LONGEST_WINDOW = 10
"""Steps at each end of a run over which the numbers of training, which are noisy, are averaged; less than half of a short run."""


Compare = Callable[[Sequence[Mapping[str, float]]], list[tuple[str, str, str]]]


@dataclass(frozen=True)
class Change:
    """A number at the beginning and at the end of a run."""

    name: str
    before: float
    after: float
    form: str


def run_summary(rows: Sequence[Mapping[str, float]]) -> list[Change]:
    """Before and after: the first and the last evaluation, and means over the first and the last steps of training.

    Args:
        rows: of ``metrics.jsonl``; the one of step 0 is the evaluation before the first step.

    >>> rows = [{"step": 0, "val/loss": 4.0}, {"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.0, "val/loss": 1.0}]
    >>> for change in run_summary(rows):
    ...     print(change.name, change.before, change.after)
    held-out loss 4.0 1.0
    loss 3.0 2.0
    """
    changes = []
    for column in EVALUATED:
        if len(values := _values(column, rows)) > 1:
            changes.append(Change(column.title, values[0], values[-1], column.form))
    for column in TRAINED:
        if len(values := _values(column, rows)) > 1:
            window = min(LONGEST_WINDOW, len(values) // 2)
            changes.append(Change(column.title, _mean(values[:window]), _mean(values[-window:]), column.form))
    return changes


def show_summary(
    directory: Path, seconds: float, console: Console | None = None, compared: Compare | None = None
) -> None:
    """Prints the table of a run that has ended or was interrupted.

    Args:
        seconds: how long this process trained.
        compared: from the rows of ``metrics.jsonl``, names with forecast and fact.
    """
    rows = read_metrics(directory / METRICS_FILE)
    if not rows:
        return
    changes = [(each.name, f"{each.before:{each.form}}", f"{each.after:{each.form}}") for each in run_summary(rows)]
    lines = [("", "before", "after"), *changes] if changes else []
    if compared is not None and (expected := compared(rows)):
        lines += [("", "forecast", "fact"), *expected]
    checkpoint = latest_checkpoint(directory.absolute())
    files = [
        ("steps", f"{rows[-1]['step']:.0f}"),
        ("time", format_seconds(seconds)),
        ("report", str(directory / REPORT_FILE)),
        ("metrics", str(directory / METRICS_FILE)),
        ("checkpoint", str(checkpoint[1]) if checkpoint else "none"),
    ]
    widest = max(len(line[0]) for line in [*lines, *files])
    text = [f"{name:{widest}}  {before:>10}  {after:>10}" for name, before, after in lines]
    text += [f"{name:{widest}}  {value}" for name, value in files]
    (console or Console()).print("\n".join(["", *text]), markup=False, highlight=False, soft_wrap=True)


def _values(column: Column, rows: Sequence[Mapping[str, float]]) -> list[float]:
    found = (column.value(row) for row in rows)
    return [value for value in found if value is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
