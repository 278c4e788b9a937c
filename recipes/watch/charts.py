"""Line charts as inline SVG, whose colours are those of the page's style, so that one chart suits light and dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from recipes.watch.pages import number, render

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 26
COLOURS = 6  # the page's style defines --c0 to --c5
MAX_POINTS = 300
MAX_MARKS = 40
RAW_POINTS = 25  # longer lines are shown smoothed, over the raw one, which is faint

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A named line, with a gap where a value is not finite."""

    label: str
    points: Sequence[tuple[float, float]]  # (step, value), steps rising


def line_chart(series: Sequence[Series], percent: bool = False, label: str = "") -> str:
    """An SVG of the lines, or an empty string if there is no finite value.

    Args:
        series: in the order of the page's colours.
        percent: the values are shares of 1; the axis spans 0 to 100 %.
        label: what a screen reader calls the chart.
    """
    lines = [thin([point for point in line.points if math.isfinite(point[1])]) for line in series]
    values = [y for line in lines for _, y in line]
    if not values:
        return ""
    steps = [x for line in lines for x, _ in line]
    x_low, x_high = min(steps), max(max(steps), min(steps) + 1)
    y_ticks = [0, 0.25, 0.5, 0.75, 1] if percent else ticks(min(values), max(values))
    y_low, y_high = min(y_ticks[0], min(values)), max(y_ticks[-1], max(values))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    def name(y: float) -> str:
        return f"{y * 100:.0f}%" if percent else number(y)

    return render(
        "chart.svg",
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        label=label,
        rows=[(place(x_low, y)[1], name(y)) for y in y_ticks],
        columns=[
            (place(x, y_low)[0], number(x)) for x in ticks(x_low, x_high, 5) if x_low <= x <= x_high and x % 1 == 0
        ],
        lines=[_line(line, place, name) for line in lines],
    )


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers, about ``count`` steps of 1, 2 or 5 times a power of ten, that enclose low and high.

    >>> ticks(0.13, 0.92)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(3, 3)
    [2.5, 3.0, 3.5]
    """
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-200):  # as good as equal
        margin = size / 6 if size > 1e-200 else 0.5
        low, high = low - margin, high + margin
        count = 2
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(index * step, digits) + 0.0 for index in range(first, last + 1)]


def smooth(points: Sequence[tuple[float, float]]) -> Points:
    """Means over a centred window of about a tenth of the points, half as wide at the ends. Centred, so it does not lag.

    >>> smooth([(0, 0.0), (1, 3.0), (2, 0.0), (3, 3.0)])
    [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    """
    reach, last = max(1, len(points) // 20), len(points) - 1
    reaches = [max(min(reach, index, last - index), reach // 2) for index in range(len(points))]
    windows = [points[max(index - near, 0) : index + near + 1] for index, near in enumerate(reaches)]
    return [(x, fmean(y for _, y in window)) for (x, _), window in zip(points, windows, strict=True)]


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> Points:
    """At most ``limit`` points: means of equally many neighbouring points.

    >>> thin([(0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0)], limit=2)
    [(0.5, 2.0), (2.5, 6.0)]
    """
    if len(points) <= limit:
        return list(points)
    bounds = [round(index * len(points) / limit) for index in range(limit + 1)]
    parts = [points[start:end] for start, end in pairwise(bounds)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def _line(
    points: Points, place: Callable[[float, float], tuple[float, float]], name: Callable[[float], str]
) -> dict[str, Any]:
    """What the template draws of a line: its corners, those before smoothing if it is long, and marks with their texts."""

    def corners(path: Points) -> str:
        return " ".join("{},{}".format(*place(x, y)) for x, y in path)

    noisy = len(points) > RAW_POINTS
    marks = points[:: math.ceil(len(points) / MAX_MARKS) or 1]
    return {
        "raw": corners(points) if noisy else "",
        "points": corners(smooth(points) if noisy else points),
        "marks": [(*place(x, y), f"step {number(x)}: {name(y)}") for x, y in marks],
    }
