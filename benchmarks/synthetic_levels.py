"""Harder synthetic problems than those of ``dataproto grpo``, levels 2 to 4, as rows, and as files for ``--data-path``.

    python benchmarks/synthetic_levels.py --problems 0 512 512 0 --output outputs/problems

writes as many problems of levels 1 to 4, in EasyR1's schema, to ``outputs/problems.jsonl``, and their pictures into the folder
``outputs/problems``. ``--split test`` writes other problems. A text in a figure that is true to scale is the measure of what it
labels.
"""

import argparse
import cmath
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
# The folder of this file comes last: its dataproto.py is not the library.
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE), str(HERE)]

from synthetic_figures import (  # noqa: E402
    AngleLabel,
    Chevron,
    Circle,
    Dot,
    DrawnText,
    Line,
    Point,
    Region,
    RightAngle,
    SideLabel,
    Text,
    draw_with_texts,
    random_style,
    turned,
)

from recipes.data.problem_rows import read_row  # noqa: E402
from recipes.demo.problems import Problem, Split, first_of_split  # noqa: E402
from recipes.demo.rows import ProblemRows  # noqa: E402


@dataclass(frozen=True)
class Draft:
    """What a template returns: a question, its answer, and the figure to draw in some style."""

    text: str
    answer: str
    figure: Sequence[Any]


def outline(*corners: complex) -> list[Line]:
    """The sides of a polygon, from each corner to the next."""
    return [Line(a, b) for a, b in zip(corners, (*corners[1:], corners[0]))]


@dataclass(frozen=True)
class Level:
    """The templates of a level, and its pictures: side, pen and font in pixels, and the largest rotation in degrees."""

    templates: Sequence[Callable[[Random], Draft]]
    size: int
    turn: float
    pen: float
    font: float


@dataclass(frozen=True)
class LevelProblem(Problem):
    """A problem, and the texts in its picture."""

    shown: tuple[DrawnText, ...]


def make_problem(index: int, level: int, seed: int = 0, split: Split = "train") -> LevelProblem:
    """Problem ``index`` of a level of `LEVELS`, as `recipes.demo.problems.make_problem`, which makes those of level 1.

    >>> problem = make_problem(0, level=2)
    >>> problem.text, [each.text for each in problem.shown], problem.answer
    ('<image>Find the marked angle.', ['45'], '45')
    """
    look = LEVELS[level]

    def make(random: Random) -> LevelProblem:
        template = random.choice(look.templates)
        draft = template(random)
        style = random_style(random, turn=look.turn, pen=look.pen, font=look.font)
        image, shown = draw_with_texts(draft.figure, look.size, style)
        return LevelProblem({"images": [image]}, f"<image>{draft.text}", draft.answer, template.__name__, shown)

    return first_of_split(make, Random(f"synthetic/{level}/{seed}/{split}/{index}"), split)


class LevelRows(ProblemRows):
    """Problems of any level from 1 to 4 as rows.

    >>> row = LevelRows(2)[0]
    >>> row["data_source"], row["reward_model"]["ground_truth"]
    ('synthetic/level2', '45')
    """

    def row(self, place: int) -> dict[str, Any]:
        """The problem of this number."""
        if self.level == 1:
            return super().row(place)
        problem = make_problem(place, int(self.level), self.seed, self.split)
        raw = {"problem": problem.text, "answer": problem.answer, **problem.media}
        return read_row(raw, place, self.split, f"synthetic/level{self.level}", self.instruction)


def write_problems(file: Path, counts: Mapping[int, int], split: Split) -> Path:
    """Writes as many problems of each level as ``counts`` says to ``file``, and the pictures into the folder of its name."""
    folder = file.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for level, count in counts.items():
        for place, row in enumerate(LevelRows(level, 0, split)[:count]):
            picture = folder / f"{level}-{place}.png"
            row["images"][0].save(picture)
            truth = row["reward_model"]["ground_truth"]
            problem = {
                "problem": row["prompt"][0]["content"],
                "answer": truth,
                "images": [f"{folder.name}/{picture.name}"],
            }
            lines.append(json.dumps(problem | {"data_source": f"level{level}"}))
    draft = file.with_suffix(f".{os.getpid()}")  # another process may write the same
    draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return draft.rename(file)


def ray(degrees: float, length: float = 1.0) -> Point:
    """The point at distance `length` from the origin, `degrees` counter-clockwise from the right."""
    return cmath.rect(length, math.radians(degrees))


def triangle(first: float, second: float, base: float = 1.0) -> tuple[Point, Point, Point]:
    """The corners, counter-clockwise, of the triangle with these angles in degrees at the ends of its base."""
    side = base * math.sin(math.radians(second)) / math.sin(math.radians(first + second))
    return 0j, complex(base), ray(first, side)


def corner_angles(texts: Sequence[str], corners: Sequence[Point]) -> list[Any]:
    """Labels in the angles of a counter-clockwise polygon."""
    following, preceding = (*corners[1:], corners[0]), (corners[-1], *corners[:-1])
    places = zip(texts, corners, following, preceding)
    return [AngleLabel(text, corner, after, before) for text, corner, after, before in places]


def parallels(height: float, degrees: float, half: float) -> tuple[list[Any], Point, Point]:
    """Two horizontal lines, `height` apart, and a transversal at the angle `degrees`: the shapes and the two crossings."""
    low, high = 0j, ray(degrees, height / math.sin(math.radians(degrees)))
    over = ray(degrees, 0.55 * half)
    shapes: list[Any] = [Line(low - over, high + over)]
    for crossing in (low, high):
        shapes += [Line(crossing - half, crossing + half), Chevron(crossing + 0.85 * half, 1 + 0j)]
    return shapes, low, high


def angle_at(text: str, crossing: Point, degrees: float, place: int) -> AngleLabel:
    """`text` in one of the four angles (0 to 3, counter-clockwise from the right) where a transversal cuts a line."""
    rays = [crossing + ray(turn) for turn in (0, degrees, 180, 180 + degrees)]
    return AngleLabel(text, crossing, rays[place], rays[(place + 1) % 4])


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
    figure = (Region(corners), *outline(*corners), Text(str(area), LARGE))
    return Draft("Find the shaded area.", str(area), _among(random, figure))


LEVEL2 = (marked_angle, labelled_side, labelled_radius, labelled_area)


def _among(random: Random, figure: Sequence[Any]) -> tuple[Any, ...]:
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


def _plain_triangle(random: Random, place: Place) -> list[Any]:
    turns = (random.uniform(0, 60), random.uniform(120, 180), random.uniform(240, 300))
    return outline(*(place(ray(turn, 2.3)) for turn in turns))


def _plain_rectangle(random: Random, place: Place) -> list[Any]:
    return outline(*_placed_rectangle(random, 1.8, place))


def _plain_circle(random: Random, place: Place) -> list[Any]:
    return [Circle(place(0), random.uniform(1.4, 2.1))]


def _plain_parallels(random: Random, place: Place) -> list[Any]:
    gap, lean = random.uniform(0.6, 1), random.uniform(-1, 1)
    level: list[Any] = [Line(place(complex(-2, y)), place(complex(2, y))) for y in (-gap, gap)]
    return [*level, Line(place(complex(-lean, -2)), place(complex(lean, 2)))]


_PLAIN = (_plain_triangle, _plain_rectangle, _plain_circle, _plain_parallels)


# Level 3: one step of reasoning from the numbers in a figure that is true to scale.


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
        RightAngle(down, corners[1], corners[2]),
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
    figure = (Circle(0j, radius), Line(-rim, rim), Dot(0j), SideLabel(str(2 * radius), -rim, rim))
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


def _labelled_rectangle(random: Random) -> tuple[int, int, tuple[Any, ...]]:
    """Width, height and figure of a rectangle, with one of each pair of sides labelled."""
    width = random.randint(4, 20)
    height = random.randint(-(-width // 2), 2 * width)
    corners = (0j, complex(width), complex(width, height), complex(0, height))
    level, upright = random.choice((0, 2)), random.choice((1, 3))
    sides = ((level, width), (upright, height))
    labels = [SideLabel(str(length), corners[side], corners[(side + 1) % 4]) for side, length in sides]
    squares = [RightAngle(corners[0], corners[1], corners[3])]
    return width, height, (Region(corners), *outline(*corners), *squares, *labels)


def _labelled_circle(random: Random) -> tuple[int, tuple[Any, ...]]:
    """A radius, and the figure of a circle with this radius labelled."""
    radius = random.randint(2, 30)
    rim = ray(random.uniform(0, 360), radius)
    return radius, (Circle(0j, radius), Line(0j, rim), Dot(0j), SideLabel(str(radius), 0j, rim))


# Level 4: two steps of reasoning from the numbers in a figure that is true to scale.


def right_triangle_perimeter(random: Random) -> Draft:
    """The perimeter of a right triangle with labelled legs: their hypotenuse, and the sum of all sides."""
    times = random.randint(1, 5)
    width, height, slant = (times * side for side in random.choice(((3, 4, 5), (4, 3, 5), (12, 5, 13), (8, 15, 17))))
    corners = (0j, complex(width), complex(0, height))
    labels = [SideLabel(str(width), *corners[:2]), SideLabel(str(height), corners[2], corners[0])]
    figure = (Region(corners), *outline(*corners), RightAngle(*corners), *labels)
    return Draft("Find the perimeter of the triangle.", str(width + height + slant), figure)


def corner_area(random: Random) -> Draft:
    """The area of a rectangle without a smaller one at its corner."""
    width, height = random.randint(10, 20), random.randint(10, 20)
    right, upper = random.randint(6, width - 4), random.randint(6, height - 4)
    inner, top = complex(width - right, height - upper), complex(width - right, height)
    corners = (0j, complex(width), complex(width, height - upper), inner, top, complex(0, height))
    sides = ((0, width), (2, right), (3, upper), (5, height))
    labels = [SideLabel(str(length), corners[side], corners[(side + 1) % 6]) for side, length in sides]
    figure = (Region(corners), *outline(*corners), *labels)
    return Draft("Find the shaded area.", str(width * height - right * upper), figure)


def ring_area(random: Random) -> Draft:
    """The area between two circles with one centre and labelled radii."""
    inner = random.randint(4, 12)
    outer = random.randint(2 * inner - inner // 4, 2 * inner + 4)
    near, far = random.uniform(0, 360), random.uniform(100, 160)
    rim, edge = ray(near, inner), ray(near + far, outer)
    labels = [
        SideLabel(str(inner), 0j, rim),
        SideLabel(str(outer), edge * inner / outer, edge),
    ]  # each between two circles
    figure = (Circle(0j, inner), Circle(0j, outer), Dot(0j), Line(0j, rim), Line(0j, edge), *labels)
    return Draft(r"Find the area between the circles in terms of $\pi$.", rf"{outer**2 - inner**2} \pi", figure)


def outer_angle(random: Random) -> Draft:
    """The angle between a side of a triangle and the extended base: the third angle, and what it lacks to 180 degrees."""
    first, second = random.randint(40, 65), random.randint(60, 85)
    a, b, c = triangle(first, second)
    beyond = b + abs(c - b) * 0.8
    labels = [AngleLabel(f"{first}°", a, b, c), AngleLabel(f"{180 - first - second}°", c, a, b)]
    figure = (*outline(a, b, c), Line(b, beyond), *labels, AngleLabel("x", b, beyond, c))
    return Draft("Find the angle x outside the triangle.", str(180 - second), figure)


LEVEL4 = (right_triangle_perimeter, corner_area, ring_area, outer_angle)


LEVELS = {
    2: Level(LEVEL2, size=112, turn=8, pen=1.3, font=12),
    3: Level(LEVEL3, size=168, turn=12, pen=1.4, font=14),
    4: Level(LEVEL4, size=168, turn=12, pen=1.4, font=14),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, nargs=4, required=True, help="of levels 1, 2, 3 and 4")
    parser.add_argument("--split", choices=("train", "test"), default="train", help="default: train")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the pictures; the problems are in OUTPUT.jsonl"
    )
    options = parser.parse_args()
    print(write_problems(options.output.with_suffix(".jsonl"), dict(enumerate(options.problems, 1)), options.split))


if __name__ == "__main__":
    main()
