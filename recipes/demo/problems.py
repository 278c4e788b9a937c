"""Synthetic problems: problem i is a pure function of (seed, split, i), and the splits are disjoint."""

import cmath
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, TypeVar

from PIL import Image

from dataproto.errors import InvalidConfig
from recipes.demo.figure import AngleMark, Label, Line, Region, WedgeLabel, draw, random_style

Split = Literal["train", "test"]
EPOCH_ROWS = 2**20
"""Rows of one epoch, more than a run takes."""
TEST_SHARE = 8  # one problem in this number belongs to the test split
SIDE = 56  # pixels of a picture


@dataclass(frozen=True)
class Draft:
    """What a template returns: a question, its answer, and the figure to draw in some style.

    `text` never contains a number that the answer depends on; these numbers are in the figure.
    """

    text: str
    answer: str
    figure: Sequence[Any]


def triangle_angle(random: Random) -> Draft:
    """The labelled angle of a triangle, 30 to 90 degrees."""
    degrees = random.choice(range(30, 100, 10))
    vertex, base = 0j, complex(random.uniform(36, 42), 0)
    top = cmath.rect(random.uniform(30, 38), math.radians(degrees))
    corners = (vertex, base, top)
    sides = Line(vertex, base), Line(vertex, top), Line(base, top)
    figure = (Region(corners), *sides, AngleMark(*corners), WedgeLabel(str(degrees), *corners))
    return Draft("Find the marked angle.", str(degrees), figure)


def rectangle_side(random: Random) -> Draft:
    """The labelled side of a rectangle, 2 to 9."""
    length = random.choice(range(2, 10))
    width, height = 4.4 * length, random.uniform(14, 26)
    corners = (0j, complex(width, 0), complex(width, height), complex(0, height))
    label = Label(str(length), complex(width) / 2, -1j)
    return Draft("Find the labelled side.", str(length), (Region(corners), *outline(*corners), label))


def outline(*corners: complex) -> list[Line]:
    """The sides of a polygon, from each corner to the next."""
    return [Line(a, b) for a, b in zip(corners, (*corners[1:], corners[0]))]


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
        picture: Image.Image = self.media["images"][0]
        return picture


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
    image = draw(draft.figure, SIDE, random_style(random, turn=8, pen=1.3, font=12))
    return Problem({"images": [image]}, f"<image>{draft.text}", draft.answer, template.__name__)


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
