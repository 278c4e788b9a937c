"""Synthetic problems: problem i is a pure function of (level, seed, split, i), and the splits are disjoint."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from PIL import Image

from dataproto.errors import InvalidConfig
from recipes.demo import templates
from recipes.demo.figure import DrawnText, draw_with_texts, random_style
from recipes.demo.templates import Draft

Split = Literal["train", "test"]
EPOCH_ROWS = 2**20
"""Rows of one epoch, more than a run takes."""
TEST_SHARE = 8  # one problem in this number belongs to the test split


@dataclass(frozen=True)
class Level:
    """The templates of a level, and its pictures: side, pen and font in pixels, and the largest rotation in degrees."""

    templates: Sequence[Callable[[Random], Draft]]
    size: int
    turn: float
    pen: float
    font: float


LEVELS: dict[int, Level] = {
    1: Level(templates.LEVEL1, size=56, turn=8, pen=1.3, font=12),
    2: Level(templates.LEVEL2, size=112, turn=8, pen=1.3, font=12),
    3: Level(templates.LEVEL3, size=168, turn=12, pen=1.4, font=14),
}


@dataclass(frozen=True)
class Problem:
    """A drawn problem; `kind` is the name of its template, `shown` are the texts in its picture."""

    image: Image.Image
    text: str
    answer: str
    kind: str
    shown: tuple[DrawnText, ...] = ()

    @property
    def media(self) -> dict[str, list[Any]]:
        """The columns of media of its row."""
        return {"images": [self.image]}

    @property
    def content(self) -> bytes:
        """Its pixels."""
        return self.image.tobytes()


def make_problem(index: int, level: int = 1, seed: int = 0, split: Split = "train") -> Problem:
    """Draws problem ``index`` of ``seed``, a pure function of its arguments.

    Candidates are drawn until one belongs to ``split``. The split of a candidate depends only on the hash of its text and
    pixels, so no problem occurs in both splits, for any seeds.

    Raises:
        InvalidConfig: the level or the split is unknown.

    >>> problem = make_problem(5)
    >>> problem == make_problem(5), problem.image.size
    (True, (56, 56))
    """
    if level not in LEVELS:
        raise InvalidConfig(f"level={level} is unknown: choose one of {sorted(LEVELS)}")
    if split not in ("train", "test"):
        raise InvalidConfig(f"split={split!r} is unknown: choose 'train' or 'test'")
    random = Random(f"synthetic/{level}/{seed}/{split}/{index}")
    while True:
        problem = _candidate(random, LEVELS[level])
        if split_of(problem) == split:
            return problem


def split_of(problem: Problem) -> Split:
    """The split of a problem, from the hash of its text and pixels."""
    digest = hashlib.blake2b(problem.text.encode() + b"\0" + problem.image.tobytes(), digest_size=8).digest()
    return "test" if int.from_bytes(digest) % TEST_SHARE == 0 else "train"


def _candidate(random: Random, level: Level) -> Problem:
    template = random.choice(level.templates)
    draft = template(random)
    style = random_style(random, turn=level.turn, pen=level.pen, font=level.font)
    image, shown = draw_with_texts(draft.figure, level.size, style, draft.unit)
    return Problem(image, f"<image>{draft.text}", draft.answer, template.__name__, shown)


def sample_texts(number: int = 50) -> list[str]:
    """Questions of level 1, ``number`` of each template and always the same, on which the tiny tokenizer is trained."""
    random = Random("synthetic/texts")
    return [template(random).text for template in LEVELS[1].templates for _ in range(number)]


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


class DrawnRows(RowsBySeed):
    """Rows with pictures of their own."""

    @property
    def recurring(self) -> bool:
        """Whether a run may take a row, and its picture, twice; see `recipes.data.loader.may_recur`."""
        return self.rows < EPOCH_ROWS
