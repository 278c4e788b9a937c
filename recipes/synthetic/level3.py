"""Level 3: one step of reasoning from the numbers in a figure drawn to scale."""

from random import Random

from recipes.synthetic.figure import Circle, Dot, Line, Region, Shape, SideLabel
from recipes.synthetic.parts import (
    Draft,
    angle_at,
    corner_angles,
    degrees_text,
    outline,
    parallels,
    ray,
    right_angle,
    triangle,
)


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
    width, height, figure = _rectangle(random)
    return Draft("Find the perimeter of the rectangle.", str(2 * (width + height)), figure)


def rectangle_area(random: Random) -> Draft:
    """The product of the labelled sides."""
    width, height, figure = _rectangle(random)
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
    radius, figure = _circle(random)
    return Draft("Find the diameter of the circle.", str(2 * radius), figure)


def circle_radius(random: Random) -> Draft:
    """Half the labelled diameter."""
    radius = random.randint(2, 40)
    rim = ray(random.uniform(0, 360), radius)
    figure = (Circle(0, radius), Line(-rim, rim), Dot(0), SideLabel(str(2 * radius), -rim, rim))
    return Draft("Find the radius of the circle.", str(radius), figure)


def circle_area(random: Random) -> Draft:
    """Pi times the square of the labelled radius."""
    radius, figure = _circle(random)
    return Draft(r"Find the area of the circle in terms of $\pi$.", rf"{radius**2} \pi", figure)


def circumference(random: Random) -> Draft:
    """Twice pi times the labelled radius."""
    radius, figure = _circle(random)
    return Draft(r"Find the circumference of the circle in terms of $\pi$.", rf"{2 * radius} \pi", figure)


TEMPLATES = (
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


def _rectangle(random: Random) -> tuple[int, int, tuple[Shape, ...]]:
    """Width, height and figure of a rectangle, with one of each pair of sides labelled."""
    width = random.randint(4, 20)
    height = random.randint(-(-width // 2), 2 * width)
    corners = (0j, complex(width), complex(width, height), complex(0, height))
    level, upright = random.choice((0, 2)), random.choice((1, 3))
    labels = [
        SideLabel(str(length), corners[side], corners[(side + 1) % 4])
        for side, length in ((level, width), (upright, height))
    ]
    squares = [right_angle(corners[0], corners[1], corners[3])]
    return width, height, (Region(corners), *outline(*corners), *squares, *labels)


def _circle(random: Random) -> tuple[int, tuple[Shape, ...]]:
    """A radius, and the figure of a circle with this radius labelled."""
    radius = random.randint(2, 30)
    rim = ray(random.uniform(0, 360), radius)
    return radius, (Circle(0, radius), Line(0, rim), Dot(0), SideLabel(str(radius), 0, rim))
