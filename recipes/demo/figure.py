"""Figures as lists of shapes, and their drawing with PIL.

Points are complex numbers with the y axis upwards, so that a rotation is one multiplication. A figure is plain data. The random
properties of a picture (rotation, position, colours) are a `Style`, so that a picture is a function of figure and style.
"""

import cmath
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

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
class WedgeLabel:
    """A `text` inside the angle at `vertex`, on the bisector, as near to the vertex as the rays allow."""

    text: str
    vertex: Point
    a: Point
    b: Point


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


def draw(figure: Sequence[Any], size: int, style: Style) -> Image.Image:
    """Draws a figure of the shapes above, whose unit is a pixel, into a square RGB picture of `size` pixels.

    The figure is rotated by `style.turn` and shifted within the free space by `style.shift`.
    """
    shapes = [turned(shape, cmath.rect(1, style.turn)) for shape in figure]
    ends = [end for shape in shapes if isinstance(shape, Line) for end in (shape.a, shape.b)]
    outside = any(isinstance(shape, Label) for shape in shapes)
    pen = Pen(*bounds(ends), size, style, margin=style.pen + (1.4 if outside else 0.3) * style.font)
    for shape in shapes:
        pen.put(shape)
    return pen.image.reduce(SUPERSAMPLING)


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
            case WedgeLabel(text, vertex, a, _):
                aside = direction(a - vertex) * 1j
                self.text_in_angle(shape, self.reach(text, aside) + self.width, gap=0.8)

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


@functools.lru_cache(maxsize=256)
def font_of(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font in this size."""
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("labels need a scalable font, but this Pillow was built without FreeType")
    return font


def _colour(random: Random, low: int, high: int) -> Colour:
    return random.randint(low, high), random.randint(low, high), random.randint(low, high)
