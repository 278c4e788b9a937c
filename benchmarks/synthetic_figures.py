"""The shapes of the synthetic problems of levels 2 to 4, in addition to those of `recipes.demo.figure`, and their drawing."""

import cmath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from recipes.demo.figure import (
    GAP,
    SUPERSAMPLING,
    AngleMark,
    Label,
    Line,
    Pen,
    Point,
    Style,
    bounds,
    direction,
    font_of,
    turned,
)


@dataclass(frozen=True)
class Circle:
    """The outline of a circle."""

    center: Point
    radius: float


@dataclass(frozen=True)
class Dot:
    """A small filled disc, as at the centre of a circle."""

    at: Point


@dataclass(frozen=True)
class Text:
    """A `text` centred on `at`."""

    text: str
    at: Point


@dataclass(frozen=True)
class RightAngle:
    """A small square at `vertex` between the ray to `a` and the ray to `b`, which is counter-clockwise from it."""

    vertex: Point
    a: Point
    b: Point


@dataclass(frozen=True)
class AngleLabel:
    """An arc and a `text` inside the angle at `vertex`, counter-clockwise from the ray to `a` to the ray to `b`."""

    text: str
    vertex: Point
    a: Point
    b: Point


@dataclass(frozen=True)
class SideLabel:
    """A `text` to the right of the middle of the segment from `a` to `b`, which is outside a counter-clockwise polygon."""

    text: str
    a: Point
    b: Point


@dataclass(frozen=True)
class Chevron:
    """An arrow head on a line in the direction `toward`; lines with an arrow head are parallel."""

    at: Point
    toward: Point


@dataclass(frozen=True)
class DrawnText:
    """A `text` in a picture, and its middle in pixels from the left and from the top."""

    text: str
    x: float
    y: float


def draw_with_texts(
    figure: Sequence[Any], size: int, style: Style, unit: float | None = None
) -> tuple[Image.Image, tuple[DrawnText, ...]]:
    """As `recipes.demo.figure.draw`, with the texts of the picture, in the order of the figure.

    `unit` is the number of pixels of length 1; if it is None, the figure is as large as the picture and its labels allow.
    """
    shapes = [turned(shape, cmath.rect(1, style.turn)) for shape in figure]
    low, high = bounds(ends_of(shapes))
    margin = margin_of(shapes, size, style)
    if unit is None:
        unit = (size - 2 * margin) / max((high - low).real, (high - low).imag)
    pen = LevelPen(low, high, size, style, margin, unit)
    for shape in shapes:
        pen.put(shape)
    return pen.image.reduce(SUPERSAMPLING), tuple(pen.texts)


def ends_of(shapes: Sequence[Any]) -> list[Point]:
    """Points that bound the lines and circles of a figure."""
    points: list[Point] = []
    for shape in shapes:
        match shape:
            case Line(a, b):
                points += [a, b]
            case Circle(center, radius):
                points += [center - complex(radius, radius), center + complex(radius, radius)]
    return points


class LevelPen(Pen):
    """A pen that draws these shapes too, and knows where it wrote."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.texts: list[DrawnText] = []

    def put(self, shape: Any) -> None:
        """Draws one shape."""
        match shape:
            case Circle(center, radius):
                self._ellipse(center, radius * self.unit * SUPERSAMPLING, outline=self.style.ink, width=self.width)
            case Dot(at):
                self._ellipse(at, 1.2 * self.width, fill=self.style.ink)
            case RightAngle():
                self._right_angle(shape)
            case Text(text, at):
                self.text(text, *self.xy(at))
            case AngleLabel(text, vertex, a, b):
                super().put(AngleMark(vertex, a, b))
                across = [self.reach(text, direction(to - vertex) * 1j) for to in (a, b)]
                self.text_in_angle(shape, max(across) + 1.5 * self.width, gap=0.9)
            case SideLabel(text, a, b):
                super().put(Label(text, (a + b) / 2, (b - a) * -1j))
            case Chevron(at, toward):
                self._chevron(at, direction(toward))
            case _:
                super().put(shape)

    def text(self, text: str, x: float, y: float) -> tuple[float, float]:
        """Draws `text`, and remembers its place."""
        x, y = super().text(text, x, y)
        self.texts.append(DrawnText(text, x / SUPERSAMPLING, y / SUPERSAMPLING))
        return x, y

    def _ellipse(self, at: Point, radius: float, **how: Any) -> None:
        x, y = self.xy(at)
        self.pencil.ellipse((x - radius, y - radius, x + radius, y + radius), **how)

    def _right_angle(self, mark: RightAngle) -> None:
        x, y = self.xy(mark.vertex)
        first, second = direction(mark.a - mark.vertex), direction(mark.b - mark.vertex)
        side = 0.6 * (0.75 * self.height)
        path = [(x + side * corner.real, y - side * corner.imag) for corner in (first, first + second, second)]
        self.pencil.line(path, fill=self.style.ink, width=max(1, round(0.7 * self.width)))

    def _chevron(self, at: Point, way: Point) -> None:
        x, y = self.xy(at)
        ends = [x + 0j + 1j * y + 0.4 * self.height * (way * cmath.rect(1, turn)).conjugate() for turn in (2.6, -2.6)]
        path = [(ends[0].real, ends[0].imag), (x, y), (ends[1].real, ends[1].imag)]
        self.pencil.line(path, fill=self.style.ink, width=self.width)


def margin_of(figure: Sequence[Any], size: int, style: Style) -> float:
    """The free pixels on each side, for the pen and for labels outside the figure."""
    outside = any(isinstance(shape, Label) for shape in figure)
    margin = style.pen + (1.4 * style.font if outside else 0.3 * style.font)
    low, high = bounds(ends_of(figure))
    extent = max((high - low).real, (high - low).imag)
    for _ in range(2):  # a larger margin makes the figure smaller, so that labels extend further beyond it
        overhangs = [
            overhang(shape, low, high, (size - 2 * margin) / extent, style.font)
            for shape in figure
            if isinstance(shape, SideLabel)
        ]
        margin = max(margin, style.pen + max(overhangs, default=0.0))
    return margin


def overhang(label: SideLabel, low: Point, high: Point, unit: float, font: float) -> float:
    """The number of pixels by which the label extends beyond the figure's bounds at this scale."""
    across = direction((label.b - label.a) * -1j)
    half = complex(font_of(round(font)).getlength(label.text), font) / 2
    reach = abs(across.real) * half.real + abs(across.imag) * half.imag + GAP * font
    center = unit * (label.a + label.b) / 2 + reach * across
    under, over = unit * low - (center - half), center + half - unit * high
    return max(under.real, under.imag, over.real, over.imag)
