"""Drawn problems and conversations as rows of a data set, without a file."""

from collections.abc import Sequence
from random import Random
from typing import Any

from recipes.data.problem_rows import read_row
from recipes.demo.classes import draw_class
from recipes.demo.problems import Split, make_problem

EPOCH_ROWS = 2**20
"""Rows of one epoch, more than a run draws."""


class DrawnRows(Sequence[dict[str, Any]]):
    """Rows that are drawn when they are read."""

    rows: int  # of an epoch

    def __len__(self) -> int:
        return self.rows

    @property
    def recurring(self) -> bool:
        """Whether a run may draw a row, and its picture, twice; see `recipes.data.loader.may_recur`."""
        return self.rows < EPOCH_ROWS


class ProblemRows(DrawnRows):
    """Drawn problems as rows like those of `Geo3KDataset`; each is drawn when it is read.

    >>> row = ProblemRows(level=1)[7]
    >>> row["data_source"], row["index"], len(row["images"])
    ('synthetic/level1', 7, 1)
    """

    def __init__(
        self, level: int = 1, seed: int = 0, split: Split = "train", instruction: str = "", rows: int = EPOCH_ROWS
    ) -> None:
        self.level, self.seed, self.split, self.instruction, self.rows = level, seed, split, instruction, rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self.rows))]
        place = range(self.rows)[index]
        problem = make_problem(place, self.level, self.seed, self.split)
        raw = {"problem": problem.text, "answer": problem.answer, "images": [problem.image]}
        return read_row(raw, place, self.split, f"synthetic/level{self.level}", self.instruction)


class DrawnTalks(DrawnRows):
    """Conversations of two turns about the picture of a class.

    >>> [turn["content"] for turn in DrawnTalks()[3]["prompt"]]
    ['<image>Which colour?', 'black', 'Which shape?', 'filled circle']
    """

    def __init__(self, seed: int = 0, split: Split = "train", rows: int = EPOCH_ROWS) -> None:
        self.seed, self.split, self.rows = seed, split, rows

    def __getitem__(self, place: Any) -> Any:
        picture = draw_class(range(self.rows)[place], self.seed, self.split)
        turns = ("<image>Which colour?", picture.colour, "Which shape?", f"{picture.fill} {picture.shape}")
        return _conversation(turns, [picture.image], "synthetic/talks", place)


class DrawnSums(DrawnRows):
    """Conversations of one turn, without a picture.

    >>> [turn["content"] for turn in DrawnSums()[3]["prompt"]]
    ['What is 5 + 8?', '13']
    """

    def __init__(self, seed: int = 0, split: Split = "train", rows: int = EPOCH_ROWS) -> None:
        self.seed, self.split, self.rows = seed, split, rows

    def __getitem__(self, place: Any) -> Any:
        random = Random(f"sums/{self.split}/{self.seed}/{range(self.rows)[place]}")
        a, b = random.randint(0, 9), random.randint(0, 9)
        return _conversation((f"What is {a} + {b}?", str(a + b)), [], "synthetic/sums", place)


def _conversation(turns: Sequence[str], images: list[Any], source: str, place: int) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]
    return {"prompt": messages, "images": images, "videos": [], "data_source": source, "index": place}
