"""Several runs on one page: a table of their results and of the options that differ, and their curves over each other."""

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.options.config_file import CONFIG_FILE
from recipes.watch.charts import COLOURS, Series, line_chart
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from recipes.watch.pages import number, render
from recipes.watch.report import ACCURACY
from recipes.watch.trackers import flatten

Rows = Sequence[Mapping[str, float]]
COMPARED = {
    "Held-out accuracy": ACCURACY,
    "Held-out reward": "val-core/*/reward/mean@*",
    "Held-out loss": "val/loss",
    "Reward": "critic/score/mean",
    "Loss": "train/loss",
    "KL divergence": "actor/kl_loss",
    "Entropy": "actor/entropy",
    "Response length": "response_length/mean",
    "Seconds of a step": "timing_s/step",
}
OF_EACH_RUN = ("run.output_dir", "run.resume", "run.overwrite")
"""Options that say nothing of what a run does."""


def is_run(directory: Path) -> bool:
    """Whether a run has written into a directory."""
    return any((directory / name).is_file() for name in (CONFIG_FILE, METRICS_FILE))


def runs_in(directory: Path) -> list[Path]:
    """The runs that are folders of a directory, by name."""
    return [each for each in sorted(directory.glob("*/")) if is_run(each)]


def differing(options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The options that not all runs have alike, each with its value by the name of the run.

    >>> differing({"a": {"lr": 0.1, "seed": 0}, "b": {"lr": 0.2, "seed": 0}, "c": {"seed": 0}})
    {'lr': {'a': 0.1, 'b': 0.2, 'c': ''}}
    """
    names = dict.fromkeys(name for values in options.values() for name in values if name not in OF_EACH_RUN)
    found = {name: {run: values.get(name, "") for run, values in options.items()} for name in names}
    return {name: values for name, values in found.items() if len({str(each) for each in values.values()}) > 1}


def comparison(directory: Path) -> str:
    """The page of all runs in a directory; each chart shows at most `COLOURS` of them, those that wrote last.

    Raises:
        FileFormatError: a file of a run is damaged.
    """
    rows = {run.name: read_metrics(run / METRICS_FILE) for run in runs_in(directory)}
    files = {name: directory / name / CONFIG_FILE for name in rows}
    options = {name: flatten(json.loads(file.read_text())) if file.exists() else {} for name, file in files.items()}
    latest = sorted(rows, key=lambda name: -(directory / name).stat().st_mtime)[:COLOURS]
    lines = {
        title: {name: _points(found, pattern) for name, found in rows.items()} for title, pattern in COMPARED.items()
    }
    charts = []
    for title, each in lines.items():
        series = [Series(name, each[name]) for name in sorted(latest)]  # a run has one colour in all charts
        if drawing := line_chart(series, title == "Held-out accuracy", title):
            legend = [(line.label, number(line.points[-1][1]) if line.points else "") for line in series]
            charts.append({"title": title, "drawing": drawing, "legend": legend})
    results = {
        title: {name: number(points[-1][1]) for name, points in each.items() if points} for title, each in lines.items()
    }
    steps = {name: str(int(found[-1]["step"])) if found else "" for name, found in rows.items()}
    table = {"steps": steps} | {title: each for title, each in results.items() if each} | differing(options)
    return str(render("runs.html", title=directory.resolve().name, runs=list(rows), table=table, charts=charts))


def _points(rows: Rows, pattern: str) -> list[tuple[float, float]]:
    """The steps that have metrics of this pattern, with their means."""
    found = []
    for row in rows:
        values = [value for name, value in row.items() if fnmatchcase(name, pattern) and math.isfinite(value)]
        if values:
            found.append((row["step"], fmean(values)))
    return found
