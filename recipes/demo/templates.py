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


def corner_angles(texts: Sequence[str], corners: Sequence[Point]) -> list[Shape]:
    """Labels in the angles of a counter-clockwise polygon."""
    following, preceding = (*corners[1:], corners[0]), (corners[-1], *corners[:-1])
    places = zip(texts, corners, following, preceding)
    return [AngleLabel(text, corner, after, before) for text, corner, after, before in places]


def right_angle(vertex: Point, a: Point, b: Point) -> AngleMark:
    """The small square between the ray to `a` and the ray to `b`, which is counter-clockwise from it."""
    return AngleMark(vertex, a, b, right=True)


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
    texts = [f"{first}°", f"{second}°", "x"]
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
        angle_at(f"{sizes[known % 2]}°", crossings[0], degrees, known),
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
