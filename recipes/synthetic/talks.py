"""Drawn conversations to learn from: talks about a picture of a class, and sums in words, without a file."""

from collections.abc import Sequence
from random import Random
from typing import Any

from recipes.synthetic.classes import draw_class
from recipes.synthetic.problems import Split

ENDLESS = 2**20
"""Rows in one epoch; more than a run draws."""


class DrawnTalks(Sequence[dict[str, Any]]):
    """Conversations of two turns about one picture.

    >>> [turn["content"] for turn in DrawnTalks()[3]["prompt"]]
    ['<image>Which colour?', 'black', 'Which shape?', 'filled circle']
    """

    def __init__(self, seed: int = 0, split: Split = "train", rows: int = ENDLESS) -> None:
        self.seed, self.split, self.rows = seed, split, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, place: Any) -> Any:
        picture = draw_class(range(self.rows)[place], self.seed, self.split)
        turns = ("<image>Which colour?", picture.colour, "Which shape?", f"{picture.fill} {picture.shape}")
        return _row(turns, [picture.image], "synthetic/talks", place)


class DrawnSums(Sequence[dict[str, Any]]):
    """Conversations without a picture.

    >>> [turn["content"] for turn in DrawnSums()[3]["prompt"]]
    ['What is 5 + 8?', '13']
    """

    def __init__(self, seed: int = 0, split: Split = "train", rows: int = ENDLESS) -> None:
        self.seed, self.split, self.rows = seed, split, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, place: Any) -> Any:
        random = Random(f"sums/{self.split}/{self.seed}/{range(self.rows)[place]}")
        a, b = random.randint(0, 9), random.randint(0, 9)
        return _row((f"What is {a} + {b}?", str(a + b)), [], "synthetic/sums", place)


def _row(turns: Sequence[str], images: list[Any], source: str, place: int) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]
    return {"prompt": messages, "images": images, "videos": [], "data_source": source, "index": place}
