"""Easy-VQA: real questions about pictures of one shape, as rows for reinforcement learning and for supervised training.

The PyPI package ``easy-vqa`` 1.0 (Victor Zhou, MIT licence) has 5,000 pictures of 64 x 64 pixels: 4,000 with 38,575 questions to
train on, 1,000 with 9,673 questions to test. There are 13 answers. The most common one is right for 0.373 of the test
questions; without the picture, the answer that a question most often has in training is right for 0.670. Rows are read from its
wheel; none of its code runs. ::

    row = open_easy_vqa().test[0]
    row["prompt"][0]["content"], row["reward_model"]["ground_truth"]  # ('<image>what is the red shape?', 'triangle')
"""

import json
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dataproto.errors import FileFormatError, InvalidConfig
from recipes.data.packages import Package, fetch
from recipes.data.problem_rows import read_row
from recipes.demo.problems import Split
from rollout.prompts.images import load_image

EASY_VQA = Package(
    name="easy-vqa",
    version="1.0",
    file="easy_vqa-1.0-py3-none-any.whl",
    sha256="fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f",
    content="pictures and questions by Victor Zhou",
    licence="MIT licence",
    url="https://pypi.org/project/easy-vqa/",
)
SOURCE = "easy_vqa"
WAY_OUT = f"give the path of {EASY_VQA.file} as --data-path, or leave it out to fetch it through pip"
DAMAGED = (zlib.error, EOFError, RuntimeError, LookupError, ValueError, TypeError)
"""What a damaged or encrypted member of a ZIP file raises, or one with another content."""


@dataclass(frozen=True)
class EasyVQAQuestion:
    """A question about a picture."""

    question: str
    answer: str
    picture: int


class Pictures(dict[int, Image.Image]):
    """RGB pictures by number; each is decoded once."""

    def __init__(self, encoded: Mapping[int, bytes]) -> None:
        super().__init__()
        self._encoded = encoded

    def __missing__(self, number: int) -> Image.Image:
        picture = self[number] = load_image(self._encoded[number])
        return picture


@dataclass(frozen=True)
class EasyVQARows(Sequence[dict[str, Any]]):
    """Questions with their pictures, as rows of `recipes.data.problem_rows`.

    Attributes:
        shown: for each question the number of the picture that its row shows, -1 for none; normally its own.
        source: ``data_source`` of the rows.
    """

    questions: tuple[EasyVQAQuestion, ...]
    pictures: Pictures
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
        images = [] if shown < 0 else [self.pictures[shown]]
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
        random, order, alone = np.random.default_rng(seed), np.arange(len(self)), list[int]()
        for text in sorted(set(asked.tolist())):
            places = random.permutation(np.flatnonzero(asked == text))
            order[places] = np.roll(places, 1)
            alone += places.tolist() if len(places) == 1 else []
        for place in alone:
            order[place] = (place + 1) % len(self)
        return replace(self, shown=tuple(self.shown[place] for place in order), source=f"{self.source}_other_pictures")

    def without_pictures(self) -> "EasyVQARows":
        """Each row with its words alone."""
        return replace(self, shown=(-1,) * len(self), source=f"{self.source}_without_pictures")


class Answered(Sequence[dict[str, Any]]):
    """Problems with their answers as conversations, for `rollout.prompts.SupervisedBuilder`."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        row = self.rows[place]
        answer = {"role": "assistant", "content": row["reward_model"]["ground_truth"]}
        return {**row, "prompt": [*row["prompt"], answer]}


class Conversations(Sequence[dict[str, Any]]):
    """Questions about one picture with their answers as one conversation: a picture is processed once for several answers.

    Which questions are asked together, and in which order, is drawn at random once.
    """

    def __init__(self, rows: EasyVQARows, questions: int = 2, seed: int = 0) -> None:
        """
        Args:
            questions: of a conversation; fewer where a picture has no more.
        """
        self.answered = Answered(rows)
        shown = np.array(rows.shown)
        order = np.random.default_rng(seed).permutation(len(rows))
        order = order[np.argsort(shown[order], kind="stable")]
        pictures = np.split(order, np.flatnonzero(np.diff(shown[order])) + 1)
        self.places = [
            places[first : first + questions] for places in pictures for first in range(0, len(places), questions)
        ]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: Any) -> Any:
        first, *others = (self.answered[each] for each in self.places[place].tolist())
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


def open_easy_vqa(wheel: str | Path | None = None) -> EasyVQA:
    """Reads the questions and pictures of a wheel of ``easy-vqa``, or of another ZIP file with the same layout.

    Args:
        wheel: the file; by default that of `fetch_easy_vqa`.

    Raises:
        InvalidConfig: the wheel cannot be fetched, or the file does not exist.
        FileFormatError: the file has another layout.
    """
    path = fetch_easy_vqa() if wheel is None else Path(wheel)
    if not path.is_file():
        raise InvalidConfig(f"easy-VQA: there is no file {path}: {WAY_OUT}")
    try:
        with zipfile.ZipFile(path) as archive:
            return EasyVQA(_read_split(archive, "train"), _read_split(archive, "test"))
    except (zipfile.BadZipFile, *DAMAGED) as error:
        raise FileFormatError(f"{path} is not a wheel of easy-vqa: {error}; {WAY_OUT}") from error


def _read_split(archive: zipfile.ZipFile, split: Split) -> EasyVQARows:
    folder = f"easy_vqa/data/{split}"
    listed = json.loads(archive.read(f"{folder}/questions.json"))
    questions = tuple(EasyVQAQuestion(str(text), str(answer), int(picture)) for text, answer, picture in listed)
    encoded = {
        int(found[1]): archive.read(name)
        for name in archive.namelist()
        if (found := re.fullmatch(rf"{folder}/images/(\d+)\.png", name))
    }
    if missing := sorted({asked.picture for asked in questions} - encoded.keys()):
        raise ValueError(f"{folder} has no picture {missing[0]}, which a question is about")
    if not questions:
        raise ValueError(f"{folder} has no questions")
    return EasyVQARows(questions, Pictures(encoded), tuple(asked.picture for asked in questions), split)


def fetch_easy_vqa() -> Path:
    """The path of the wheel, which pip downloads once (3.2 MB) and whose SHA-256 it checks; says what it is and its licence.

    Raises:
        InvalidConfig: pip could not download it.
    """
    try:
        path = fetch(EASY_VQA)
    except InvalidConfig as error:
        raise InvalidConfig(f"{error}, or give its path as --data-path") from error
    print(f"easy-VQA: {path}; {EASY_VQA.notice}")
    return path
