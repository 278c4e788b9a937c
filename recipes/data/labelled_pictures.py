"""Labelled pictures as conversations: a question about the picture, with the class as the answer."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataproto.errors import InvalidConfig, InvalidRow
from recipes.data.column_keys import OnBadRow, check_columns
from recipes.data.row_values import LISTS, conversation
from recipes.data.tables import ConvertedRows, Table, TableRows, features_of, meant, open_tables, rows_or_errors
from recipes.demo.classes import CLASSES, draw_class
from recipes.demo.problems import EPOCH_ROWS, DrawnRows, Split
from rollout.prompts.images import is_named_as_image
from rollout.prompts.sources import media_file, media_list

_SPLITS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}
"""Names of the folders to train on, and to test."""


@dataclass(frozen=True)
class Templates:
    """Question and answer of a conversation; ``{classes}`` and ``{label}`` are replaced."""

    question: str = "What does the picture show?"
    answer: str = "{label}"

    def __post_init__(self) -> None:
        if "{label}" not in self.answer:
            raise InvalidConfig(f"answer={self.answer!r} must contain {{label}}")

    def row(self, image: Any, label: str, classes: Sequence[str], source: str, place: int) -> dict[str, Any]:
        """The conversation about one picture, as a row.

        >>> row = Templates("One of: {classes}?").row("a.png", "cat", ["cat", "dog"], "pets", 0)
        >>> [message["content"] for message in row["prompt"]]
        ['<image>One of: cat, dog?', 'cat']
        """
        question = self.question.replace("{classes}", ", ".join(classes))
        return conversation((f"<image>{question}", self.answer.replace("{label}", label)), source, place, [image])


class DrawnClasses(DrawnRows):
    """Conversations about synthetic pictures, see `recipes.demo.classes`."""

    def __init__(self, seed: int, split: Split, rows: int, templates: Templates) -> None:
        super().__init__(seed, split, rows)
        self.templates = templates

    def row(self, place: int) -> dict[str, Any]:
        """The question about one picture."""
        picture = draw_class(place, self.seed, self.split)
        return self.templates.row(picture.image, picture.label, CLASSES, "synthetic/classes", place)


@dataclass(frozen=True)
class LabelledData:
    """Training rows, the held-out rows of each set by its name ("" for one without), and their classes."""

    train: Any
    held_out: Mapping[str, Any]
    classes: tuple[str, ...]


def drawn_data(eval_rows: int, seed: int, templates: Templates) -> LabelledData:
    """Synthetic pictures, and held-out ones that do not depend on ``seed``."""
    held_out = DrawnClasses(0, "test", eval_rows, templates)
    return LabelledData(DrawnClasses(seed, "train", EPOCH_ROWS, templates), {"": held_out}, CLASSES)


COLUMNS = ("image", "label")
"""The usual columns of images and of labels."""


def labelled_data(
    source: str,
    eval_rows: int,
    seed: int,
    templates: Templates,
    columns: tuple[str, str] = COLUMNS,
    exclude: Sequence[str] = (),
    on_bad_row: OnBadRow = "stop",
    sets: Mapping[str, str] | None = None,
) -> LabelledData:
    """Opens a folder that has one folder of images for each class, as Caltech-101, or such folders for ``train`` and ``test``; or
    a data set with columns of images and labels (names, or numbers with names in its features).

    Underscores in names of folders become spaces. Paths of images in a data set start at the folder of their file.

    Args:
        columns: of images and of labels.
        exclude: classes that are left out, as folders and labels name them.
        sets: paths of held-out sets by their names; by default the test split, or without one an eighth of each class, at least
            one picture, at random by ``seed``.

    Raises:
        InvalidConfig: the data set or a column does not exist, a folder has fewer than two classes, or a held-out picture has a
            class that the training data lack.
        InvalidRow: a row has no label, or an empty one, or cannot be read; with ``on_bad_row="skip"`` it is left out.
    """
    from torch.utils.data import Subset  # options are read without torch

    how = columns, {*exclude, *(name.replace("_", " ") for name in exclude)}, on_bad_row
    train = LabelledPictures(source, "train", *how)
    known = {*train.labels, *train.classes}
    if unknown := sorted(name for name in exclude if not known & {name, name.replace("_", " ")}):
        raise InvalidConfig(f"exclude: {source} has no class {unknown}; it has {sorted(map(str, known))[:10]}")
    classes = tuple(label for label in train.classes if label not in how[1])
    if len(classes) < 2 and _has_images(Path(source)):
        raise InvalidConfig(f"{source} must have folders of images of at least two classes, but has {list(classes)}")
    opened = {name: LabelledPictures(path, "test", *how) for name, path in (sets or {}).items()}
    if not sets and _has_test_split(source):
        opened = {"": LabelledPictures(source, "test", *how)}
    for name, pictures in opened.items():
        if unknown := sorted({str(pictures.labels[place]) for place in pictures.used} - {*classes}):
            split = f"the held-out set {name}" if name else f"the test split of {source}"
            raise InvalidConfig(f"{split} has classes that are not in the training data: {unknown[:5]}")

    def asked(pictures: LabelledPictures) -> ConvertedRows:
        """Conversations about those that are used."""
        return ConvertedRows(
            pictures.used, lambda number, _: templates.row(*pictures[number], classes, train.name, number)
        )

    rows: Any = asked(train)
    held_out: dict[str, Any] = {name: asked(pictures) for name, pictures in opened.items()}
    if not held_out:
        apart = _held_out([str(train.labels[place]) for place in train.used], seed)
        if not apart:
            raise InvalidConfig(f"{source} has one picture of each class, so none can be held out: add pictures")
        held_out = {"": Subset(rows, sorted(apart))}
        rows = Subset(rows, [place for place in range(len(rows)) if place not in apart])
    for name, found in held_out.items():  # which are sorted by class
        order = np.random.default_rng([seed, 1]).permutation(len(found))
        held_out[name] = Subset(found, order[:eval_rows].tolist())
    return LabelledData(rows, held_out, classes)


def _has_images(path: Path) -> bool:
    """Whether a path is that of a folder with folders of images."""
    folders = [*path.glob("*/"), *path.glob("*/*/")] if path.is_dir() else []
    return any(is_named_as_image(file) for folder in folders for file in folder.iterdir())


def _has_test_split(source: str) -> bool:
    path = Path(source)
    if path.is_file() or _has_images(path):
        return any((path / name).is_dir() for name in _SPLITS["test"])
    with suppress(InvalidConfig):
        return bool(open_tables(source, "test"))
    return False


def _pictures_in(path: Path, split: Split) -> list[dict[str, Any]]:
    """The files in the folders of a folder, or of its folder for a split, with the folders' names as labels. In a folder that has
    pictures, those of its own folders have its label too.
    """
    whole = next((path / name for name in _SPLITS[split] if (path / name).is_dir()), path)
    folders = sorted(each for each in whole.iterdir() if each.is_dir() and not each.name.startswith("."))
    return [
        {"image": file, "label": folder.name.replace("_", " ")}
        for folder in folders
        for file in sorted(folder.rglob("*") if any(map(is_named_as_image, folder.iterdir())) else [])
        if is_named_as_image(file) and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


class LabelledPictures:
    """(image, label) pairs of a data set, whose images are read on access. Raises `InvalidConfig` and `InvalidRow`.

    ``used`` are the places of those with a label that is not excluded.
    """

    def __init__(
        self, source: str, split: Split, columns: tuple[str, str], exclude: Collection[str], on_bad_row: OnBadRow
    ) -> None:
        if _has_images(Path(source)):
            tables, self.name = [Table(_pictures_in(Path(source), split))], Path(source).resolve().name
            columns = COLUMNS
            if not tables[0].rows:
                raise InvalidConfig(
                    f"{source} must have a folder of pictures for each class, or such folders in 'train'"
                )
        else:
            tables, self.name = open_tables(source, split)
            named = {f"{name}_column": column for name, column in zip(COLUMNS, columns)}
            check_columns(named, [table.rows for table in tables], self.name)
        self.image_column, column = columns
        self.rows = TableRows(tables, lambda raw, place: raw)
        names = [each for table in tables for each in getattr(features_of(table.rows).get(column), "names", ())]
        values = [value for table in tables for value in _column(table.rows, column)]
        self.labels = [_label(value) for value in values]
        if on_bad_row == "stop" and None in self.labels:
            place = self.labels.index(None)
            reason = _why_no_label(values[place], column)
            raise self.rows.invalid(place, f"{reason} (--on-bad-row skip leaves such rows out)")
        self.used = [place for place, label in enumerate(self.labels) if label is not None and label not in exclude]
        if not self.used:
            raise InvalidConfig(f"{self.name} has no row with a label in {column!r}")
        self.classes = tuple(dict.fromkeys(names or (str(self.labels[place]) for place in self.used)))

    def __getitem__(self, place: int) -> tuple[Any, str]:
        row = self.rows[place]
        images = media_list(row.get(self.image_column))
        if len(images) != 1:
            several = f"has {len(images)} images, but a label is of one"
            raise self.rows.invalid(place, f"{self.image_column!r} {several if images else 'is missing'}")
        file = None if row["media_root"] is None else media_file(images[0], row["media_root"])
        return images[0] if file is None else file, str(self.labels[place])


def _label(value: Any) -> str | None:
    if value is None or isinstance(value, (InvalidRow, *LISTS, Mapping)) or value != value:  # NaN: pandas' "no label"
        return None
    return str(value).strip() or None


def _why_no_label(value: Any, column: str) -> str:
    if isinstance(value, (*LISTS, Mapping)):
        return f"the label in {column!r} must be one class, as text or a number, not {value!r}"
    return value.reason if isinstance(value, InvalidRow) else f"no label in {column!r}"


def _column(table: Any, name: str) -> Sequence[Any]:
    """The values of a column; of rows of JSON `None` where one lacks it, and the error where one cannot be read."""
    if hasattr(table, "select_columns"):
        feature = features_of(table).get(name)
        return [meant(value, feature) for value in table.select_columns([name])[name]]
    return [row if isinstance(row, InvalidRow) else row.get(name) for row in rows_or_errors(table)]


def _held_out(labels: Sequence[str], seed: int) -> set[int]:
    """Places to hold out: an eighth of each class, at least one if the class has two rows."""
    held_out: set[int] = set()
    for number, label in enumerate(sorted(set(labels))):
        places = np.flatnonzero(np.array(labels) == label)
        chosen = np.random.default_rng([seed, number]).permutation(places)
        held_out |= {*chosen[: max(len(places) // 8, len(places) > 1)].tolist()}
    return held_out
