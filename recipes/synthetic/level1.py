"""Level 1: read the only number in a small figure drawn to scale. A randomly initialised model learns it within minutes."""

import cmath
import math
from random import Random

from recipes.synthetic.figure import AngleMark, Label, Line, Region, WedgeLabel
from recipes.synthetic.parts import Draft

ANGLES = range(30, 100, 10)
LENGTHS = range(2, 10)


def triangle_angle(random: Random) -> Draft:
    """The labelled angle of a triangle, 30 to 90 degrees."""
    degrees = random.choice(ANGLES)
    vertex, base = 0j, complex(random.uniform(36, 42), 0)
    top = cmath.rect(random.uniform(30, 38), math.radians(degrees))
    figure = (
        Region((vertex, base, top)),
        Line(vertex, base),
        Line(vertex, top),
        Line(base, top),
        AngleMark(vertex, base, top),
        WedgeLabel(str(degrees), vertex, base, top),
    )
    return Draft("Find the marked angle.", str(degrees), figure, unit=1.0)


def rectangle_side(random: Random) -> Draft:
    """The labelled side of a rectangle, 2 to 9."""
    length = random.choice(LENGTHS)
    width, height = 4.4 * length, random.uniform(14, 26)
    a, b, c, d = 0j, complex(width, 0), complex(width, height), complex(0, height)
    figure = (
        Region((a, b, c, d)),
        Line(a, b),
        Line(b, c),
        Line(c, d),
        Line(d, a),
        Label(str(length), (a + b) / 2, -1j),
    )
    return Draft("Find the labelled side.", str(length), figure, unit=1.0)
