"""What a made model learns to see: icons of an npm package and drawn pictures, with captions and questions about them."""

import json
import re
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from dataproto.errors import FileFormatError
from recipes.data.row_values import conversation
from recipes.demo.classes import COLOURS, SHAPES, draw_class
from recipes.demo.problems import EPOCH_ROWS, DrawnRows, Split
from rollout.prompts.images import load_image

SIDE = 64  # pixels of an icon
CATEGORIES = ("Activities", "Animals & Nature", "Food & Drink", "Objects", "Travel & Places")
"""Those whose pictures show a thing that its name names; left out are faces, people, flags and symbols."""
_NAME = re.compile(r"(?!.*\b(symbol|sign)\b)[a-z]+([ -][a-z]+){0,2}")  # of the things themselves
_FILE = re.compile(r"package/img/google/64/(.+\.png)")


@dataclass(frozen=True)
class Icon:
    """A picture ``(64, 64)`` on white, and its name in small letters."""

    name: str
    image: Image.Image

    @property
    def phrase(self) -> str:
        """The name with its article.

        >>> Icon("apple", Image.new("RGB", (64, 64))).phrase, Icon("books", Image.new("RGB", (64, 64))).phrase
        ('an apple', 'books')
        """
        if self.name.endswith("s") and not self.name.endswith(("ss", "us", "is", "os")):
            return self.name
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


def read_icons(tarball: Path) -> tuple[Icon, ...]:
    """The icons of `CATEGORIES` with names of at most three words, in the package's order. Nothing is unpacked to the disk.

    Raises:
        FileFormatError: the file is no such package.
    """
    listed, pictures = [], {}
    try:
        with tarfile.open(tarball, "r:gz") as archive:
            for member in archive:
                found, content = _FILE.fullmatch(member.name), archive.extractfile(member)
                if content is not None and found:
                    pictures[found[1]] = content.read()
                elif content is not None and member.name == "package/emoji.json":
                    listed = json.load(content)
        named = {
            entry["name"].lower(): pictures[entry["image"]]
            for entry in listed
            if entry["category"] in CATEGORIES and entry["has_img_google"] and entry["subcategory"] != "time"
        }
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(f"{tarball} is no package of emoji: {error}") from error
    icons = tuple(Icon(name, load_image(picture)) for name, picture in named.items() if _NAME.fullmatch(name))
    if not icons:
        raise FileFormatError(f"{tarball} is no package of emoji: it has no pictures with names")
    return icons


Question = tuple[str, str]
"""A question and its answer."""


class Captions(DrawnRows):
    """Conversations of one turn; each asks one of the questions about its picture."""

    source: str

    def row(self, place: int) -> dict[str, Any]:
        """A picture and a random one of its questions, with the answer."""
        random = Random(f"{self.source}/{self.split}/{self.seed}/{place}")
        picture, questions = self.draw(place, random)
        question, answer = random.choice(questions)
        return conversation((f"<image>{question}", answer), self.source, place, [picture])

    def draw(self, place: int, random: Random) -> tuple[Image.Image, list[Question]]:
        """The picture of a row, and its questions."""
        raise NotImplementedError


class DrawnCaptions(Captions):
    """About the pictures of `recipes.demo.classes`.

    >>> [turn["content"] for turn in DrawnCaptions()[5]["prompt"]]
    ['<image>Is the shape black?', 'no']
    """

    source = "captions/drawn"

    def draw(self, place: int, random: Random) -> tuple[Image.Image, list[Question]]:
        """Caption, shape, colour, and whether it has a shape or a colour."""
        picture = draw_class(place, self.seed, self.split)
        shape, colour = (
            random.choice([own, random.choice(others)])
            for own, others in ((picture.shape, SHAPES), (picture.colour, tuple(COLOURS)))
        )
        article = "An" if picture.fill[0] in "aeiou" else "A"
        return picture.image, [
            ("Describe the picture.", f"{article} {picture.label} on white paper."),
            ("What shape is in the picture?", picture.shape),
            ("What colour is the shape?", picture.colour),
            (f"Is there a {shape}?", "yes" if shape == picture.shape else "no"),
            (f"Is the shape {colour}?", "yes" if colour == picture.colour else "no"),
        ]


class IconCaptions(Captions):
    """About icons of any size, anywhere on white paper. Held-out rows show the same icons elsewhere."""

    source = "captions/icons"

    def __init__(self, icons: Sequence[Icon], seed: int = 0, split: Split = "train", rows: int = EPOCH_ROWS) -> None:
        super().__init__(seed, split, rows)
        self.icons = icons

    def draw(self, place: int, random: Random) -> tuple[Image.Image, list[Question]]:
        """Caption, name, and whether it is this thing or another one."""
        icon = random.choice(self.icons)
        asked = random.choice([icon, random.choice(self.icons)])
        side = random.randint(SIDE // 2, SIDE)
        paper = Image.new("RGB", (SIDE, SIDE), "white")
        corner = random.randint(0, SIDE - side), random.randint(0, SIDE - side)
        paper.paste(icon.image.resize((side, side), Image.Resampling.LANCZOS), corner)
        return paper, [
            ("Describe the picture.", f"A picture of {icon.phrase}."),
            ("What is in the picture?", icon.name),
            (f"Is this {asked.phrase}?", "yes" if asked.name == icon.name else "no"),
        ]
