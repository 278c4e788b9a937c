"""Labelled pictures as conversations: a question about the picture, with the class as the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataproto.errors import InvalidConfig, InvalidRow
from recipes.data.column_keys import OnBadRow, missing_columns
from recipes.data.row_values import conversation
from recipes.data.tables import Table, TableRows, open_tables
from recipes.demo.classes import CLASSES, draw_class
from recipes.demo.problems import EPOCH_ROWS, Split
from rollout.prompts.images import image_file, media_list

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_SPLITS = (("train", "training"), ("test", "val", "valid", "validation"))
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


class LabelledRows(Sequence[dict[str, Any]]):
    """Conversations about the (image, label) pairs at ``places``, in this order."""

    def __init__(
        self, pairs: Any, places: Sequence[int] | range, classes: Sequence[str], templates: Templates, source: str
    ) -> None:
        """``pairs[i]`` is a tuple (image, label)."""
        self.pairs, self.places, self.classes = pairs, places, tuple(classes)
        self.templates, self.source = templates, source

    def __len__(self) -> int:
        return len(self.places)

    @property
    def recurring(self) -> bool:
        """Whether a run may take a picture twice; see `recipes.data.loader.may_recur`."""
        return not isinstance(self.pairs, DrawnPairs) or len(self) < EPOCH_ROWS

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return LabelledRows(self.pairs, self.places[place], self.classes, self.templates, self.source)
        number = int(self.places[place])
        image, label = self.pairs[number]
        return self.templates.row(image, label, self.classes, self.source, number)


@dataclass(frozen=True)
class LabelledData:
    """Training rows, the held-out rows of each set by its name ("" for one without), and their classes."""

    train: LabelledRows
    held_out: Mapping[str, LabelledRows]
    classes: tuple[str, ...]


class DrawnPairs:
    """(image, label) pairs of drawn pictures; see `recipes.demo.classes`."""

    def __init__(self, seed: int, split: Split) -> None:
        self.seed, self.split = seed, split

    def __getitem__(self, place: int) -> tuple[Any, str]:
        picture = draw_class(place, self.seed, self.split)
        return picture.image, picture.label


def drawn_data(rows: int, eval_rows: int, seed: int, templates: Templates) -> LabelledData:
    """``rows`` drawn pictures, and held-out pictures that do not depend on ``seed``."""
    train = LabelledRows(DrawnPairs(seed, "train"), range(rows), CLASSES, templates, "synthetic/classes")
    held_out = LabelledRows(DrawnPairs(0, "test"), range(eval_rows), CLASSES, templates, "synthetic/classes")
    return LabelledData(train, {"": held_out}, CLASSES)


Used = tuple[Any, Sequence[int]]
"""(image, label) pairs with ``labels``, and the places of those that are used."""


def has_images(path: Path) -> bool:
    """Whether a path is that of a folder with folders of images."""
    folders = [*path.glob("*/"), *path.glob("*/*/")] if path.is_dir() else []
    return any(file.suffix.lower() in IMAGES for folder in folders for file in folder.iterdir())


def folder_data(
    path: Path,
    eval_rows: int,
    seed: int,
    templates: Templates,
    exclude: Sequence[str] = (),
    sets: Mapping[str, Used] | None = None,
) -> LabelledData:
    """Opens a folder that has one folder of images for each class, as Caltech-101, or such folders for ``train`` and ``test``.

    Underscores in names of classes become spaces.

    Args:
        sets: held-out pictures by their names; by default those of the test folder, or without one an eighth of each class, at
            least one image, at random by ``seed``.

    Raises:
        InvalidConfig: there are fewer than two classes, or a held-out picture has a class that the training folder lacks.
    """
    own, held_out = (next((path / name for name in names if (path / name).is_dir()), None) for names in _SPLITS)
    train = LabelledFiles(own or path, exclude)
    if not sets and held_out is not None:
        files = LabelledFiles(held_out, exclude)
        sets = {"": (files, range(len(files.labels)))}
    classes = tuple(dict.fromkeys(train.labels))
    if len(classes) < 2:
        raise InvalidConfig(
            f"{path} must have a folder of images for each of at least two classes, but has {list(classes)}"
        )
    used = train, range(len(train.labels))
    return _divided(path.resolve().name, used, sets or {}, classes, templates, eval_rows, seed)


class LabelledFiles:
    """(image, label) pairs of the files in the folders of a folder, which are its classes."""

    def __init__(self, path: Path, exclude: Sequence[str]) -> None:
        folders = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
        self.files = [
            file
            for folder in folders
            if folder.name not in exclude
            for file in sorted(folder.iterdir())
            if file.suffix.lower() in IMAGES
        ]
        self.labels = [file.parent.name.replace("_", " ") for file in self.files]

    def __getitem__(self, place: int) -> tuple[Path, str]:
        return self.files[place], self.labels[place]


def table_data(
    source: str,
    eval_rows: int,
    seed: int,
    templates: Templates,
    image_column: str = "image",
    label_column: str = "label",
    exclude: Sequence[str] = (),
    on_bad_row: OnBadRow = "stop",
    sets: Mapping[str, Used] | None = None,
) -> LabelledData:
    """Opens a data set with a column of images and a column of labels (names, or numbers with names in its features).

    Paths of images start at the folder of their file.

    Args:
        sets: held-out pictures by their names; by default the test split, or without one an eighth of each class.

    Raises:
        InvalidConfig: the data set or a column does not exist, no row has a label, or a held-out picture has a class that the
            training rows lack.
        InvalidRow: a row has no label, or an empty one, or cannot be read; with ``on_bad_row="skip"`` it is left out.
    """
    tables, name = open_tables(source, "train")
    train = TablePairs(tables, image_column, label_column)
    used = train.labelled(exclude, on_bad_row)
    found = train.names or dict.fromkeys(str(train.labels[place]) for place in used)
    if not used:
        raise InvalidConfig(f"{name} has no row with a label in {label_column!r}")
    if not sets and (test_tables := _test_tables(source)) is not None:
        sets = {"": _labelled(test_tables, image_column, label_column, exclude, on_bad_row)}
    classes = tuple(label for label in found if label not in exclude)
    return _divided(name, (train, used), sets or {}, classes, templates, eval_rows, seed)


def held_out_pairs(
    source: str,
    image_column: str = "image",
    label_column: str = "label",
    exclude: Sequence[str] = (),
    on_bad_row: OnBadRow = "stop",
) -> Used:
    """The pictures of a held-out set: of a folder of class directories, or of its test folder, or of a data set as `table_data`.

    Raises:
        InvalidConfig, InvalidRow: see `table_data`.
    """
    path = Path(source)
    if not has_images(path):
        return _labelled(open_tables(source, "test")[0], image_column, label_column, exclude, on_bad_row)
    files = LabelledFiles(next((path / name for name in _SPLITS[1] if (path / name).is_dir()), path), exclude)
    return files, range(len(files.labels))


def _labelled(
    tables: Sequence[Table], image_column: str, label_column: str, exclude: Sequence[str], on_bad_row: OnBadRow
) -> Used:
    pairs = TablePairs(tables, image_column, label_column)
    return pairs, pairs.labelled(exclude, on_bad_row)


def _test_tables(source: str) -> list[Table] | None:
    """The tables of the test split, or None."""
    if Path(source).is_file():
        return None
    try:
        return open_tables(source, "test")[0]
    except InvalidConfig:
        return None


class TablePairs:
    """(image, label) pairs of the rows of tables; images are read on access."""

    def __init__(self, tables: Sequence[Table], image_column: str, label_column: str) -> None:
        for table, _ in tables:
            missing, present = missing_columns(table, {image_column, label_column})
            for option, column in (("image", image_column), ("label", label_column)):
                if column in missing:
                    raise InvalidConfig(
                        f"no column {column!r}: the data set has {', '.join(present)}; name yours by --{option}-column"
                    )
        self.image_column, self.label_column = image_column, label_column
        self.rows = TableRows(tables, _as_it_is)
        features = getattr(tables[0][0], "features", None) or {}
        self.names: tuple[str, ...] = tuple(getattr(features.get(label_column), "names", None) or ())
        values = [value for table, _ in tables for value in _column(table, label_column)]
        self.unread = {place: value for place, value in enumerate(values) if isinstance(value, InvalidRow)}
        self.labels = [self._name(value) for value in values]

    def __getitem__(self, place: int) -> tuple[Any, str]:
        row = self.rows[place]
        images = media_list(row.get(self.image_column))
        if len(images) != 1:
            several = f"has {len(images)} images, but a label is of one"
            raise InvalidRow(place, f"{self.image_column!r} {several if images else 'is missing'}")
        file = None if row["media_root"] is None else image_file(images[0], row["media_root"])
        return images[0] if file is None else file, str(self.labels[place])

    def labelled(self, exclude: Sequence[str], on_bad_row: OnBadRow) -> list[int]:
        """The places of the rows that have a label, without those of the classes ``exclude``. Raises `InvalidRow`."""
        if on_bad_row == "stop" and None in self.labels:
            place = self.labels.index(None)
            error = self.unread.get(place)
            reason = f"no label in {self.label_column!r}" if error is None else error.reason
            raise InvalidRow(place, f"{reason} (--on-bad-row skip leaves such rows out)") from error
        return [place for place, label in enumerate(self.labels) if label is not None and label not in exclude]

    def _name(self, value: Any) -> str | None:
        if self.names and isinstance(value, int):
            return self.names[value] if value >= 0 else None  # -1 is "no label" in data sets of the hub
        if value is None or value != value or isinstance(value, InvalidRow):  # NaN: what pandas writes for no label
            return None
        return str(value).strip() or None


def _as_it_is(raw: dict[str, Any], place: int) -> dict[str, Any]:
    return raw


def _column(table: Any, name: str) -> Sequence[Any]:
    """The values of a column; of rows of JSON `None` where one lacks it, and the error where one cannot be read."""
    if hasattr(table, "select_columns"):
        found: Sequence[Any] = table.select_columns([name])[name]
        return found
    values: list[Any] = []
    for place in range(len(table)):
        try:
            values.append(table[place].get(name))
        except InvalidRow as error:
            values.append(error)
    return values


def _divided(
    name: str,
    train: Used,
    sets: Mapping[str, Used],
    classes: tuple[str, ...],
    templates: Templates,
    eval_rows: int,
    seed: int,
) -> LabelledData:
    """Training rows, and of each set, or of those held out, ``eval_rows`` at random, because rows are sorted by class."""
    pairs, places = train
    if not sets:
        held_out = _held_out([str(pairs.labels[place]) for place in places], seed)
        if not held_out:
            raise InvalidConfig(
                f"{name} has one picture of each class, so none can be held out: add pictures, or a test split"
            )
        sets = {"": (pairs, [places[at] for at in sorted(held_out)])}
        places = [place for at, place in enumerate(places) if at not in held_out]
    shown = {}
    for each, (test, used) in sets.items():
        if unknown := sorted({str(test.labels[place]) for place in used} - {*classes}):
            split = f"the held-out set {each}" if each else f"the test split of {name}"
            raise InvalidConfig(f"{split} has classes that are not in the training data: {unknown[:5]}")
        order = np.random.default_rng([seed, 1]).permutation(len(used))[:eval_rows]
        chosen = [int(used[place]) for place in order.tolist()]
        shown[each] = LabelledRows(test, chosen, classes, templates, name)
    return LabelledData(LabelledRows(pairs, places, classes, templates, name), shown, classes)


def _held_out(labels: Sequence[str], seed: int) -> set[int]:
    """Places to hold out: an eighth of each class, at least one if the class has two rows."""
    held_out: set[int] = set()
    for number, label in enumerate(sorted(set(labels))):
        places = np.flatnonzero(np.array(labels) == label)
        chosen = np.random.default_rng([seed, number]).permutation(places)
        held_out |= {*chosen[: max(len(places) // 8, len(places) > 1)].tolist()}
    return held_out
