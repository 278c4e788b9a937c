"""A run as one self-contained page: ``dataproto report RUN_DIR`` writes ``RUN_DIR/report.html``.

It reads those of ``metrics.jsonl``, ``config.json``, ``environment.json`` and ``rollouts/`` that exist. All text that
comes from models and data is escaped; the page loads nothing and runs no code.
"""

import base64
import io
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

from PIL import Image

from dataproto.errors import DataProtoError, FileFormatError, writing
from recipes.options.config_file import CONFIG_FILE
from recipes.watch.charts import COLOURS, Series, format_seconds, line_chart, number, safe_text
from recipes.watch.confusion import MOST, Confusion, confusion_picture, latest_confusion
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from recipes.watch.rollout_files import RolloutSample, load_rollouts, rollout_steps
from recipes.watch.style import PAGE, STYLE

Rows = Sequence[Mapping[str, float]]

ENVIRONMENT_FILE, REPORT_FILE = "environment.json", "report.html"
MAX_CARDS = 24
TINY = 160  # pictures narrower than this are shown enlarged
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
    steps = rollout_steps(run_dir)
    shown = {step: load_rollouts(run_dir, step) for step in dict.fromkeys([*steps[:1], *steps[-1:]])}
    config = _read_json(run_dir / CONFIG_FILE)
    recorded = _read_json(run_dir / ENVIRONMENT_FILE)
    body = [
        curves(rows),
        _rollouts(shown),
        _confusion(latest_confusion(run_dir)),
        _table("Configuration", _flatten(config)),
        _table("Environment" if recorded else "Environment of this report", _flatten(recorded or environment())),
        _metrics_table(rows),
    ]
    page = PAGE.substitute(
        title=safe_text(run_dir.resolve().name),
        subtitle=_subtitle(rows),
        style=STYLE,
        body="\n".join(filter(None, body)),
    )
    path, temporary = run_dir / REPORT_FILE, run_dir / f"{REPORT_FILE}.tmp"
    with writing(path, temporary):
        temporary.write_text(page, encoding="utf-8", errors="replace")
        return temporary.replace(path)


def curves(rows: Rows) -> str:
    """A run's most important numbers, and its curves, as HTML for a page that has the report's `STYLE`."""
    return "\n".join(filter(None, [_tiles(rows), section_html("Curves", "", _charts(rows), "charts")]))


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


def _tiles(rows: Rows) -> str:
    tiles = []
    for source, (before, after) in list(held_out_accuracy(rows).items())[:3]:
        change = (after - before) * 100
        way = "up" if change > 0 else "down" if change < 0 else "soft"
        text = f'{before * 100:.1f}% → {after * 100:.1f}% <small class="{way}">{change:+.1f}</small>'
        tiles.append(_tile(f"Held-out accuracy, {source}", text, "wide"))
    for name, metric in (("Sampled reward", "critic/score/mean"), ("Held-out loss", "val/loss")):
        if values := _finite(rows, metric):
            tiles.append(_tile(name, f"{values[0][1]:.2f} → {values[-1][1]:.2f}"))
    if rows:
        tiles.append(_tile("Steps", f"{int(rows[-1]['step']):,}"))
    if seconds := [value for _, value in _finite(rows, "timing_s/step") or _finite(rows, "perf/time_per_step")]:
        total = math.fsum(seconds)
        tiles.append(
            _tile("Time in steps", f"{format_seconds(total)} <small>{total / len(seconds):.2f} s each</small>")
        )
    if speed := _finite(rows, "perf/throughput"):
        tiles.append(
            _tile("Tokens per second and device", f"{math.fsum(value for _, value in speed) / len(speed):,.0f}")
        )
    return f'<div class="grid tiles">{"".join(tiles)}</div>' if tiles else ""


def _charts(rows: Rows) -> list[str]:
    cards = []
    for chart in CHARTS:
        series = _series(rows, chart)
        if drawing := line_chart(series, chart.percent, chart.title):
            legend = "".join(_legend(line, index % COLOURS, chart.percent) for index, line in enumerate(series))
            cards.append(
                f'<div class="card"><h3>{chart.title}</h3><p class="soft">{chart.note}</p>{drawing}'
                f'<ul class="legend">{legend}</ul></div>'
            )
    return cards


def _series(rows: Rows, chart: Chart) -> list[Series]:
    """The lines of a chart, at most `COLOURS`, without rare metrics; the matches of ``*`` are in descending order."""
    lines = []
    for pattern, label in chart.lines.items():
        found = [Series(label or _star(pattern, name), _finite(rows, name)) for name in _names(rows, pattern)]
        often = max((len(line.points) for line in found), default=0) / 2  # rare metrics would hide the rest
        lines += sorted((line for line in found if len(line.points) > often), key=lambda line: -line.points[-1][1])
    return lines[:COLOURS]


def _legend(line: Series, colour: int, percent: bool) -> str:
    last = line.points[-1][1]
    shown = f"{last * 100:.1f}%" if percent else number(last)
    return f'<li class="c{colour}">{safe_text(line.label)} <b>{shown}</b></li>'


def _rollouts(shown: Mapping[int, Sequence[RolloutSample]]) -> str:
    """Cards of the problems of the first evaluation, with the answers of the last one beside."""
    if not shown:
        return ""
    first, last = min(shown), max(shown)
    problems = {sample.key: sample for sample in shown[first]}
    if first == last:
        cards = [_card([("", first, sample)]) for sample in list(problems.values())[:MAX_CARDS]]
        return section_html("Rollouts", f"Held-out problems, answered at step {first}.", cards, "cards")
    later = {sample.key: sample for sample in shown[last]}
    pairs = [(sample, later[key]) for key, sample in problems.items() if key in later]
    cards = [_card([("Before", first, before), ("After", last, after)]) for before, after in pairs[:MAX_CARDS]]
    note = f"The first {len(cards)} held-out problems, as they come. {_change(pairs)}"
    return section_html("Rollouts before and after", note, cards, "cards")


def _change(pairs: Sequence[tuple[RolloutSample, RolloutSample]]) -> str:
    verdicts = [(a.accuracy, b.accuracy) for a, b in pairs]
    judged = [(a >= 0.5, b >= 0.5) for a, b in verdicts if a is not None and b is not None]
    if not judged:
        return ""
    gained, lost = judged.count((False, True)), judged.count((True, False))
    return f"Of the {len(judged)} problems kept, {gained} went from wrong to right and {lost} from right to wrong."


def _confusion(found: tuple[int, Confusion] | None) -> str:
    """The confusion of classes at the last evaluation."""
    if found is None:
        return ""
    step, confusion = found
    drawn = f"; the first {MOST} are drawn" if len(confusion.classes) > MOST else ""
    note = (
        f"{len(confusion.classes)} classes downwards, answers to the right, the last column for every other answer, at step "
        f"{step}{drawn}. {confusion.accuracy * 100:.1f}% are right."
    )
    mistakes = "".join(
        f"<li>{safe_text(truth)} taken for {safe_text(answer)}: {count}</li>"
        for truth, answer, count in confusion.worst()
    )
    card = f'<div class="card">{confusion_picture(confusion)}{f"<ul>{mistakes}</ul>" if mistakes else ""}</div>'
    return section_html("Confusion", note, [card], "wide")


def _card(answers: Sequence[tuple[str, int, RolloutSample]]) -> str:
    problem = answers[0][2]
    pictures = "".join(picture_html(image) for image in problem.images if not problem.actions)
    pictures = f'<div class="pictures">{pictures}</div>' if pictures else ""
    return (
        f'<article class="card rollout"><div class="top">{pictures}<div class="question">'
        f'<p class="prompt">{safe_text(problem.prompt)}</p>'
        f'<p class="truth"><span class="soft">Answer</span> <b>{safe_text(problem.ground_truth)}</b></p></div></div>'
        f'<div class="answers">{"".join(_answer(*answer) for answer in answers)}</div></article>'
    )


def _answer(when: str, step: int, sample: RolloutSample) -> str:
    badge = ""
    if sample.accuracy is not None:
        right = sample.accuracy >= 0.5
        badge = f'<span class="badge {"good" if right else "bad"}">{"correct" if right else "incorrect"}</span>'
    title = f"<b>{when}</b> " if when else ""
    said = _strip(sample) if sample.actions else f"<pre>{safe_text(sample.response) or '<i>(empty)</i>'}</pre>"
    return (
        f'<section class="answer"><header><span class="when">{title}<span class="soft">step {step}</span></span>{badge}'
        f'<span class="badge">reward {number(sample.reward)}</span></header>{said}</section>'
    )


def _strip(sample: RolloutSample) -> str:
    """The turns of an episode side by side. With one picture a turn each has its own, else the pictures come first."""
    paired = len(sample.images) == len(sample.actions)
    pictures = [picture_html(image) for image in sample.images]
    shown = pictures if paired else [""] * len(sample.actions)
    turns = [
        f"<figure>{picture}<figcaption>{safe_text(action) or '<i>(empty)</i>'}</figcaption></figure>"
        for picture, action in zip(shown, sample.actions, strict=True)
    ]
    return f'<div class="strip">{"" if paired else "".join(pictures)}{"".join(turns)}</div>'


def picture_html(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    kind = ' class="tiny"' if image.width < TINY else ""
    size = f'width="{image.width}" height="{image.height}"'
    return f'<img{kind} src="data:image/png;base64,{data}" {size} alt="picture of the problem">'


def _metrics_table(rows: Rows) -> str:
    lines = []
    for name in _names(rows, "*"):
        values = [value for _, value in _finite(rows, name)]
        if name != "step" and values:
            cells = (values[0], values[-1], min(values), max(values))
            lines.append(
                f"<tr><td>{safe_text(name)}</td>{''.join(f'<td>{number(value)}</td>' for value in cells)}</tr>"
            )
    if not lines:
        return ""
    heads = "".join(f"<th>{head}</th>" for head in ("metric", "first", "last", "lowest", "highest"))
    return (
        f'<details class="card"><summary>All {len(lines)} metrics</summary><div class="scroll">'
        f'<table class="numbers"><tr>{heads}</tr>{"".join(lines)}</table></div></details>'
    )


def _table(title: str, entries: Mapping[str, Any]) -> str:
    if not entries:
        return ""
    lines = "".join(
        f"<tr><th>{safe_text(name)}</th><td>{safe_text(value)}</td></tr>" for name, value in entries.items()
    )
    return f'<details class="card"><summary>{title}</summary><div class="scroll"><table>{lines}</table></div></details>'


def section_html(title: str, note: str, cards: Sequence[str], kind: str) -> str:
    if not cards:
        return ""
    note = f'<p class="soft">{note}</p>' if note else ""
    return f'<h2>{title}</h2>{note}<div class="grid {kind}">{"".join(cards)}</div>'


def _tile(name: str, value: str, kind: str = "") -> str:
    return f'<div class="card tile {kind}"><p class="soft">{safe_text(name)}</p><div class="value">{value}</div></div>'


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
