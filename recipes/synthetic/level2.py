"""Level 2: find and read the only number among several plain figures."""

from collections.abc import Callable
from random import Random

from recipes.synthetic.figure import AngleLabel, Circle, Dot, Label, Line, Point, Region, Shape, SideLabel, turned
from recipes.synthetic.parts import Draft, outline, ray

ANGLES = range(40, 100)
LENGTHS = range(2, 30)
RADII = range(2, 20)
AREAS = range(10, 100)

LARGE = 5.5 + 5.5j
SMALL = (14.5 + 4j, 14.5 + 14.5j, 4 + 14.5j)

Place = Callable[[Point], Point]


def marked_angle(random: Random) -> Draft:
    """The labelled angle of a triangle, 40 to 99 degrees."""
    degrees = random.choice(ANGLES)
    place = _place(LARGE, random.uniform(0, 360))
    half = degrees / 2
    vertex, base, top = place(-3.5 + 0j), place(-3.5 + ray(-half, 8)), place(-3.5 + ray(half, random.uniform(7, 8.5)))
    figure: list[Shape] = [
        Region((vertex, base, top)),
        *outline(vertex, base, top),
        AngleLabel(str(degrees), vertex, base, top),
    ]
    return Draft("Find the marked angle.", str(degrees), _among(random, figure))


def labelled_side(random: Random) -> Draft:
    """The labelled side of a rectangle, 2 to 29."""
    length = random.choice(LENGTHS)
    corners = _rectangle(random, 4, _place(LARGE, random.choice((0, 90)) + random.uniform(-8, 8)))
    side = random.randrange(4)
    label = SideLabel(str(length), corners[side], corners[(side + 1) % 4])
    figure: list[Shape] = [Region(corners), *outline(*corners), label]
    return Draft("Find the labelled side.", str(length), _among(random, figure))


def labelled_radius(random: Random) -> Draft:
    """The labelled radius of a circle, 2 to 19."""
    radius = random.choice(RADII)
    rim = LARGE + ray(random.uniform(0, 360), random.uniform(5, 5.5))
    figure: list[Shape] = [
        Circle(LARGE, abs(rim - LARGE)),
        Line(LARGE, rim),
        Dot(LARGE),
        SideLabel(str(radius), LARGE, rim),
    ]
    return Draft("Find the labelled radius.", str(radius), _among(random, figure))


def labelled_area(random: Random) -> Draft:
    """The area in a shaded rectangle, 10 to 99."""
    area = random.choice(AREAS)
    corners = _rectangle(random, 4.6, _place(LARGE, random.uniform(0, 90)))
    figure: list[Shape] = [Region(corners), *outline(*corners), Label(str(area), LARGE)]
    return Draft("Find the shaded area.", str(area), _among(random, figure))


TEMPLATES = (marked_angle, labelled_side, labelled_radius, labelled_area)


def _among(random: Random, figure: list[Shape]) -> tuple[Shape, ...]:
    """The figure in one quarter of the picture, and figures without numbers in the others."""
    plain = [shape for at in SMALL for shape in random.choice(_PLAIN)(random, _place(at, random.uniform(0, 360)))]
    quarter = 1j ** random.randrange(4)
    return tuple(turned(shape, quarter) for shape in (*plain, *figure))


def _place(at: Point, degrees: float) -> Place:
    return lambda point: at + point * ray(degrees)


def _rectangle(random: Random, half: float, place: Place) -> tuple[Point, Point, Point, Point]:
    height = half * random.uniform(0.6, 0.8)
    corners = (complex(-half, -height), complex(half, -height), complex(half, height), complex(-half, height))
    return place(corners[0]), place(corners[1]), place(corners[2]), place(corners[3])


def _plain_triangle(random: Random, place: Place) -> list[Shape]:
    turns = (random.uniform(0, 60), random.uniform(120, 180), random.uniform(240, 300))
    return outline(*(place(ray(turn, 2.3)) for turn in turns))


def _plain_rectangle(random: Random, place: Place) -> list[Shape]:
    return outline(*_rectangle(random, 1.8, place))


def _plain_circle(random: Random, place: Place) -> list[Shape]:
    return [Circle(place(0), random.uniform(1.4, 2.1))]


def _plain_parallels(random: Random, place: Place) -> list[Shape]:
    gap, lean = random.uniform(0.6, 1), random.uniform(-1, 1)
    level: list[Shape] = [Line(place(complex(-2, y)), place(complex(2, y))) for y in (-gap, gap)]
    return [*level, Line(place(complex(-lean, -2)), place(complex(lean, 2)))]


_PLAIN = (_plain_triangle, _plain_rectangle, _plain_circle, _plain_parallels)
