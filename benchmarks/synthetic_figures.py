"""The shapes of the synthetic problems of levels 2 to 4, and their drawing with PIL.

Points are complex numbers with the y axis upwards, so that a rotation is one multiplication. A figure is plain data. The random
properties of a picture (rotation, position, colours) are a `Style`, so that a picture is a function of figure and style.
"""

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from recipes.demo.problems import font_of

SUPERSAMPLING = 3
GAP = 0.3  # font heights between a label and what it labels

Point = complex
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Line:
    """A segment from `a` to `b`."""

    a: Point
    b: Point


@dataclass(frozen=True)
class Region:
    """The tinted interior of a polygon."""

    corners: tuple[Point, ...]


@dataclass(frozen=True)
class AngleMark:
    """An arc at `vertex`, counter-clockwise from the ray to `a` to the ray to `b`."""

    vertex: Point
    a: Point
    b: Point


@dataclass(frozen=True)
class Label:
    """A `text` whose nearest edge is `GAP` font heights from `at` in the direction `toward`."""

    text: str
    at: Point
    toward: Point


@dataclass(frozen=True)
class Style:
    """The style of one picture: turn in radians, shift as a share of the free space, colours, pen and font in pixels."""

    turn: float
    shift: Point
    ink: Colour
    paper: Colour
    accent: Colour
    tint: Colour
    pen: float
    font: float


def random_style(random: Random, *, turn: float, pen: float, font: float) -> Style:
    """A style with dark ink on white paper; `turn` is the largest rotation in either direction, in degrees."""
    return Style(
        turn=math.radians(random.uniform(-turn, turn)),
        shift=complex(random.uniform(-1, 1), random.uniform(-1, 1)),
        ink=_colour(random, 0, 60),
        paper=(255, 255, 255),
        accent=_colour(random, 0, 40),
        tint=(random.randint(135, 165), random.randint(165, 195), random.randint(220, 250)),
        pen=pen * random.uniform(0.85, 1.25),
        font=font * random.uniform(0.95, 1.1),
    )


def turned(shape: Any, by: complex) -> Any:
    """The shape rotated about the origin, that is, with its complex fields multiplied by a number of absolute value 1."""
    points: dict[str, Any] = {name: value * by for name, value in vars(shape).items() if isinstance(value, complex)}
    if isinstance(shape, Region):
        points["corners"] = tuple(corner * by for corner in shape.corners)
    return replace(shape, **points)


def bounds(points: Sequence[Point]) -> tuple[Point, Point]:
    """The lower left and the upper right corner of the rectangle around these points."""
    xs, ys = [point.real for point in points], [point.imag for point in points]
    return complex(min(xs), min(ys)), complex(max(xs), max(ys))


def direction(vector: Point) -> Point:
    """The vector of length 1 in this direction."""
    return vector / abs(vector)


class Pen:
    """Draws shapes on a supersampled picture, and maps coordinates of a figure between `low` and `high` to pixels."""

    def __init__(self, low: Point, high: Point, size: int, style: Style, margin: float, unit: float = 1.0) -> None:
        """`margin` is the number of free pixels on each side, `unit` that of length 1."""
        self.style, self.unit, self.center = style, unit, (low + high) / 2
        room, extent = size - 2 * margin, high - low
        slack = complex(max(0.0, room - unit * extent.real), max(0.0, room - unit * extent.imag)) / 2
        self.middle = complex(size, size) / 2 + complex(slack.real * style.shift.real, slack.imag * style.shift.imag)
        self.image = Image.new("RGB", (size * SUPERSAMPLING,) * 2, style.paper)
        self.pencil = ImageDraw.Draw(self.image)
        self.width = max(1, round(style.pen * SUPERSAMPLING))
        self.font = font_of(round(style.font * SUPERSAMPLING))
        self.height = style.font * SUPERSAMPLING

    def put(self, shape: Any) -> None:
        """Draws one shape."""
        match shape:
            case Line(a, b):
                self.pencil.line([*self.xy(a), *self.xy(b)], fill=self.style.ink, width=self.width)
            case Region(corners):
                self.pencil.polygon([self.xy(corner) for corner in corners], fill=self.style.tint)
            case AngleMark(vertex, a, b):
                (x, y), radius = self.xy(vertex), 0.75 * self.height
                box, thin = (x - radius, y - radius, x + radius, y + radius), max(1, round(0.7 * self.width))
                start, end = (-math.degrees(cmath.phase(direction(to - vertex))) for to in (b, a))
                self.pencil.arc(box, start, end, fill=self.style.ink, width=thin)
            case Label(text, at, toward):
                x, y = self.xy(at)
                way = direction(toward)
                reach = self.reach(text, way) + GAP * self.height
                self.text(text, x + reach * way.real, y - reach * way.imag)

    def text_in_angle(self, label: Any, clearance: float, gap: float) -> None:
        """A text on the bisector, `clearance` pixels from the rays and `gap` font heights from the vertex."""
        x, y = self.xy(label.vertex)
        first, second = direction(label.a - label.vertex), direction(label.b - label.vertex)
        opening = cmath.phase(second / first) % (2 * math.pi)
        way = first * cmath.rect(1, opening / 2)
        least = self.reach(label.text, way) + gap * self.height
        distance = max(clearance / math.sin(min(opening / 2, math.pi / 2)), least)
        self.text(label.text, x + distance * way.real, y - distance * way.imag)

    def xy(self, point: Point) -> tuple[float, float]:
        """A point of the figure, in supersampled pixels from the left and from the top."""
        offset = (point - self.center) * self.unit
        return ((self.middle.real + offset.real) * SUPERSAMPLING, (self.middle.imag - offset.imag) * SUPERSAMPLING)

    def reach(self, text: str, way: Point) -> float:
        """The extent of the box of `text` from its centre along the unit vector `way`, in supersampled pixels."""
        left, top, right, bottom = self.font.getbbox(text, anchor="ls")
        return abs(way.real) * (right - left) / 2 + abs(way.imag) * (bottom - top) / 2

    def text(self, text: str, x: float, y: float) -> tuple[float, float]:
        """Draws `text` with its middle at x and y, or as near to them as the picture allows. Returns where it is."""
        left, top, right, bottom = self.font.getbbox(text, anchor="ls")
        width, height = self.image.size
        x = min(max(x, (right - left) / 2 + 2), width - (right - left) / 2 - 2)
        y = min(max(y, (bottom - top) / 2 + 2), height - (bottom - top) / 2 - 2)
        corner = (x - (left + right) / 2, y - (top + bottom) / 2)
        self.pencil.text(corner, text, fill=self.style.accent, font=self.font, anchor="ls")
        return x, y


def _colour(random: Random, low: int, high: int) -> Colour:
    return random.randint(low, high), random.randint(low, high), random.randint(low, high)


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
    """A figure of the shapes above, whose unit is a pixel, in a square picture, with its texts in the order of the figure.

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
