"""Pictures for the README, the curves of a run and a few rollouts: ``python scripts/readme_pictures.py RUN``.

Several runs of one recipe, with other seeds, give one picture of their curves, medians and ranges:
``python scripts/readme_pictures.py RUN RUN RUN --curves docs/images/easy_vqa.png``.
"""

import argparse
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.watch.charts import smooth
from recipes.watch.metrics_file import read_metrics
from recipes.watch.rollout_files import RolloutSample, load_rollouts, rollout_steps

REWARD, ACCURACY = "#e0762f", "#2f6fde"
GOOD, BAD, SOFT = "#11783c", "#b3261e", "#5d6672"
LINES = 6


def plot_curves(runs: Sequence[Sequence[Mapping[str, float]]], path: str | Path) -> None:
    """Draws sampled reward and held-out accuracy over steps into an image file.

    Args:
        runs: the rows of each run, as of `read_metrics`. Of several runs lines are medians, and bands ranges.
    """
    figure = Figure(figsize=(8, 3.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    reward = [smooth(_points(rows, "critic/score/mean")) for rows in runs]
    if len(runs) == 1 and reward[0]:
        axes.plot(*zip(*_points(runs[0], "critic/score/mean"), strict=True), color=REWARD, alpha=0.25, linewidth=1)
    if all(reward):
        _line(axes, reward, color=REWARD, linewidth=2, label="reward of sampled responses")
    measured = re.compile(r"val-(?:core|aux)/(.*)/acc/mean@\d+")  # a recipe's controls are auxiliary
    names = dict.fromkeys(name for rows in runs for row in rows for name in row if measured.fullmatch(name))
    for index, name in enumerate(names):
        source, style = measured.sub(r"\1", name), ("-", "--", ":")[index % 3]
        points = [_points(rows, name) for rows in runs]
        label = f"held-out accuracy, {source}"
        _line(axes, points, linestyle=style, color=ACCURACY, marker="o", markersize=4, label=label)
    axes.set(xlabel="step", ylim=(-0.02, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(str(path))


def _line(axes: Axes, runs: Sequence[Sequence[tuple[float, float]]], **style: Any) -> None:
    """Draws the medians of points over the steps that all runs have, with a band from the lowest to the highest run."""
    found = [dict(points) for points in runs]
    steps = [step for step in found[0] if all(step in points for points in found)]
    values = [[points[step] for points in found] for step in steps]
    axes.plot(steps, [median(each) for each in values], **style)
    if len(found) > 1:
        low, high = ([choose(each) for each in values] for choose in (min, max))
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"), help="of the pictures of one run")
    parser.add_argument("--curves", type=Path, help="draw the curves alone, of all runs together, into this file")
    options = parser.parse_args()
    curves = [read_metrics(run / "metrics.jsonl") for run in options.runs]
    if options.curves or len(options.runs) > 1:
        plot_curves(curves, options.curves or options.folder / "curves.png")
        return
    steps, run = rollout_steps(options.runs[0]), options.runs[0]
    plot_curves(curves, options.folder / "curves.png")
    rollout_picture(load_rollouts(run, steps[0]), load_rollouts(run, steps[-1]), options.folder / "rollouts.png")


if __name__ == "__main__":
    main()
