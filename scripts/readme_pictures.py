"""Pictures of a run for the README, its reward curve and a few rollouts: ``python scripts/readme_pictures.py RUN [FOLDER]``."""

import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.report.charts import smooth
from recipes.report.metrics_file import read_metrics
from recipes.report.samples import RolloutSample, load_rollouts, rollout_steps

REWARD, ACCURACY = "#e0762f", "#2f6fde"
GOOD, BAD, SOFT = "#11783c", "#b3261e", "#5d6672"
LINES = 6


def plot_curves(rows: Sequence[Mapping[str, float]], path: str | Path) -> None:
    """Draws sampled reward and held-out accuracy over steps into an image file; ``rows`` as of
    `recipes.report.read_metrics`.
    """
    figure = Figure(figsize=(8, 3.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if reward := _points(rows, "critic/score/mean"):
        axes.plot(*zip(*reward, strict=True), color=REWARD, alpha=0.25, linewidth=1)
        axes.plot(*zip(*smooth(reward), strict=True), color=REWARD, linewidth=2, label="reward of sampled responses")
    measured = re.compile(r"val-(?:core|aux)/(.*)/acc/mean@\d+")  # a recipe's controls are auxiliary
    names = dict.fromkeys(name for row in rows for name in row if measured.fullmatch(name))
    for index, name in enumerate(names):
        source = measured.sub(r"\1", name)
        points, style = _points(rows, name), ("-", "--", ":")[index % 3]
        axes.plot(
            *zip(*points, strict=True),
            style,
            color=ACCURACY,
            marker="o",
            markersize=4,
            label=f"held-out accuracy, {source}",
        )
    axes.set(xlabel="step", ylim=(-0.02, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(str(path))


def rollout_picture(
    before: Sequence[RolloutSample], after: Sequence[RolloutSample], path: str | Path, count: int = 4
) -> None:
    """Draws the first ``count`` problems with their answers before and after training into an image file."""
    later = {sample.key: sample for sample in after}
    pairs = [(sample, later[sample.key]) for sample in before if sample.key in later][:count]
    figure = Figure(figsize=(max(2.4 * len(pairs), 2.4), 4.4), dpi=150, layout="constrained")
    grid = figure.subplots(2, max(len(pairs), 1), squeeze=False, height_ratios=(3, 1.8))
    for axes in grid.flat:
        axes.axis("off")
    for column, (first, last) in enumerate(pairs):
        picture, text = grid[:, column]
        if first.images:
            picture.imshow(first.images[0])
        picture.set_title(_wrapped(first.prompt, 34, 3), fontsize=8, parse_math=False)
        down = _write(text, 1.0, f"answer: {first.ground_truth}", "black", 1)
        down = _write(text, down, f"before: {first.response or '(empty)'}", _colour(first), 3)
        _write(text, down, f"after:  {last.response or '(empty)'}", _colour(last), 3)
    figure.savefig(str(path), bbox_inches="tight")


def _colour(sample: RolloutSample) -> str:
    if sample.accuracy is None:
        return SOFT
    return GOOD if sample.accuracy >= 0.5 else BAD


def _write(axes: Axes, down: float, text: str, colour: str, lines: int) -> float:
    """Writes at a height (1: top, 0: bottom) and returns the height below."""
    shown = _wrapped(text, 28, lines)
    axes.text(
        0,
        down,
        shown,
        transform=axes.transAxes,
        va="top",
        family="monospace",
        fontsize=7.5,
        color=colour,
        parse_math=False,
    )
    return down - 0.115 * (shown.count("\n") + 1) - 0.05


def _wrapped(text: str, width: int, lines: int) -> str:
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return "\n".join(textwrap.wrap(printable, width, max_lines=lines, placeholder=" …"))


def _points(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]


def main(run: str, folder: str = "docs/images") -> None:
    steps = rollout_steps(run)
    plot_curves(read_metrics(Path(run) / "metrics.jsonl"), Path(folder) / "curves.png")
    rollout_picture(load_rollouts(run, steps[0]), load_rollouts(run, steps[-1]), Path(folder) / "rollouts.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
