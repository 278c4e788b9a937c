"""Easy-VQA: real questions about pictures of one shape, as rows for reinforcement learning and for supervised training.

The PyPI package ``easy-vqa`` 1.0 (Victor Zhou, MIT licence) has 5,000 pictures of 64 x 64 pixels: 4,000 with 38,575 questions to
train on, 1,000 with 9,673 questions to test. There are 13 answers. The most common one is right for 0.373 of the test
questions; without the picture, the answer that a question most often has in training is right for 0.670. Its files are
read; none of its code runs. ::

    row = open_easy_vqa().test[0]
    row["prompt"][0]["content"], row["reward_model"]["ground_truth"]  # ('<image>what is the red shape?', 'triangle')
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dataproto.errors import FileFormatError, InvalidConfig, raised_as
from dataproto.extras import require_extra
from recipes.data.problem_rows import read_row
from recipes.data.tables import ConvertedRows
from recipes.demo.problems import Split
from rollout.prompts.images import load_image

SOURCE = "easy_vqa"


@dataclass(frozen=True)
class EasyVQAQuestion:
    """A question about a picture."""

    question: str
    answer: str
    picture: int


decoded = cache(load_image)
"""The RGB picture of a file's bytes."""


@dataclass(frozen=True)
class EasyVQARows(Sequence[dict[str, Any]]):
    """Questions with their pictures, as rows of `recipes.data.problem_rows`.

    Attributes:
        pictures: the files of pictures by number, see `decoded`.
        shown: for each question the number of the picture that its row shows, -1 for none; normally its own.
        source: ``data_source`` of the rows.
    """

    questions: tuple[EasyVQAQuestion, ...]
    pictures: Mapping[int, bytes]
    shown: tuple[int, ...]
    split: Split
    source: str = SOURCE

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self.at(range(*place.indices(len(self))))
        place = range(len(self))[place]
        asked, shown = self.questions[place], self.shown[place]
        images = [] if shown < 0 else [decoded(self.pictures[shown])]
        text = "<image>" * len(images) + asked.question
        raw = {"problem": text, "answer": asked.answer, "images": images, "ability": "vqa"}
        return read_row(raw, place, self.split, self.source, instruction="")

    def at(self, places: Sequence[int]) -> "EasyVQARows":
        """The rows at ``places``, in this order."""
        questions = tuple(self.questions[place] for place in places)
        return replace(self, questions=questions, shown=tuple(self.shown[place] for place in places))

    def open_questions(self, wanted: bool = True) -> "EasyVQARows":
        """The questions whose answer is a colour or a shape; without ``wanted`` those whose answer is yes or no."""
        return self.at([place for place, q in enumerate(self.questions) if (q.answer not in ("yes", "no")) == wanted])

    def in_random_order(self, seed: int = 0) -> "EasyVQARows":
        """The same rows, so that the first ones are a sample of all; those of a file are sorted by picture."""
        return self.at(np.random.default_rng(seed).permutation(len(self)).tolist())

    def with_other_pictures(self, seed: int = 0) -> "EasyVQARows":
        """Each row with the picture of another row that asks the same question, whatever the answer is there.

        A question that is asked only once gets the picture of any other row.
        """
        asked = np.array([question.question for question in self.questions])
        random, order = np.random.default_rng(seed), np.arange(len(self))
        for text in sorted(set(asked.tolist())):
            places = random.permutation(np.flatnonzero(asked == text))
            order[places] = np.roll(places, 1) if len(places) > 1 else (places + 1) % len(self)
        return replace(self, shown=tuple(self.shown[place] for place in order), source=f"{self.source}_other_pictures")

    def without_pictures(self) -> "EasyVQARows":
        """Each row with its words alone."""
        return replace(self, shown=(-1,) * len(self), source=f"{self.source}_without_pictures")


def answered(rows: Sequence[Mapping[str, Any]]) -> ConvertedRows:
    """Problems with their answers as conversations, for `rollout.prompts.SupervisedBuilder`."""
    return ConvertedRows(rows, _with_answer)


def _with_answer(row: Mapping[str, Any], place: int) -> dict[str, Any]:
    answer = {"role": "assistant", "content": row["reward_model"]["ground_truth"]}
    return {**row, "prompt": [*row["prompt"], answer]}


def conversations(rows: EasyVQARows, questions: int = 2, seed: int = 0) -> ConvertedRows:
    """Questions about one picture with their answers as one conversation: a picture is processed once for several answers.

    Which questions are asked together, and in which order, is drawn at random once.

    Args:
        questions: of a conversation; fewer where a picture has no more.
    """
    shown = np.array(rows.shown)
    order = np.random.default_rng(seed).permutation(len(rows))
    order = order[np.argsort(shown[order], kind="stable")]
    pictures = np.split(order, np.flatnonzero(np.diff(shown[order])) + 1)
    groups = [places[first : first + questions] for places in pictures for first in range(0, len(places), questions)]
    return ConvertedRows(groups, partial(_conversation, answered(rows)))


def _conversation(rows: ConvertedRows, places: np.ndarray, _: int) -> dict[str, Any]:
    """The answered questions at these places, one after another; the first shows the picture."""
    first, *others = (rows[place] for place in places.tolist())
    marker = "<image>" * len(first["images"])
    messages = [message for row in others for message in row["prompt"]]
    turns = [{**message, "content": message["content"].removeprefix(marker)} for message in messages]
    return {**first, "prompt": [*first["prompt"], *turns]}


@dataclass(frozen=True)
class EasyVQA:
    """Rows to train on and to test. No picture is in both."""

    train: EasyVQARows
    test: EasyVQARows

    def texts(self) -> list[str]:
        """All questions and answers to train on, for a tokenizer."""
        return [text for asked in self.train.questions for text in (asked.question, asked.answer)]


def open_easy_vqa(folder: str | Path | None = None) -> EasyVQA:
    """Reads the questions and pictures of the package ``easy-vqa``, which is not imported.

    Args:
        folder: of an unpacked wheel, or another one with the same layout; by default that of the installed package.

    Raises:
        MissingPackage: the package is not installed.
        InvalidConfig: there is no such folder.
        FileFormatError: the folder has another layout.
    """
    if folder is not None and not Path(folder).is_dir():
        raise InvalidConfig(
            f"easy-VQA: there is no folder {folder}: leave out --data-path to read the installed package"
        )
    root = _installed() if folder is None else Path(folder)
    with raised_as(FileFormatError, f"{root} has not the layout of easy-vqa", OSError, ValueError, TypeError):
        return EasyVQA(_read_split(root, "train"), _read_split(root, "test"))


def _installed() -> Path:
    """Where the package is. Finding it runs none of its code."""
    require_extra("easy-vqa", "dataproto easy-vqa", "easy_vqa")
    found = find_spec("easy_vqa")
    assert found is not None
    return Path(str(found.origin)).parents[1]


def _read_split(root: Path, split: Split) -> EasyVQARows:
    folder = root / "easy_vqa" / "data" / split
    listed = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    questions = tuple(EasyVQAQuestion(str(text), str(answer), int(picture)) for text, answer, picture in listed)
    encoded = {int(file.stem): file.read_bytes() for file in (folder / "images").glob("*.png")}
    if missing := sorted({asked.picture for asked in questions} - encoded.keys()):
        raise ValueError(f"{split} has no picture {missing[0]}, which a question is about")
    if not questions:
        raise ValueError(f"{split} has no questions")
    return EasyVQARows(questions, encoded, tuple(asked.picture for asked in questions), split)
