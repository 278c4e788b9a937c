"""Drawn problems as rows of a data set, without a file."""

from collections.abc import Sequence
from typing import Any

from recipes.data.problem_rows import read_row
from recipes.synthetic.problems import Split, make_problem

ENDLESS = 2**20
"""Problems in one epoch; more than a run draws."""


class ProblemRows(Sequence[dict[str, Any]]):
    """Rows as `Geo3KDataset` gives them, each drawn when asked for.

    >>> row = ProblemRows(level=1)[7]
    >>> row["data_source"], row["index"], len(row["images"])
    ('synthetic/level1', 7, 1)
    """

    def __init__(
        self, level: int = 1, seed: int = 0, split: Split = "train", instruction: str = "", rows: int = ENDLESS
    ) -> None:
        self.level, self.seed, self.split, self.instruction, self.rows = level, seed, split, instruction, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self.rows))]
        place = range(self.rows)[index]
        problem = make_problem(place, self.level, self.seed, self.split)
        raw = {"problem": problem.text, "answer": problem.answer, "images": [problem.image]}
        return read_row(raw, place, self.split, f"synthetic/level{self.level}", self.instruction)
