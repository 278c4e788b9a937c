"""Line charts as inline SVG: text and lines take their colours from the page's style, so one chart suits light and dark."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 26
MAX_TEXT = 4000
COLOURS = 6  # the page's style defines --c0 to --c5
MAX_POINTS = 300
MAX_MARKS = 40
RAW_POINTS = 25  # longer lines are drawn smoothed, with the raw one faint behind

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A named line, with a gap where a value is not finite."""

    label: str
    points: Sequence[tuple[float, float]]  # (step, value), steps rising


def line_chart(series: Sequence[Series], percent: bool = False, label: str = "") -> str:
    """An SVG of the lines, or an empty string if there is no finite value.

    Args:
        series: drawn in the order of the page's colours.
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
        return across, TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    def name(y: float) -> str:
        return f"{y * 100:.0f}%" if percent else number(y)

    grid = [_y_tick(place(x_low, y)[1], name(y)) for y in y_ticks]
    grid += [
        _x_tick(place(x, y_low)[0], number(x)) for x in ticks(x_low, x_high, 5) if x_low <= x <= x_high and x % 1 == 0
    ]
    drawn = [_line(line, colour % COLOURS, place, name) for colour, line in enumerate(lines)]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(grid)}{"".join(drawn)}</svg>'


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


def number(value: float) -> str:
    """A number in few characters.

    >>> [number(value) for value in (0, 0.25, 12.0, 1234.5, 12345678, 0.00004, -0.5, float("nan"))]
    ['0', '0.25', '12', '1.23k', '12.3M', '4e-05', '-0.5', '–']
    """
    if not math.isfinite(value):
        return "–"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """A duration as minutes and seconds, or hours, minutes and seconds.

    >>> [format_seconds(value) for value in (0.4, 59.9, 61, 3661, 90000, float("nan"))]
    ['0:00', '1:00', '1:01', '1:01:01', '25:00:00', '?']
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def smooth(points: Sequence[tuple[float, float]]) -> Points:
    """Means over a centred window of about a tenth of the points, half as wide at the ends. Centred, so it does not lag.

    >>> smooth([(0, 0.0), (1, 3.0), (2, 0.0), (3, 3.0)])
    [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    """
    reach, last = max(1, len(points) // 20), len(points) - 1
    reaches = [max(min(reach, index, last - index), reach // 2) for index in range(len(points))]
    windows = [points[max(index - near, 0) : index + near + 1] for index, near in enumerate(reaches)]
    return [(x, _mean(y for _, y in window)) for (x, _), window in zip(points, windows, strict=True)]


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> Points:
    """At most ``limit`` points: means of equally many neighbouring points.

    >>> thin([(0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0)], limit=2)
    [(0.5, 2.0), (2.5, 6.0)]
    """
    if len(points) <= limit:
        return list(points)
    bounds = [round(index * len(points) / limit) for index in range(limit + 1)]
    parts = [points[start:end] for start, end in pairwise(bounds)]
    return [(_mean(x for x, _ in part), _mean(y for _, y in part)) for part in parts]


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return math.fsum(kept) / len(kept)


def _line(
    points: Points, colour: int, place: Callable[[float, float], tuple[float, float]], name: Callable[[float], str]
) -> str:
    if not points:
        return ""
    noisy = len(points) > RAW_POINTS
    paths = [("raw", points)] if noisy else []
    paths.append(("line", smooth(points) if noisy else points))
    parts = []
    for kind, path in paths:
        places = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in path)
        parts.append(f'<polyline class="{kind}" points="{places}"/>')
    marks = points if len(points) <= MAX_MARKS else points[:: math.ceil(len(points) / MAX_MARKS)]
    for x, y in marks:
        across, down = place(x, y)
        shown = "" if noisy else ' class="mark"'
        title = f"<title>step {number(x)}: {name(y)}</title>"
        parts.append(f'<circle{shown} cx="{across:.1f}" cy="{down:.1f}" r="{6 if noisy else 2.5}">{title}</circle>')
    return f'<g class="c{colour}">{"".join(parts)}</g>'


def _y_tick(down: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{down + 3.5:.1f}" text-anchor="end">{text}</text>'
    )


def _x_tick(across: float, text: str) -> str:
    return f'<text x="{across:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{text}</text>'


def safe_text(value: Any) -> str:
    """Text that is safe in a page: escaped, with control characters made visible, cut if it is very long.

    >>> safe_text("<b>\\x00")
    '&lt;b&gt;\ufffd'
    """
    text = str(value)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} more characters)"
    return escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text))
