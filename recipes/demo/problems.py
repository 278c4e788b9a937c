"""Synthetic problems: problem i is a pure function of (seed, split, i), and the splits are disjoint."""

import cmath
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any, Literal, TypeVar

from PIL import Image, ImageDraw, ImageFont

from dataproto.errors import InvalidConfig

Split = Literal["train", "test"]
EPOCH_ROWS = 2**20
"""Rows of one epoch, more than a run takes."""
TEST_SHARE = 8  # one problem in this number belongs to the test split
SIDE = 56  # pixels of a picture
SUPERSAMPLING = 3


@dataclass(frozen=True)
class Draft:
    """What a template returns: a question, its answer, and a polygon that shows the answer as a label.

    ``corners`` are counter-clockwise, in pixels, as complex numbers with the y axis upwards. The label is within the angle at the
    first one, which an arc marks, or, unless ``marks_angle``, below the middle of the first side.
    """

    text: str
    answer: str
    corners: tuple[complex, ...]
    marks_angle: bool = False


def triangle_angle(random: Random) -> Draft:
    """The labelled angle of a triangle, 30 to 90 degrees."""
    degrees = random.choice(range(30, 100, 10))
    base = complex(random.uniform(36, 42), 0)
    top = cmath.rect(random.uniform(30, 38), math.radians(degrees))
    return Draft("Find the marked angle.", str(degrees), (0j, base, top), marks_angle=True)


def rectangle_side(random: Random) -> Draft:
    """The labelled side of a rectangle, 2 to 9."""
    length = random.choice(range(2, 10))
    width, height = 4.4 * length, random.uniform(14, 26)
    corners = (0j, complex(width, 0), complex(width, height), complex(0, height))
    return Draft("Find the labelled side.", str(length), corners)


TEMPLATES = (triangle_angle, rectangle_side)
"""Read the only number in a small figure that is true to scale: a randomly initialised model learns it within minutes."""


@dataclass(frozen=True)
class Problem:
    """A synthetic problem: the columns of media of its row, a question, its answer, and the name of its template."""

    media: Mapping[str, list[Any]]
    text: str
    answer: str
    kind: str

    @property
    def image(self) -> Image.Image:
        """Its picture."""
        return self.media["images"][0]


def make_problem(index: int, seed: int = 0, split: Split = "train") -> Problem:
    """Makes problem ``index`` of ``seed``, a pure function of its arguments.

    Raises:
        InvalidConfig: the split is unknown.

    >>> problem = make_problem(5)
    >>> problem == make_problem(5), problem.image.size
    (True, (56, 56))
    """
    return first_of_split(_candidate, Random(f"synthetic/1/{seed}/{split}/{index}"), split)


MadeProblem = TypeVar("MadeProblem", bound=Problem)


def first_of_split(make: Callable[[Random], MadeProblem], random: Random, split: Split) -> MadeProblem:
    """The first problem made that belongs to ``split``.

    The split of a problem depends only on the hash of its text and pixels, so no problem occurs in both splits, for any seeds.
    """
    if split not in ("train", "test"):
        raise InvalidConfig(f"split={split!r} is unknown: choose 'train' or 'test'")
    while split_of(problem := make(random)) != split:
        pass
    return problem


def split_of(problem: Problem) -> Split:
    """The split of a problem, from the hash of its text and pixels."""
    digest = hashlib.blake2b(problem.text.encode() + b"\0" + problem.image.tobytes(), digest_size=8).digest()
    return "test" if int.from_bytes(digest) % TEST_SHARE == 0 else "train"


def _candidate(random: Random) -> Problem:
    template = random.choice(TEMPLATES)
    draft = template(random)
    return Problem({"images": [draw(draft, random)]}, f"<image>{draft.text}", draft.answer, template.__name__)


def draw(draft: Draft, random: Random) -> Image.Image:
    """The picture of a draft, at random turned by up to 8 degrees, out of the middle, and with other colours, pen and letters."""
    turn = cmath.rect(1, math.radians(random.uniform(-8, 8)))
    shift = complex(random.uniform(-1, 1), random.uniform(-1, 1))
    ink, accent = (tuple(random.randint(0, most) for _ in range(3)) for most in (60, 40))
    tint = random.randint(135, 165), random.randint(165, 195), random.randint(220, 250)
    pen, letter = 1.3 * random.uniform(0.85, 1.25), 12 * random.uniform(0.95, 1.1)
    corners = [corner * turn for corner in draft.corners]
    xs, ys = [corner.real for corner in corners], [corner.imag for corner in corners]
    room = SIDE - 2 * (pen + (0.3 if draft.marks_angle else 1.4) * letter)
    free = max(0.0, room - (max(xs) - min(xs))) / 2, max(0.0, room - (max(ys) - min(ys))) / 2
    middle = SIDE / 2 + free[0] * shift.real, SIDE / 2 + free[1] * shift.imag
    center = (complex(min(xs), min(ys)) + complex(max(xs), max(ys))) / 2

    def place(point: complex) -> tuple[float, float]:
        offset = point - center
        return (middle[0] + offset.real) * SUPERSAMPLING, (middle[1] - offset.imag) * SUPERSAMPLING

    image = Image.new("RGB", (SIDE * SUPERSAMPLING,) * 2, "white")
    pencil, width, letter = ImageDraw.Draw(image), max(1, round(pen * SUPERSAMPLING)), letter * SUPERSAMPLING
    pencil.polygon([place(corner) for corner in corners], fill=tint)
    # Both rays of an angle begin at its vertex.
    closing = (corners[0], corners[-1]) if draft.marks_angle else (corners[-1], corners[0])
    for start, end in (*pairwise(corners), closing):
        pencil.line([*place(start), *place(end)], fill=ink, width=width)
    label = Label(draft.answer, font_of(round(letter)))
    if draft.marks_angle:
        rays = [(corner - corners[0]) / abs(corner - corners[0]) for corner in (corners[1], corners[-1])]
        (x, y), radius, thin = place(corners[0]), 0.75 * letter, max(1, round(0.7 * width))
        first, second = (-math.degrees(cmath.phase(ray)) for ray in reversed(rays))
        pencil.arc((x - radius, y - radius, x + radius, y + radius), first, second, fill=ink, width=thin)
        opening = cmath.phase(rays[1] / rays[0]) % (2 * math.pi)
        way = rays[0] * cmath.rect(1, opening / 2)
        clear = (label.reach(rays[0] * 1j) + width) / math.sin(min(opening / 2, math.pi / 2))
        distance = max(clear, label.reach(way) + 0.8 * letter)
    else:
        (x, y), way = place((corners[0] + corners[1]) / 2), -1j * turn / abs(-1j * turn)
        distance = label.reach(way) + 0.3 * letter
    label.write(pencil, x + distance * way.real, y - distance * way.imag, accent)
    return image.reduce(SUPERSAMPLING)


class Label:
    """A text in a picture. Its sizes are in pixels of the supersampled picture."""

    def __init__(self, text: str, font: ImageFont.FreeTypeFont) -> None:
        self.text, self.font = text, font
        left, top, right, bottom = font.getbbox(text, anchor="ls")
        self.width, self.height = right - left, bottom - top
        self.middle = (left + right) / 2, (top + bottom) / 2

    def reach(self, way: complex) -> float:
        """The extent of its box from the middle in a direction."""
        return abs(way.real) * self.width / 2 + abs(way.imag) * self.height / 2

    def write(self, pencil: ImageDraw.ImageDraw, x: float, y: float, colour: tuple[int, ...]) -> None:
        """Draws it with its middle at x and y, or as near to them as the picture allows."""
        rim = SIDE * SUPERSAMPLING - 2
        x = min(max(x, self.width / 2 + 2), rim - self.width / 2)
        y = min(max(y, self.height / 2 + 2), rim - self.height / 2)
        pencil.text((x - self.middle[0], y - self.middle[1]), self.text, colour, self.font, "ls")


@lru_cache(maxsize=256)
def font_of(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font in this size."""
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("labels need a scalable font, but this Pillow was built without FreeType")
    return font


def sample_texts(number: int = 50) -> list[str]:
    """Questions, ``number`` of each template and always the same, on which the tiny tokenizer is trained."""
    random = Random("synthetic/texts")
    return [template(random).text for template in TEMPLATES for _ in range(number)]


class RowsBySeed(Sequence[dict[str, Any]]):
    """Rows that are made when they are read; each is a pure function of split, seed and place."""

    def __init__(self, seed: int = 0, split: Split = "train", rows: int = EPOCH_ROWS) -> None:
        self.seed, self.split, self.rows = seed, split, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self.rows))]
        return self.row(range(self.rows)[index])

    def row(self, place: int) -> dict[str, Any]:
        """The row at a place from 0 on."""
        raise NotImplementedError


def task_row(task: str, source: str, place: int, **described: Any) -> dict[str, Any]:
    """A row of prompts that says what to do, and in its ``extra_info`` what an environment makes of it."""
    prompt = [{"role": "system", "content": task}]
    return {"prompt": prompt, "data_source": source, "extra_info": described, "index": place}


class DrawnRows(RowsBySeed):
    """Rows with pictures of their own."""

    @property
    def recurring(self) -> bool:
        """Whether a run may take a row, and its picture, twice; see `recipes.data.loader.may_recur`."""
        return self.rows < EPOCH_ROWS
