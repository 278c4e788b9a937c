"""A run as one self-contained page, ``report.html`` in its directory, which a run writes at its end, and several runs on one.

It reads those of ``metrics.jsonl``, ``config.json``, ``environment.json`` and ``rollouts/`` that exist. All text that
comes from models and data is escaped; the page loads nothing and runs no code.
"""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from dataproto.errors import FileFormatError, raised_as
from dataproto.extras import installed_version
from recipes.options.config_file import CONFIG_FILE
from recipes.watch.charts import COLOURS, Series, line_chart
from recipes.watch.loggers import flatten
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from recipes.watch.pages import TEMPLATES, number, render, write_page
from recipes.watch.rollout_files import load_rollouts, rollout_steps
from recipes.watch.signals import learning_problems

Rows = Sequence[Mapping[str, float]]

ENVIRONMENT_FILE, REPORT_FILE = "environment.json", "report.html"
MAX_CARDS = 24
ACCURACY = "val-core/*/acc/mean@*"
PACKAGES = ("torch", "transformers", "tensordict", "numpy", "pillow", "vllm", "ray", "dataproto-vlm")


@dataclass(frozen=True)
class Chart:
    """A chart of some metrics: name patterns, each with the label of its line (``None``: the text that ``*`` matches)."""

    title: str
    note: str
    lines: Mapping[str, str | None]
    percent: bool = False


CHARTS = tuple(Chart(**each) for each in yaml.safe_load((TEMPLATES / "charts.yaml").read_text(encoding="utf-8")))
NOT_OF_THE_REWARD = {f"reward/{name}" for name in ("acc", "equal_groups_ratio", "greedy_baseline", "overlong_penalty")}
"""Metrics that have charts of their own, or that a step adds."""


COMPARED: dict[str, str] = yaml.safe_load((TEMPLATES / "compared.yaml").read_text(encoding="utf-8"))
OF_EACH_RUN = ("run.output_dir", "run.resume", "run.overwrite")
"""Options that say nothing of what a run does."""


def write_report(run_dir: str | Path) -> Path:
    """Writes ``report.html`` into a run's directory and returns its path.

    Raises:
        FileFormatError: the directory is missing, or a file in it is damaged.
        FileNotWritten: the disk is full, say.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileFormatError(f"{run_dir} is not the directory of a run")
    rows = read_metrics(run_dir / METRICS_FILE)
    recorded = _read_json(run_dir / ENVIRONMENT_FILE)
    values = {name: [value for _, value in _finite(rows, name)] for name in _names(rows, "*") if name != "step"}
    return write_page(
        run_dir / REPORT_FILE,
        "report.html",
        title=run_dir.resolve().name,
        rows=rows,
        curves=curves(rows),
        answers=_answers(run_dir),
        tables={
            "Configuration": flatten(_read_json(run_dir / CONFIG_FILE)),
            "Environment" if recorded else "Environment of this report": flatten(recorded or environment()),
        },
        metrics={name: found for name, found in values.items() if found},
    )


def curves(rows: Rows) -> str:
    """A run's most important numbers, and its curves, as HTML for a page that has the report's style."""
    charts = [
        each
        for chart in (*CHARTS, *_reward_charts(rows))
        for each in _pictures(chart.title, _series(rows, chart), chart.percent, chart.note)
    ]
    values = {
        name: [value for _, value in _finite(rows, name)]
        for name in ("critic/score/mean", "val/loss", "timing_s/step", "perf/time_per_step", "perf/throughput")
    }
    accuracies = list(held_out_accuracy(rows).items())[:3]
    problems = list(learning_problems(rows).values())
    return render(
        "curves.html", rows=rows, accuracies=accuracies, values=values, charts=charts, problems=problems
    ).strip()


def _pictures(title: str, series: Sequence[Series], percent: bool = False, note: str = "") -> list[dict[str, Any]]:
    """What a page shows of a chart: its lines, and the last value of each; nothing if there is no finite value."""
    if not (drawing := line_chart(series, percent, title)):
        return []
    last = [(line.label, line.points[-1][1] if line.points else None) for line in series]
    named = [(name, "" if y is None else f"{y * 100:.1f}%" if percent else number(y)) for name, y in last]
    return [{"title": title, "note": note, "drawing": drawing, "legend": named}]


def _reward_charts(rows: Rows) -> list[Chart]:
    """A chart of each number that the reward gives next to the score."""
    names = [name.removeprefix("reward/") for name in _names(rows, "reward/*") if name not in NOT_OF_THE_REWARD]
    return [
        Chart(
            f"Reward: {name}",
            "Mean of the sampled responses, and of held-out answers",
            {f"reward/{name}": "training", f"val-aux/*/{name}/mean@*": None},
        )
        for name in names
    ]


def environment() -> dict[str, str]:
    """Versions of Python and of the packages that a run depends on, for ``environment.json``."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    return found | {name: each for name in PACKAGES if (each := installed_version(name)) is not None}


def held_out_accuracy(rows: Rows) -> dict[str, tuple[float, float]]:
    """For each held-out set, the first and the last accuracy."""
    found = {_star(ACCURACY, name): _finite(rows, name) for name in _names(rows, ACCURACY)}
    return {name: (values[0][1], values[-1][1]) for name, values in found.items() if values}


def _answers(run_dir: Path) -> dict[str, Any] | None:
    """The problems of the first evaluation with its answers and those of the last one, and how many became right or wrong."""
    steps = rollout_steps(run_dir)
    if not steps:
        return None
    before, after = ({sample.key: sample for sample in load_rollouts(run_dir, step)} for step in (steps[0], steps[-1]))
    pairs = [(before[key], after[key]) for key in before if key in after]
    verdicts = [(first.accuracy, last.accuracy) for first, last in pairs]
    judged = [(a >= 0.5, b >= 0.5) for a, b in verdicts if a is not None and b is not None]
    found = {"judged": len(judged), "gained": judged.count((False, True)), "lost": judged.count((True, False))}
    return found | {"first": steps[0], "last": steps[-1], "pairs": pairs[:MAX_CARDS]}


def _series(rows: Rows, chart: Chart) -> list[Series]:
    """The lines of a chart, at most `COLOURS`, without rare metrics; the matches of ``*`` are in descending order."""
    lines = []
    for pattern, label in chart.lines.items():
        found = [Series(label or _star(pattern, name), _finite(rows, name)) for name in _names(rows, pattern)]
        often = max((len(line.points) for line in found), default=0) / 2  # rare metrics would hide the rest
        lines += sorted((line for line in found if len(line.points) > often), key=lambda line: -line.points[-1][1])
    return lines[:COLOURS]


def _names(rows: Rows, pattern: str) -> list[str]:
    """The metrics that match, in the order in which they first appear."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if fnmatchcase(name, pattern)]


def _star(pattern: str, name: str) -> str:
    """The text that the first ``*`` of a pattern matches in a name.

    >>> _star("val-core/*/acc/mean@*", "val-core/geo/3k/acc/mean@1")
    'geo/3k'
    """
    before, after = pattern.split("*")[:2]
    end = name.rindex(after) if after else len(name)
    return name[len(before) : end]


def _finite(rows: Rows, name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]


def _read_json(path: Path) -> dict[str, Any]:
    with raised_as(FileFormatError, f"{path}: not JSON", ValueError):
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found if isinstance(found, dict) else {"value": found}


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
    options = {name: flatten(_read_json(directory / name / CONFIG_FILE)) for name in rows}
    latest = sorted(rows, key=lambda name: -(directory / name).stat().st_mtime)[:COLOURS]
    lines = {
        title: {name: _points(found, pattern) for name, found in rows.items()} for title, pattern in COMPARED.items()
    }
    charts = []
    for title, each in lines.items():
        series = [Series(name, each[name]) for name in sorted(latest)]  # a run has one colour in all charts
        charts += _pictures(title, series, title == "Held-out accuracy")
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
