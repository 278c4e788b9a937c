"""What the templates share: the draft that they return, named points, triangles, parallel lines and expressions."""

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from recipes.synthetic.figure import AngleLabel, AngleMark, Chevron, Dot, Figure, Label, Line, Point, Shape

LETTERS = "ABCDEFGHJKLMNPQRSTUVWZ"  # without O and I, which look like digits, and X


@dataclass(frozen=True)
class Draft:
    """What a template returns: a question, its answer, and the figure to draw in some style.

    `text` never contains a number that the answer depends on; these numbers are in the figure.
    """

    text: str
    answer: str
    figure: Figure
    unit: float | None = None  # pixels of length 1; None: the figure is as large as the picture allows


def ray(degrees: float, length: float = 1.0) -> Point:
    """The point at distance `length` from the origin, `degrees` counter-clockwise from the right."""
    return cmath.rect(length, math.radians(degrees))


def outline(*corners: Point) -> list[Shape]:
    """The sides of a polygon, from each corner to the next."""
    return [Line(a, b) for a, b in zip(corners, (*corners[1:], corners[0]))]


def triangle(first: float, second: float, base: float = 1.0) -> tuple[Point, Point, Point]:
    """The corners, counter-clockwise, of the triangle with these angles in degrees at the ends of its base."""
    side = base * math.sin(math.radians(second)) / math.sin(math.radians(first + second))
    return 0j, complex(base), ray(first, side)


def corner_angles(texts: Sequence[str | None], corners: Sequence[Point]) -> list[Shape]:
    """Labels in the angles of a counter-clockwise polygon; no label where the text is None."""
    following, preceding = (*corners[1:], corners[0]), (corners[-1], *corners[:-1])
    places = zip(texts, corners, following, preceding)
    return [AngleLabel(text, corner, after, before) for text, corner, after, before in places if text is not None]


def right_angle(vertex: Point, a: Point, b: Point) -> AngleMark:
    """The small square between the ray to `a` and the ray to `b`, which is counter-clockwise from it."""
    return AngleMark(vertex, a, b, right=True)


def names(random: Random, number: int) -> list[str]:
    """Different capital letters."""
    return random.sample(LETTERS, number)


def named(letters: Sequence[str], points: Sequence[Point], middle: Point | None = None) -> list[Shape]:
    """The names of points, each on the side away from `middle` (by default the mean of the points)."""
    center = sum(points) / len(points) if middle is None else middle
    return [Label(letter, point, point - center, gap=0.25) for letter, point in zip(letters, points)]


def named_dot(letter: str, point: Point, toward: Point) -> list[Shape]:
    """A dot and its name."""
    return [Dot(point), Label(letter, point, toward)]


def parallels(height: float, degrees: float, half: float) -> tuple[list[Shape], Point, Point]:
    """Two horizontal lines, `height` apart, and a transversal at the angle `degrees`: the shapes and the two crossings."""
    low, high = 0j, ray(degrees, height / math.sin(math.radians(degrees)))
    over = ray(degrees, 0.55 * half)
    shapes: list[Shape] = [Line(low - over, high + over)]
    for crossing in (low, high):
        shapes += [Line(crossing - half, crossing + half), Chevron(crossing + 0.85 * half, 1)]
    return shapes, low, high


def angle_at(text: str, crossing: Point, degrees: float, place: int) -> AngleLabel:
    """`text` in one of the four angles (0 to 3, counter-clockwise from the right) where a transversal cuts a line."""
    rays = [crossing + ray(turn) for turn in (0, degrees, 180, 180 + degrees)]
    return AngleLabel(text, crossing, rays[place], rays[(place + 1) % 4])


@dataclass(frozen=True)
class Expression:
    """A `text` that is linear in x, and the `x` at which it has the requested value."""

    text: str
    x: int


def expression(random: Random, value: int) -> Expression:
    """An expression of the form ``3x-4`` with the value `value` and x at least 2."""
    choices = [(times, x) for times in range(2, 7) for x in range(2, 41) if 0 < abs(value - times * x) <= 20]
    times, x = random.choice(choices)
    return Expression(f"{times}x{value - times * x:+d}", x)


def degrees_text(text: str | int) -> str:
    """The text with a degree sign; expressions are in parentheses."""
    return f"({text})°" if "x" in str(text) and text != "x" else f"{text}°"


def root(square: int) -> str:
    r"""The square root of a positive integer, in lowest terms.

    >>> root(49), root(50), root(7)
    ('7', '5 \\sqrt{2}', '\\sqrt{7}')
    """
    factor = max(f for f in range(1, math.isqrt(square) + 1) if square % (f * f) == 0)
    rest = square // (factor * factor)
    if rest == 1:
        return str(factor)
    return rf"\sqrt{{{rest}}}" if factor == 1 else rf"{factor} \sqrt{{{rest}}}"
