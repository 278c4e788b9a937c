"""A run as one self-contained page: ``dataproto report RUN_DIR`` writes ``RUN_DIR/report.html``.

It reads those of ``metrics.jsonl``, ``config.json``, ``environment.json`` and ``rollouts/`` that exist. All text that
comes from models and data is escaped; the page loads nothing and runs no code.
"""

import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

from dataproto.errors import DataProtoError, FileFormatError
from recipes.options.config_file import CONFIG_FILE
from recipes.watch.charts import COLOURS, Series, line_chart
from recipes.watch.confusion import MOST, confusion_picture, latest_confusion
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from recipes.watch.pages import format_seconds, number, render, write_page
from recipes.watch.rollout_files import RolloutSample, load_rollouts, rollout_steps

Rows = Sequence[Mapping[str, float]]

ENVIRONMENT_FILE, REPORT_FILE = "environment.json", "report.html"
MAX_CARDS = 24
ACCURACY, CONTROL = "val-core/*/acc/mean@*", "val-aux/*/acc/mean@*"
PACKAGES = ("torch", "transformers", "tensordict", "numpy", "pillow", "vllm", "ray", "dataproto-vlm")


@dataclass(frozen=True)
class Chart:
    """A chart of some metrics: name patterns, each with the label of its line (``None``: the text that ``*`` matches)."""

    title: str
    note: str
    lines: Mapping[str, str | None]
    percent: bool = False


CHARTS = (
    Chart("Held-out accuracy", "Answers to problems never trained on", {ACCURACY: None}, percent=True),
    Chart("Controls", "The same answers where pictures tell nothing", {CONTROL: None}, percent=True),
    Chart("Loss", "Of the tokens to be learnt, each in nats", {"train/loss": "training"}),
    Chart("Held-out loss", "The same, of rows never trained on", {"val/loss": "held out"}),
    Chart(
        "Reward",
        "Mean of the sampled responses",
        {"critic/score/mean": "reward", "reward/acc": "right answers"},
    ),
    Chart(
        "KL divergence",
        "Per token: to the reference, and of one update",
        {"actor/kl_loss": "reference", "actor/ppo_kl": "update"},
    ),
    Chart("Entropy", "Of the policy, per token, in nats", {"actor/entropy": "entropy"}),
    Chart(
        "Engine and actor",
        "Difference of their log-probs of the sampled tokens, in nats",
        {
            "training/rollout_probs_diff_log_mean": "mean",
            "training/rollout_probs_diff_log_p99": "99 %",
            "training/rollout_probs_diff_log_max": "largest",
        },
    ),
    Chart(
        "Staleness",
        "Updates between the weights that sampled a token and those that learn from it",
        {"training/staleness/mean": "mean", "training/staleness/max": "largest"},
    ),
    Chart("Turns", "Of an episode", {"episode/turns/mean": "mean", "episode/turns/max": "most"}),
    Chart("Ends of episodes", "Share of the sampled ones", {"episode/ended/*": None}, percent=True),
    Chart(
        "Response length",
        "Tokens",
        {"response_length/mean": "mean", "response_length/max": "longest", "response_length/min": "shortest"},
    ),
    Chart("Time", "Seconds in each stage of a step", {"timing_s/*": None}),
    Chart("Gradient norm", "Before clipping", {"actor/grad_norm": "norm"}),
    Chart(
        "Clipped",
        "Share of tokens, and of responses cut at the length limit",
        {
            "actor/pg_clipfrac": "policy ratio",
            "actor/pg_clipfrac_lower": "dual clip",
            "response_length/clip_ratio": "length",
        },
    ),
    Chart("Learning rate", "Of the last update in a step", {"actor/lr": "rate"}),
    Chart("Throughput", "Tokens per second and device", {"perf/throughput": "tokens/s"}),
)


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
        subtitle=_subtitle(rows),
        curves=curves(rows),
        rollouts=_rollouts(run_dir),
        confusion=_confusion(run_dir),
        tables={
            "Configuration": _flatten(_read_json(run_dir / CONFIG_FILE)),
            "Environment" if recorded else "Environment of this report": _flatten(recorded or environment()),
        },
        metrics={name: found for name, found in values.items() if found},
    )


def curves(rows: Rows) -> str:
    """A run's most important numbers, and its curves, as HTML for a page that has the report's style."""
    charts = []
    for chart in CHARTS:
        series = _series(rows, chart)
        if drawing := line_chart(series, chart.percent, chart.title):
            last = [(line.label, line.points[-1][1]) for line in series]
            legend = [(label, f"{value * 100:.1f}%" if chart.percent else number(value)) for label, value in last]
            charts.append({"title": chart.title, "note": chart.note, "drawing": drawing, "legend": legend})
    return render("curves.html", tiles=list(_tiles(rows)), charts=charts).strip()


def environment() -> dict[str, str]:
    """Versions of Python and of the packages that a run depends on, for ``environment.json``."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def held_out_accuracy(rows: Rows) -> dict[str, tuple[float, float]]:
    """For each held-out set, the first and the last accuracy."""
    found = {}
    for name in _names(rows, ACCURACY):
        values = _finite(rows, name)
        if values:
            found[_star(ACCURACY, name)] = (values[0][1], values[-1][1])
    return found


def _tiles(rows: Rows) -> Iterator[dict[str, str]]:
    """The most important numbers, each with its name."""

    def tile(name: str, value: str, note: str = "", way: str = "", kind: str = "") -> dict[str, str]:
        return {"name": name, "value": value, "note": note, "way": way, "kind": kind}

    for source, (before, after) in list(held_out_accuracy(rows).items())[:3]:
        change = (after - before) * 100
        way = "up" if change > 0 else "down" if change < 0 else "soft"
        text = f"{before * 100:.1f}% → {after * 100:.1f}%"
        yield tile(f"Held-out accuracy, {source}", text, f"{change:+.1f}", way, "wide")
    for name, metric in (("Sampled reward", "critic/score/mean"), ("Held-out loss", "val/loss")):
        if values := _finite(rows, metric):
            yield tile(name, f"{values[0][1]:.2f} → {values[-1][1]:.2f}")
    if rows:
        yield tile("Steps", f"{int(rows[-1]['step']):,}")
    if seconds := [value for _, value in _finite(rows, "timing_s/step") or _finite(rows, "perf/time_per_step")]:
        total = math.fsum(seconds)
        yield tile("Time in steps", format_seconds(total), f"{total / len(seconds):.2f} s each")
    if speeds := [value for _, value in _finite(rows, "perf/throughput")]:
        yield tile("Tokens per second and device", f"{math.fsum(speeds) / len(speeds):,.0f}")


def _rollouts(run_dir: Path) -> dict[str, Any] | None:
    """Cards of the problems of the first evaluation, each with the answers of the last one next to it."""
    steps = rollout_steps(run_dir)
    if not steps:
        return None
    first, last = steps[0], steps[-1]
    problems = {sample.key: sample for sample in load_rollouts(run_dir, first)}
    if first == last:
        cards = [[("", first, sample)] for sample in list(problems.values())[:MAX_CARDS]]
        return {"title": "Rollouts", "note": f"Held-out problems, answered at step {first}.", "cards": cards}
    later = {sample.key: sample for sample in load_rollouts(run_dir, last)}
    pairs = [(sample, later[key]) for key, sample in problems.items() if key in later]
    compared = [[("Before", first, before), ("After", last, after)] for before, after in pairs[:MAX_CARDS]]
    note = f"The first {len(compared)} held-out problems, as they come. {_change(pairs)}"
    return {"title": "Rollouts before and after", "note": note, "cards": compared}


def _change(pairs: Sequence[tuple[RolloutSample, RolloutSample]]) -> str:
    verdicts = [(a.accuracy, b.accuracy) for a, b in pairs]
    judged = [(a >= 0.5, b >= 0.5) for a, b in verdicts if a is not None and b is not None]
    if not judged:
        return ""
    gained, lost = judged.count((False, True)), judged.count((True, False))
    return f"Of the {len(judged)} problems kept, {gained} went from wrong to right and {lost} from right to wrong."


def _confusion(run_dir: Path) -> dict[str, Any] | None:
    """The confusion of classes at the last evaluation."""
    found = latest_confusion(run_dir)
    if found is None:
        return None
    step, confusion = found
    shown = f"; the first {MOST} are shown" if len(confusion.classes) > MOST else ""
    note = (
        f"{len(confusion.classes)} classes downwards, answers to the right, the last column for every other answer, at step "
        f"{step}{shown}. {confusion.accuracy * 100:.1f}% are right."
    )
    return {"note": note, "drawing": confusion_picture(confusion), "worst": confusion.worst()}


def _series(rows: Rows, chart: Chart) -> list[Series]:
    """The lines of a chart, at most `COLOURS`, without rare metrics; the matches of ``*`` are in descending order."""
    lines = []
    for pattern, label in chart.lines.items():
        found = [Series(label or _star(pattern, name), _finite(rows, name)) for name in _names(rows, pattern)]
        often = max((len(line.points) for line in found), default=0) / 2  # rare metrics would hide the rest
        lines += sorted((line for line in found if len(line.points) > often), key=lambda line: -line.points[-1][1])
    return lines[:COLOURS]


def _subtitle(rows: Rows) -> str:
    if not rows:
        return "No step has been recorded yet."
    return f"{len(rows):,} rows of metrics, steps {int(rows[0]['step']):,} to {int(rows[-1]['step']):,}"


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


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """
    >>> _flatten({"model": {"path": "x", "sizes": [1, 2]}, "seed": 0})
    {'model.path': 'x', 'model.sizes': [1, 2], 'seed': 0}
    """
    if not isinstance(value, Mapping):
        return {prefix: value}
    entries = (_flatten(inner, f"{prefix}.{name}" if prefix else str(name)) for name, inner in value.items())
    return {name: inner for part in entries for name, inner in part.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise FileFormatError(f"{path}: not JSON ({error})") from error
    return found if isinstance(found, dict) else {"value": found}


HELP = """usage: dataproto report RUN_DIR

Writes RUN_DIR/report.html, the page that shows a run; a run writes it at its end too.

  RUN_DIR                     the --output-dir of the run"""


def main(arguments: Sequence[str]) -> int:
    """Writes the page, prints its path, and returns the exit status."""
    paths = list(arguments)
    if {"-h", "--help", "--help-all"} & {*paths}:
        print(HELP)
        return 0
    if len(paths) != 1 or paths[0].startswith("-"):
        print(HELP.splitlines()[0], file=sys.stderr)
        return 2
    try:
        print(write_report(paths[0]))
    except (DataProtoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
