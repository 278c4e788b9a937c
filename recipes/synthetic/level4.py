"""Level 4: figures as in Geometry3K, with named points and an unknown x; answers are numbers, roots or multiples of pi."""

import math
from collections.abc import Sequence
from random import Random

from recipes.synthetic.figure import AngleLabel, Circle, Label, Line, Point, Shape, SideLabel
from recipes.synthetic.parts import (
    Draft,
    angle_at,
    corner_angles,
    degrees_text,
    expression,
    named,
    named_dot,
    names,
    outline,
    parallels,
    ray,
    right_angle,
    root,
    triangle,
)

TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29))


def named_parallel_lines(random: Random) -> Draft:
    """An expression and a number at two parallel lines cut by a transversal."""
    degrees = random.choice([*range(50, 80), *range(100, 130)])
    shapes, low, high = parallels(5, degrees, half=6)
    known, asked = random.randrange(4), random.randrange(4)
    sizes = (degrees, 180 - degrees)
    unknown = expression(random, sizes[asked % 2])
    letters = names(random, 4)
    figure = (
        *shapes,
        *named(letters[:2], (low - 6, low + 6)),
        *named(letters[2:], (high - 6, high + 6)),
        angle_at(degrees_text(sizes[known % 2]), low, degrees, known),
        angle_at(degrees_text(unknown.text), high, degrees, asked),
    )
    a, b, c, d = letters
    text = rf"In the figure, $\overline{{{a}{b}}} \parallel \overline{{{c}{d}}}$. Find x."
    return Draft(text, str(unknown.x), figure)


def angle_sum(random: Random) -> Draft:
    """Two numbers and an expression in the angles of a triangle."""
    first, second = random.randint(45, 70), random.randint(45, 70)
    corners = triangle(first, second)
    unknown = expression(random, 180 - first - second)
    texts = [degrees_text(text) for text in (first, second, unknown.text)]
    figure = (*outline(*corners), *corner_angles(texts, corners), *named(names(random, 3), corners))
    return Draft("Find x.", str(unknown.x), figure)


def named_angle(random: Random) -> Draft:
    """The unlabelled angle of a triangle, which the text names."""
    angles = [random.randint(35, 70), random.randint(35, 70)]
    angles.append(180 - sum(angles))
    corners, letters = triangle(angles[0], angles[1]), names(random, 3)
    asked = random.randrange(3)
    texts = [None if corner == asked else degrees_text(angle) for corner, angle in enumerate(angles)]
    figure = (*outline(*corners), *corner_angles(texts, corners), *named(letters, corners))
    return Draft(rf"Find $m \angle {letters[asked]}$.", str(angles[asked]), figure)


def pythagoras(random: Random) -> Draft:
    """A side of a right triangle with two given sides."""
    if random.random() < 0.4:
        times, (short, long, _) = random.randint(1, 4), random.choice(TRIPLES)
        legs = [times * short, times * long]
    else:
        legs = [random.randint(4, 15), random.randint(4, 15)]
    random.shuffle(legs)
    squares = [legs[0] ** 2, legs[0] ** 2 + legs[1] ** 2, legs[1] ** 2]
    corners = (0j, complex(legs[0]), complex(0, legs[1]))
    # Labels must be whole numbers, so the unknown is the hypotenuse unless that is a whole number.
    asked = random.randrange(3) if math.isqrt(squares[1]) ** 2 == squares[1] else 1
    texts = ["x" if side == asked else root(square) for side, square in enumerate(squares)]
    return Draft("Find x.", root(squares[asked]), _right_triangle(random, corners, texts))


def leg_by_hypotenuse(random: Random) -> Draft:
    """A leg of a right triangle with given hypotenuse and other leg; mostly a root."""
    hypotenuse = random.randint(7, 20)
    leg = random.randint(math.ceil(0.4 * hypotenuse), math.floor(0.9 * hypotenuse))
    square = hypotenuse**2 - leg**2
    corners = (0j, complex(leg), complex(0, math.sqrt(square)))
    return Draft("Find x.", root(square), _right_triangle(random, corners, [str(leg), str(hypotenuse), "x"]))


def special_triangle(random: Random) -> Draft:
    """A side of a right triangle with an angle of 30, 45 or 60 degrees."""
    short = random.randint(2, 24)
    angle = random.choice((30, 45, 60))
    base, height = {30: (3, 1), 45: (1, 1), 60: (1, 3)}[angle]  # squares of the legs, in units of the shorter one
    squares = [base * short**2, (base + height) * short**2, height * short**2]
    whole = [side for side, square in enumerate(squares) if math.isqrt(square) ** 2 == square]
    given = random.choice(whole)
    asked = random.choice([side for side in range(3) if side != given])
    texts = {given: root(squares[given]), asked: "x"}
    corners = (0j, complex(math.sqrt(squares[0])), complex(0, math.sqrt(squares[2])))
    figure = _right_triangle(random, corners, [texts.get(side) for side in range(3)])
    label = AngleLabel(degrees_text(angle), corners[1], corners[2], corners[0])
    return Draft("Find x.", root(squares[asked]), (*figure, label))


def similar_triangles(random: Random) -> Draft:
    """A line parallel to a triangle's base divides its sides in the same ratio."""
    first, second = random.choice(((2, 3), (3, 2), (3, 4), (4, 3), (3, 5), (5, 3), (4, 5), (5, 4), (1, 2), (2, 1)))
    left, right = random.sample(range(2, 6), 2)
    sides = [left * first, left * second, right * first, right * second]
    apex = 0j
    a, b = ray(-random.uniform(100, 115), sides[0] + sides[1]), ray(-random.uniform(45, 60), sides[2] + sides[3])
    low, high = first * a / (first + second), first * b / (first + second)
    asked = random.randrange(4)
    texts = ["x" if side == asked else str(length) for side, length in enumerate(sides)]
    letters = names(random, 5)
    figure = (
        *outline(apex, a, b),
        Line(low, high),
        *(SideLabel(text, *ends) for text, ends in zip(texts, ((apex, low), (low, a), (high, apex), (b, high)))),
        *named(letters[:3], (apex, a, b)),
        Label(letters[3], low, -1j * a, gap=0.25),
        Label(letters[4], high, 1j * b, gap=0.25),
    )
    _, p, q, r, s = letters
    return Draft(rf"If $\overline{{{r}{s}}} \parallel \overline{{{p}{q}}}$, find x.", str(sides[asked]), figure)


def inscribed_angle(random: Random) -> Draft:
    """An inscribed angle is half the central angle of the same chord."""
    half = random.randint(32, 62)  # degrees, as is `start`
    start = random.uniform(0, 360)
    a, b = ray(start), ray(start + 2 * half)
    vertex = ray(start + half + 180 + random.uniform(16 - half, half - 16))
    center, letters = 0j, names(random, 4)
    central_known = half >= 48 and random.random() < 0.7  # an expression needs space at the circle
    asked = expression(random, half if central_known else 2 * half)
    central = degrees_text(2 * half if central_known else asked.text)
    inscribed = degrees_text(asked.text if central_known else half)
    figure = (
        Circle(center, 1),
        *(Line(end, rim) for end in (center, vertex) for rim in (a, b)),
        AngleLabel(central, center, a, b),
        AngleLabel(inscribed, vertex, a, b),
        *named(letters[:3], (a, b, vertex), center),
        *named_dot(letters[3], center, vertex - a - b),
    )
    return Draft(rf"In $\odot {letters[3]}$, find x.", str(asked.x), figure)


def tangent(random: Random) -> Draft:
    """A tangent is perpendicular to the radius at its point of contact."""
    radius, distance = random.randint(3, 10), random.randint(8, 36)
    while not 2.6 * radius < distance < 3.6 * radius:
        radius, distance = random.randint(3, 10), random.randint(8, 36)
    square = distance**2 - radius**2
    center, touch = 0j, complex(0, radius)
    outside = complex(-math.sqrt(square), radius)
    letters = names(random, 3)
    figure = (
        Circle(center, radius),
        *outline(center, touch, outside),
        SideLabel(str(radius), center, touch),
        SideLabel("x", touch, outside),
        SideLabel(str(distance), outside, center),
        *named_dot(letters[0], center, 1 - 1j),
        *named(letters[1:], (touch, outside), center),
    )
    text = rf"$\overline{{{letters[2]}{letters[1]}}}$ is tangent to $\odot {letters[0]}$. Find x."
    return Draft(text, root(square), figure)


def two_tangents(random: Random) -> Draft:
    """The two tangents from a point have equal lengths."""
    length, half = random.randint(8, 40), random.uniform(28, 38)
    outside, a, b = 0j, ray(-half, length), ray(half, length)
    center = complex(length / math.cos(math.radians(half)))
    unknown = expression(random, length)
    texts = random.sample((unknown.text, str(length)), 2)
    letters = names(random, 4)
    figure = (
        Circle(center, abs(center - a)),
        Line(outside, a),
        Line(outside, b),
        SideLabel(texts[0], outside, a),
        SideLabel(texts[1], b, outside),
        *named_dot(letters[0], center, 1),
        Label(letters[1], outside, -1, gap=0.25),
        *named(letters[2:], (a, b), center),
    )
    p, q, r = letters[1:]
    text = rf"$\overline{{{p}{q}}}$ and $\overline{{{p}{r}}}$ are tangent to $\odot {letters[0]}$. Find x."
    return Draft(text, str(unknown.x), figure)


def chords(random: Random) -> Draft:
    """The products of the parts of two intersecting chords are equal."""
    choices = [
        (p, q, r, p * q // r)
        for p in range(3, 13)
        for q in range(3, 13)
        for r in range(3, 13)
        if p * q % r == 0 and 3 <= p * q // r <= 12 and r not in (p, q)
    ]
    parts = random.choice(choices)
    turn = random.uniform(60, 120)
    ends = [ray(degrees, part) for degrees, part in zip((0, 180, turn, 180 + turn), parts)]
    center = _circumcenter(ends[0], ends[1], ends[2])
    asked = random.randrange(4)
    figure = (
        Circle(center, abs(ends[0] - center)),
        Line(ends[0], ends[1]),
        Line(ends[2], ends[3]),
        *(SideLabel("x" if place == asked else str(part), 0, ends[place]) for place, part in enumerate(parts)),
        *named(names(random, 4), ends, center),
    )
    return Draft("Find x.", str(parts[asked]), figure)


def named_circle_area(random: Random) -> Draft:
    """The area of a circle with given diameter."""
    radius = random.randint(2, 20)
    letters, rim = names(random, 3), ray(random.uniform(0, 360), radius)
    figure = (
        Circle(0, radius),
        Line(-rim, rim),
        SideLabel(str(2 * radius), -rim, rim),
        *named(letters[:2], (-rim, rim)),
        *named_dot(letters[2], 0j, rim * 1j),
    )
    return Draft(rf"Find the area of $\odot {letters[2]}$ in terms of $\pi$.", rf"{radius**2} \pi", figure)


TEMPLATES = (
    named_parallel_lines,
    angle_sum,
    named_angle,
    pythagoras,
    leg_by_hypotenuse,
    special_triangle,
    similar_triangles,
    inscribed_angle,
    tangent,
    two_tangents,
    chords,
    named_circle_area,
)


def _right_triangle(
    random: Random, corners: tuple[Point, Point, Point], texts: Sequence[str | None]
) -> tuple[Shape, ...]:
    """A triangle with a right angle at its first corner and texts beside its sides."""
    ends = zip(texts, corners, (*corners[1:], corners[0]))
    return (
        *outline(*corners),
        right_angle(*corners),
        *(SideLabel(text, a, b) for text, a, b in ends if text is not None),
        *named(names(random, 3), corners),
    )


def _circumcenter(a: Point, b: Point, c: Point) -> Point:
    """The point at equal distances from `a`, `b` and `c`."""
    u, v = b - a, c - a
    return a + (u * abs(v) ** 2 - v * abs(u) ** 2) / (u.conjugate() * v - u * v.conjugate()) * -1
