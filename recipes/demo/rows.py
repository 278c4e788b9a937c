"""Synthetic problems and conversations as rows of a data set, without a file."""

from random import Random
from typing import Any

from recipes.data.problem_rows import read_row
from recipes.data.row_values import conversation
from recipes.demo.classes import COLOURS, draw_class
from recipes.demo.problems import EPOCH_ROWS, DrawnRows, Split
from recipes.demo.sounds import problem_of_level


class ProblemRows(DrawnRows):
    """Synthetic problems as rows like those of `recipes.data.problem_rows.load_rows`.

    >>> row = ProblemRows(level=1)[7]
    >>> row["data_source"], row["index"], len(row["images"])
    ('synthetic/level1', 7, 1)
    """

    def __init__(
        self, level: int | str = 1, seed: int = 0, split: Split = "train", instruction: str = "", rows: int = EPOCH_ROWS
    ) -> None:
        super().__init__(seed, split, rows)
        self.level, self.instruction = level, instruction

    def row(self, place: int) -> dict[str, Any]:
        """The problem of this number."""
        problem = problem_of_level(place, self.level, self.seed, self.split)
        raw = {"problem": problem.text, "answer": problem.answer, **problem.media}
        name = self.level if isinstance(self.level, str) else f"level{self.level}"
        return read_row(raw, place, self.split, f"synthetic/{name}", self.instruction)


class DrawnTalks(DrawnRows):
    """Conversations of two turns about the picture of a class.

    >>> [turn["content"] for turn in DrawnTalks()[3]["prompt"]]
    ['<image>Which colour?', 'black', 'Which shape?', 'filled circle']
    """

    def row(self, place: int) -> dict[str, Any]:
        """A question about the colour, and one about the shape."""
        picture = draw_class(place, self.seed, self.split)
        turns = ("<image>Which colour?", picture.colour, "Which shape?", f"{picture.fill} {picture.shape}")
        return conversation(turns, "synthetic/talks", place, [picture.image])


class DrawnPairs(DrawnRows):
    """A right and a wrong answer to a question about the picture of a class.

    >>> row = DrawnPairs()[3]
    >>> row["prompt"][0]["content"], [answer[0]["content"] for answer in row["answers"]]
    ('<image>Which colour?', ['black', 'red'])
    """

    def row(self, place: int) -> dict[str, Any]:
        """A question about the colour."""
        picture, random = draw_class(place, self.seed, self.split), Random(f"pairs/{self.split}/{self.seed}/{place}")
        wrong = random.choice([name for name in COLOURS if name != picture.colour])
        row = conversation(("<image>Which colour?",), "synthetic/pairs", place, [picture.image])
        answers = [[{"role": "assistant", "content": text}] for text in (picture.colour, wrong)]
        return row | {"answers": answers, "labels": (True, False)}


class DrawnSums(DrawnRows):
    """Conversations of one turn, without a picture.

    >>> [turn["content"] for turn in DrawnSums()[3]["prompt"]]
    ['What is 5 + 8?', '13']
    """

    def row(self, place: int) -> dict[str, Any]:
        """A sum of two digits."""
        random = Random(f"sums/{self.split}/{self.seed}/{place}")
        a, b = random.randint(0, 9), random.randint(0, 9)
        return conversation((f"What is {a} + {b}?", str(a + b)), "synthetic/sums", place)
