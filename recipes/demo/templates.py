"""The templates of problems, by level: each makes a question, its answer and a figure from random numbers."""

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from recipes.demo.figure import (
    AngleLabel,
    AngleMark,
    Chevron,
    Circle,
    Dot,
    Figure,
    Label,
    Line,
    Point,
    Region,
    Shape,
    SideLabel,
    WedgeLabel,
    turned,
)

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


# Level 1: read the only number in a small figure drawn to scale. A randomly initialised model learns it within minutes.


def triangle_angle(random: Random) -> Draft:
    """The labelled angle of a triangle, 30 to 90 degrees."""
    degrees = random.choice(range(30, 100, 10))
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
    length = random.choice(range(2, 10))
    width, height = 4.4 * length, random.uniform(14, 26)
    a, b, c, d = 0j, complex(width, 0), complex(width, height), complex(0, height)
    figure = (Region((a, b, c, d)), *outline(a, b, c, d), Label(str(length), (a + b) / 2, -1j))
    return Draft("Find the labelled side.", str(length), figure, unit=1.0)


LEVEL1 = (triangle_angle, rectangle_side)


# Level 2: find and read the only number among several plain figures.


LARGE = 5.5 + 5.5j
SMALL = (14.5 + 4j, 14.5 + 14.5j, 4 + 14.5j)

Place = Callable[[Point], Point]


def marked_angle(random: Random) -> Draft:
    """The labelled angle of a triangle, 40 to 99 degrees."""
    degrees = random.choice(range(40, 100))
    place = _place(LARGE, random.uniform(0, 360))
    half = degrees / 2
    vertex, base, top = place(-3.5 + 0j), place(-3.5 + ray(-half, 8)), place(-3.5 + ray(half, random.uniform(7, 8.5)))
    figure = (Region((vertex, base, top)), *outline(vertex, base, top), AngleLabel(str(degrees), vertex, base, top))
    return Draft("Find the marked angle.", str(degrees), _among(random, figure))


def labelled_side(random: Random) -> Draft:
    """The labelled side of a rectangle, 2 to 29."""
    length = random.choice(range(2, 30))
    corners = _placed_rectangle(random, 4, _place(LARGE, random.choice((0, 90)) + random.uniform(-8, 8)))
    side = random.randrange(4)
    label = SideLabel(str(length), corners[side], corners[(side + 1) % 4])
    figure = (Region(corners), *outline(*corners), label)
    return Draft("Find the labelled side.", str(length), _among(random, figure))


def labelled_radius(random: Random) -> Draft:
    """The labelled radius of a circle, 2 to 19."""
    radius = random.choice(range(2, 20))
    rim = LARGE + ray(random.uniform(0, 360), random.uniform(5, 5.5))
    figure = (Circle(LARGE, abs(rim - LARGE)), Line(LARGE, rim), Dot(LARGE), SideLabel(str(radius), LARGE, rim))
    return Draft("Find the labelled radius.", str(radius), _among(random, figure))


def labelled_area(random: Random) -> Draft:
    """The area in a shaded rectangle, 10 to 99."""
    area = random.choice(range(10, 100))
    corners = _placed_rectangle(random, 4.6, _place(LARGE, random.uniform(0, 90)))
    figure = (Region(corners), *outline(*corners), Label(str(area), LARGE))
    return Draft("Find the shaded area.", str(area), _among(random, figure))


LEVEL2 = (marked_angle, labelled_side, labelled_radius, labelled_area)


def _among(random: Random, figure: Figure) -> tuple[Shape, ...]:
    """The figure in one quarter of the picture, and figures without numbers in the others."""
    plain = [shape for at in SMALL for shape in random.choice(_PLAIN)(random, _place(at, random.uniform(0, 360)))]
    quarter = 1j ** random.randrange(4)
    return tuple(turned(shape, quarter) for shape in (*plain, *figure))


def _place(at: Point, degrees: float) -> Place:
    return lambda point: at + point * ray(degrees)


def _placed_rectangle(random: Random, half: float, place: Place) -> tuple[Point, Point, Point, Point]:
    height = half * random.uniform(0.6, 0.8)
    low, high = complex(half, -height), complex(half, height)
    return place(-high), place(low), place(high), place(-low)


def _plain_triangle(random: Random, place: Place) -> list[Shape]:
    turns = (random.uniform(0, 60), random.uniform(120, 180), random.uniform(240, 300))
    return outline(*(place(ray(turn, 2.3)) for turn in turns))


def _plain_rectangle(random: Random, place: Place) -> list[Shape]:
    return outline(*_placed_rectangle(random, 1.8, place))


def _plain_circle(random: Random, place: Place) -> list[Shape]:
    return [Circle(place(0), random.uniform(1.4, 2.1))]


def _plain_parallels(random: Random, place: Place) -> list[Shape]:
    gap, lean = random.uniform(0.6, 1), random.uniform(-1, 1)
    level: list[Shape] = [Line(place(complex(-2, y)), place(complex(2, y))) for y in (-gap, gap)]
    return [*level, Line(place(complex(-lean, -2)), place(complex(lean, 2)))]


_PLAIN = (_plain_triangle, _plain_rectangle, _plain_circle, _plain_parallels)


# Level 3: one step of reasoning from the numbers in a figure drawn to scale.


def third_angle(random: Random) -> Draft:
    """The third angle of a triangle with two given angles."""
    first, second = random.randint(30, 75), random.randint(35, 70)
    texts = [degrees_text(first), degrees_text(second), "x"]
    angles = [first, second, 180 - first - second]
    turn = random.randrange(3)  # which corner lies at the left of the base
    corners = triangle(angles[turn], angles[(turn + 1) % 3])
    figure = (*outline(*corners), *corner_angles([*texts[turn:], *texts[:turn]], corners))
    return Draft("Find the missing angle x.", str(180 - first - second), figure)


def parallel_lines(random: Random) -> Draft:
    """Corresponding, alternate and co-interior angles at parallel lines."""
    degrees = random.choice([*range(42, 83), *range(98, 139)])
    shapes, low, high = parallels(5, degrees, half=5)
    known, asked = random.randrange(4), random.randrange(4)
    sizes = (degrees, 180 - degrees)
    crossings = random.sample((low, high), 2)
    figure = (
        *shapes,
        angle_at(degrees_text(sizes[known % 2]), crossings[0], degrees, known),
        angle_at("x", crossings[1], degrees, asked),
    )
    return Draft("The two lines with arrows are parallel. Find x.", str(sizes[asked % 2]), figure)


def rectangle_perimeter(random: Random) -> Draft:
    """Twice the sum of the labelled sides."""
    width, height, figure = _labelled_rectangle(random)
    return Draft("Find the perimeter of the rectangle.", str(2 * (width + height)), figure)


def rectangle_area(random: Random) -> Draft:
    """The product of the labelled sides."""
    width, height, figure = _labelled_rectangle(random)
    return Draft("Find the area of the rectangle.", str(width * height), figure)


def triangle_area(random: Random) -> Draft:
    """Half the product of base and height."""
    base = 2 * random.randint(4, 12)
    height = random.randint(base // 2, base)
    foot = base * random.uniform(0.25, 0.35)
    corners = (0j, complex(base), complex(foot, height))
    down = complex(foot)
    figure = (
        Region(corners),
        *outline(*corners),
        Line(down, corners[2]),
        right_angle(down, corners[1], corners[2]),
        SideLabel(str(base), corners[0], corners[1]),
        SideLabel(str(height), down, corners[2]),
    )
    return Draft("Find the area of the triangle.", str(base * height // 2), figure)


def circle_diameter(random: Random) -> Draft:
    """Twice the labelled radius."""
    radius, figure = _labelled_circle(random)
    return Draft("Find the diameter of the circle.", str(2 * radius), figure)


def circle_radius(random: Random) -> Draft:
    """Half the labelled diameter."""
    radius = random.randint(2, 40)
    rim = ray(random.uniform(0, 360), radius)
    figure = (Circle(0, radius), Line(-rim, rim), Dot(0), SideLabel(str(2 * radius), -rim, rim))
    return Draft("Find the radius of the circle.", str(radius), figure)


def circle_area(random: Random) -> Draft:
    """Pi times the square of the labelled radius."""
    radius, figure = _labelled_circle(random)
    return Draft(r"Find the area of the circle in terms of $\pi$.", rf"{radius**2} \pi", figure)


def circumference(random: Random) -> Draft:
    """Twice pi times the labelled radius."""
    radius, figure = _labelled_circle(random)
    return Draft(r"Find the circumference of the circle in terms of $\pi$.", rf"{2 * radius} \pi", figure)


LEVEL3 = (
    third_angle,
    parallel_lines,
    rectangle_perimeter,
    rectangle_area,
    triangle_area,
    circle_diameter,
    circle_radius,
    circle_area,
    circumference,
)


def _labelled_rectangle(random: Random) -> tuple[int, int, tuple[Shape, ...]]:
    """Width, height and figure of a rectangle, with one of each pair of sides labelled."""
    width = random.randint(4, 20)
    height = random.randint(-(-width // 2), 2 * width)
    corners = (0j, complex(width), complex(width, height), complex(0, height))
    level, upright = random.choice((0, 2)), random.choice((1, 3))
    sides = ((level, width), (upright, height))
    labels = [SideLabel(str(length), corners[side], corners[(side + 1) % 4]) for side, length in sides]
    squares = [right_angle(corners[0], corners[1], corners[3])]
    return width, height, (Region(corners), *outline(*corners), *squares, *labels)


def _labelled_circle(random: Random) -> tuple[int, tuple[Shape, ...]]:
    """A radius, and the figure of a circle with this radius labelled."""
    radius = random.randint(2, 30)
    rim = ray(random.uniform(0, 360), radius)
    return radius, (Circle(0, radius), Line(0, rim), Dot(0), SideLabel(str(radius), 0, rim))


# Level 4: figures as in Geometry3K, with named points and an unknown x; answers are numbers, roots or multiples of pi.


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


LEVEL4 = (
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
