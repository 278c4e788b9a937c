"""Figures as lists of shapes, and their drawing with PIL.

Points are complex numbers with the y axis upwards, so that a rotation is one multiplication. A figure is plain data. The random
properties of a picture (rotation, position, colours) are a `Style`, so that a picture is a function of figure and style.
"""

import cmath
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from PIL import Image, ImageDraw, ImageFont

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
class Circle:
    """The outline of a circle."""

    center: Point
    radius: float


@dataclass(frozen=True)
class Dot:
    """A small filled disc, as at the centre of a circle."""

    at: Point


@dataclass(frozen=True)
class AngleMark:
    """An arc at `vertex`, counter-clockwise from the ray to `a` to the ray to `b`; a small square if `right`."""

    vertex: Point
    a: Point
    b: Point
    right: bool = False


@dataclass(frozen=True)
class Label:
    """A `text` whose nearest edge is `GAP` font heights from `at` in the direction `toward` (0: centred on `at`)."""

    text: str
    at: Point
    toward: Point = 0


@dataclass(frozen=True)
class WedgeLabel:
    """A `text` inside the angle at `vertex`, on the bisector, as near to the vertex as the rays allow."""

    text: str
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


Shape = Line | Region | Circle | Dot | AngleMark | Label | WedgeLabel | AngleLabel | SideLabel | Chevron
Figure = Sequence[Shape]
_POINTS = {"a", "b", "at", "center", "toward", "vertex"}  # fields of shapes


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


@dataclass(frozen=True)
class DrawnText:
    """A `text` in a picture, and its middle in pixels from the left and from the top."""

    text: str
    x: float
    y: float


def draw_with_texts(
    figure: Figure, size: int, style: Style, unit: float | None = None
) -> tuple[Image.Image, tuple[DrawnText, ...]]:
    """Draws `figure` into a square RGB picture of `size` pixels. Returns it with its texts, in the order of the figure.

    `unit` is the number of pixels of length 1; if it is None, the figure is as large as the picture and its labels allow.
    The figure is rotated by `style.turn` and shifted within the free space by `style.shift`.
    """
    shapes = [turned(shape, cmath.rect(1, style.turn)) for shape in figure]
    room = size - 2 * _margin(shapes, size, style)
    low, high = _bounds(shapes)
    if unit is None:
        unit = room / max((high - low).real, (high - low).imag)
    slack = complex(max(0.0, room - unit * (high - low).real), max(0.0, room - unit * (high - low).imag)) / 2
    middle = complex(size, size) / 2 + complex(slack.real * style.shift.real, slack.imag * style.shift.imag)
    pen = _Pen(size, style, unit, (low + high) / 2, middle)
    for shape in shapes:
        pen.put(shape)
    return pen.image.reduce(SUPERSAMPLING), tuple(pen.texts)


class _Pen:
    """Draws shapes on a supersampled picture, and maps coordinates of the figure to pixels."""

    def __init__(self, size: int, style: Style, unit: float, center: Point, middle: Point) -> None:
        self.style, self.unit, self.center, self.middle = style, unit, center, middle
        self.image = Image.new("RGB", (size * SUPERSAMPLING,) * 2, style.paper)
        self.pencil = ImageDraw.Draw(self.image)
        self.width = max(1, round(style.pen * SUPERSAMPLING))
        self.font = _font(round(style.font * SUPERSAMPLING))
        self.height = style.font * SUPERSAMPLING
        self.texts: list[DrawnText] = []

    def put(self, shape: Shape) -> None:
        """Draws one shape."""
        match shape:
            case Line(a, b):
                self.pencil.line([*self._xy(a), *self._xy(b)], fill=self.style.ink, width=self.width)
            case Region(corners):
                self.pencil.polygon([self._xy(corner) for corner in corners], fill=self.style.tint)
            case Circle(center, radius):
                self._ellipse(self._xy(center), radius * self.unit * SUPERSAMPLING, outline=self.style.ink)
            case Dot(at):
                self._ellipse(self._xy(at), 1.2 * self.width, fill=self.style.ink)
            case AngleMark():
                self._angle_mark(shape)
            case Label(text, at, toward):
                self._label(text, at, toward)
            case WedgeLabel():
                self._angle_label(shape)
            case AngleLabel(_, vertex, a, b):
                self._angle_mark(AngleMark(vertex, a, b))
                self._angle_label(shape)
            case SideLabel(text, a, b):
                self._label(text, (a + b) / 2, (b - a) * -1j)
            case Chevron(at, toward):
                self._chevron(at, _direction(toward))

    def _xy(self, point: Point) -> tuple[float, float]:
        offset = (point - self.center) * self.unit
        return ((self.middle.real + offset.real) * SUPERSAMPLING, (self.middle.imag - offset.imag) * SUPERSAMPLING)

    def _ellipse(self, xy: tuple[float, float], radius: float, **how: Colour) -> None:
        box = (xy[0] - radius, xy[1] - radius, xy[0] + radius, xy[1] + radius)
        self.pencil.ellipse(box, width=self.width if "outline" in how else 0, **how)

    def _angle_mark(self, mark: AngleMark) -> None:
        x, y = self._xy(mark.vertex)
        first, second = _direction(mark.a - mark.vertex), _direction(mark.b - mark.vertex)
        radius = 0.75 * self.height
        thin = max(1, round(0.7 * self.width))
        if mark.right:
            corner = [first, first + second, second]
            path = [(x + 0.6 * radius * c.real, y - 0.6 * radius * c.imag) for c in corner]
            self.pencil.line(path, fill=self.style.ink, width=thin)
            return
        start, end = -math.degrees(cmath.phase(second)), -math.degrees(cmath.phase(first))
        self.pencil.arc((x - radius, y - radius, x + radius, y + radius), start, end, fill=self.style.ink, width=thin)

    def _label(self, text: str, at: Point, toward: Point) -> None:
        x, y = self._xy(at)
        if toward:
            way = _direction(toward)
            reach = self._reach(text, way) + GAP * self.height
            x, y = x + reach * way.real, y - reach * way.imag
        self._text(text, x, y)

    def _angle_label(self, label: WedgeLabel | AngleLabel) -> None:
        """A text on the bisector, as near to the vertex as the rays, and the arc of an `AngleLabel`, allow."""
        x, y = self._xy(label.vertex)
        first, second = _direction(label.a - label.vertex), _direction(label.b - label.vertex)
        opening = cmath.phase(second / first) % (2 * math.pi)
        way = first * cmath.rect(1, opening / 2)
        clearance, gap = self._reach(label.text, first * 1j) + self.width, 0.8
        if isinstance(label, AngleLabel):
            clearance = max(self._reach(label.text, ray * 1j) for ray in (first, second)) + 1.5 * self.width
            gap = 0.9
        least = self._reach(label.text, way) + gap * self.height
        distance = max(clearance / math.sin(min(opening / 2, math.pi / 2)), least)
        self._text(label.text, x + distance * way.real, y - distance * way.imag)

    def _chevron(self, at: Point, way: Point) -> None:
        x, y = self._xy(at)
        ends = [x + 0j + 1j * y + 0.4 * self.height * (way * cmath.rect(1, turn)).conjugate() for turn in (2.6, -2.6)]
        path = [(ends[0].real, ends[0].imag), (x, y), (ends[1].real, ends[1].imag)]
        self.pencil.line(path, fill=self.style.ink, width=self.width)

    def _reach(self, text: str, way: Point) -> float:
        """The extent of the box of `text` from its centre along the unit vector `way`, in supersampled pixels."""
        left, top, right, bottom = self.font.getbbox(text, anchor="ls")
        return abs(way.real) * (right - left) / 2 + abs(way.imag) * (bottom - top) / 2

    def _text(self, text: str, x: float, y: float) -> None:
        left, top, right, bottom = self.font.getbbox(text, anchor="ls")
        width, height = self.image.size
        x = min(max(x, (right - left) / 2 + 2), width - (right - left) / 2 - 2)
        y = min(max(y, (bottom - top) / 2 + 2), height - (bottom - top) / 2 - 2)
        corner = (x - (left + right) / 2, y - (top + bottom) / 2)
        self.pencil.text(corner, text, fill=self.style.accent, font=self.font, anchor="ls")
        self.texts.append(DrawnText(text, x / SUPERSAMPLING, y / SUPERSAMPLING))


@functools.lru_cache(maxsize=256)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("labels need a scalable font, but this Pillow was built without FreeType")
    return font


def _colour(random: Random, low: int, high: int) -> Colour:
    return random.randint(low, high), random.randint(low, high), random.randint(low, high)


def _direction(vector: Point) -> Point:
    return vector / abs(vector)


def turned(shape: Shape, by: complex) -> Shape:
    """The shape rotated about the origin, that is, with its points multiplied by a number of absolute value 1."""
    points = {name: value * by for name, value in vars(shape).items() if name in _POINTS}
    if isinstance(shape, Region):
        points["corners"] = tuple(corner * by for corner in shape.corners)
    return replace(shape, **points)


def _bounds(figure: Iterable[Shape]) -> tuple[Point, Point]:
    points: list[Point] = []
    for shape in figure:
        match shape:
            case Line(a, b):
                points += [a, b]
            case Circle(center, radius):
                points += [center - complex(radius, radius), center + complex(radius, radius)]
    xs, ys = [p.real for p in points], [p.imag for p in points]
    return complex(min(xs), min(ys)), complex(max(xs), max(ys))


def _margin(figure: Sequence[Shape], size: int, style: Style) -> float:
    """The free pixels on each side, for the pen and for labels outside the figure."""
    outside = any(isinstance(shape, Label) and shape.toward for shape in figure)
    margin = style.pen + (1.4 * style.font if outside else 0.3 * style.font)
    low, high = _bounds(figure)
    extent = max((high - low).real, (high - low).imag)
    for _ in range(2):  # a larger margin makes the figure smaller, so that labels extend further beyond it
        overhangs = [
            _overhang(shape, low, high, (size - 2 * margin) / extent, style.font)
            for shape in figure
            if isinstance(shape, SideLabel)
        ]
        margin = max(margin, style.pen + max(overhangs, default=0.0))
    return margin


def _overhang(label: SideLabel, low: Point, high: Point, unit: float, font: float) -> float:
    """The number of pixels by which the label extends beyond the figure's bounds at this scale."""
    across = _direction((label.b - label.a) * -1j)
    half = complex(_font(round(font)).getlength(label.text), font) / 2
    reach = abs(across.real) * half.real + abs(across.imag) * half.imag + GAP * font
    center = unit * (label.a + label.b) / 2 + reach * across
    under, over = unit * low - (center - half), center + half - unit * high
    return max(under.real, under.imag, over.real, over.imag)
