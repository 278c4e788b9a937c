"""Labelled pictures as conversations: a question about the picture, with the class as the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataproto.errors import InvalidConfig, InvalidRow
from recipes.data.column_keys import OnBadRow, columns_of
from recipes.data.tables import Table, open_tables
from recipes.demo.classes import CLASSES, draw_class
from recipes.demo.problems import EPOCH_ROWS, Split
from rollout.prompts.images import image_file, media_list

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_SPLITS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}


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
        turns = (f"<image>{question}", self.answer.replace("{label}", label))
        return {
            "prompt": [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns)],
            "images": [image],
            "videos": [],
            "data_source": source,
            "index": place,
        }


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
    """Training rows, held-out rows, and their classes."""

    train: LabelledRows
    held_out: LabelledRows
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
    return LabelledData(train, held_out, CLASSES)


def folder_data(
    path: Path, eval_rows: int, seed: int, templates: Templates, exclude: Sequence[str] = ()
) -> LabelledData:
    """Opens a folder that has one folder of images for each class, as Caltech-101, or such folders for ``train`` and ``test``.

    Without a test folder, an eighth of each class, at least one image, is held out at random by ``seed``. Underscores in names
    of classes become spaces.

    Raises:
        InvalidConfig: there are fewer than two classes, or the test folder has a class that the training folder lacks.
    """
    parts = {split: _split_folder(path, names) for split, names in _SPLITS.items()}
    train = _labelled_files(parts["train"] or path, exclude)
    classes = tuple(dict.fromkeys(label for _, label in train))
    if len(classes) < 2:
        raise InvalidConfig(
            f"{path} must have a folder of images for each of at least two classes, but has {list(classes)}"
        )
    source = path.resolve().name
    if parts["test"]:
        test = _labelled_files(parts["test"], exclude)
        if unknown := sorted({label for _, label in test} - set(classes)):
            raise InvalidConfig(f"{parts['test']} has classes that are not in the training data: {unknown[:5]}")
        return _data(train, range(len(train)), test, range(len(test)), classes, templates, source, eval_rows, seed)
    kept, held_out = _hold_out([label for _, label in train], seed)
    if not held_out:
        raise InvalidConfig(
            f"{path} has one image of each class, so none can be held out: add images, or a folder {path / 'test'}"
        )
    return _data(train, kept, train, held_out, classes, templates, source, eval_rows, seed)


def table_data(
    source: str,
    eval_rows: int,
    seed: int,
    templates: Templates,
    image_column: str = "image",
    label_column: str = "label",
    exclude: Sequence[str] = (),
    on_bad_row: OnBadRow = "stop",
) -> LabelledData:
    """Opens a data set with a column of images and a column of labels (names, or numbers with names in its features).

    If there is no test split, an eighth of each class is held out. Paths of images start at the folder of their file.

    Raises:
        InvalidConfig: the data set or a column does not exist, no row has a label, or the test split has a class that the
            training rows lack.
        InvalidRow: a row has no label, or an empty one, or cannot be read; with ``on_bad_row="skip"`` it is left out.
    """
    tables, name = open_tables(source, "train")
    train = TablePairs(tables, image_column, label_column)
    used = train.labelled(exclude, on_bad_row)
    labels = [str(train.labels[place]) for place in used]
    classes = tuple(label for label in train.names or dict.fromkeys(labels) if label not in exclude)
    if not used:
        raise InvalidConfig(f"{name} has no row with a label in {label_column!r}")
    test_tables = _test_tables(source)
    if test_tables is None:
        kept, held_out = _hold_out(labels, seed)
        if not held_out:
            raise InvalidConfig(f"{name} has one row of each class, so none can be held out: add rows, or a test split")
        parts = [used[place] for place in kept], train, [used[place] for place in held_out]
    else:
        test = TablePairs(test_tables, image_column, label_column)
        parts = used, test, test.labelled(exclude, on_bad_row)
        if unknown := sorted({str(test.labels[place]) for place in parts[2]} - {*classes}):
            raise InvalidConfig(
                f"the test split of {name} has classes that are not in the training data: {unknown[:5]}"
            )
    return _data(train, *parts, classes, templates, name, eval_rows, seed)


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
        self.tables = [table for table, _ in tables]
        self.roots = [root for _, root in tables]
        for table in self.tables:
            columns: dict[str, None] = {}
            for row in columns_of(table):  # rows of JSON Lines may differ
                columns |= dict.fromkeys(row)
                if {image_column, label_column} <= columns.keys():
                    break
            for option, column in (("image", image_column), ("label", label_column)):
                if column not in columns:
                    raise InvalidConfig(
                        f"no column {column!r}: the data set has {', '.join(columns)}; name yours by --{option}-column"
                    )
        self.image_column, self.label_column = image_column, label_column
        features = getattr(self.tables[0], "features", None) or {}
        self.names: tuple[str, ...] = tuple(getattr(features.get(label_column), "names", None) or ())
        values = [value for table in self.tables for value in _column(table, label_column)]
        self.unread = {place: value for place, value in enumerate(values) if isinstance(value, InvalidRow)}
        self.labels = [self._name(value) for value in values]
        self.ends = np.cumsum([len(table) for table in self.tables])

    def __getitem__(self, place: int) -> tuple[Any, str]:
        number = int(np.searchsorted(self.ends, place, side="right"))
        table = self.tables[number]
        arrow = table.with_format("arrow") if hasattr(table, "with_format") else table
        row = arrow[int(place - (self.ends[number] - len(table)))]
        value = (row.to_pylist()[0] if hasattr(row, "to_pylist") else row).get(self.image_column)
        if value is None:
            raise InvalidRow(place, f"{self.image_column!r} is missing")
        images = media_list(value)
        if len(images) != 1:
            raise InvalidRow(place, f"{self.image_column!r} has {len(images)} images, but a label is of one")
        root = self.roots[number]
        file = None if root is None else image_file(images[0], root)
        return images[0] if file is None else file, str(self.labels[place])

    def labelled(self, exclude: Sequence[str], on_bad_row: OnBadRow) -> list[int]:
        """The places of the rows that have a label, without those of the classes ``exclude``. Raises `InvalidRow`."""
        if on_bad_row == "stop" and None in self.labels:
            place = self.labels.index(None)
            if (error := self.unread.get(place)) is not None:
                raise InvalidRow(place, f"{error.reason} (--on-bad-row skip leaves such rows out)") from error
            raise InvalidRow(place, f"no label in {self.label_column!r} (--on-bad-row skip leaves such rows out)")
        return [place for place, label in enumerate(self.labels) if label is not None and label not in exclude]

    def _name(self, value: Any) -> str | None:
        if self.names and isinstance(value, int):
            return self.names[value] if value >= 0 else None  # -1 is "no label" in data sets of the hub
        if value is None or value != value or isinstance(value, InvalidRow):  # NaN: what pandas writes for no label
            return None
        return str(value).strip() or None


def _column(table: Any, name: str) -> Sequence[Any]:
    if hasattr(table, "select_columns"):
        found: Sequence[Any] = table.select_columns([name])[name]
        return found
    return [_value(table, place, name) for place in range(len(table))]


def _value(table: Any, place: int, name: str) -> Any:
    """A value of a row of JSON Lines; `None` where the row lacks it, and the error where the row cannot be read."""
    try:
        return table[place].get(name)
    except InvalidRow as error:
        return error


def _data(
    train: Any,
    train_places: Sequence[int] | range,
    test: Any,
    test_places: Sequence[int] | range,
    classes: tuple[str, ...],
    templates: Templates,
    source: str,
    eval_rows: int,
    seed: int,
) -> LabelledData:
    """Training rows, and ``eval_rows`` held-out rows drawn at random, because rows are sorted by class."""
    order = np.random.default_rng([seed, 1]).permutation(len(test_places))[:eval_rows]
    chosen = [int(test_places[place]) for place in order.tolist()]
    return LabelledData(
        LabelledRows(train, train_places, classes, templates, source),
        LabelledRows(test, chosen, classes, templates, source),
        classes,
    )


def _hold_out(labels: Sequence[str], seed: int) -> tuple[list[int], list[int]]:
    """Places of training rows and of held-out rows: an eighth of each class, at least one if the class has two rows."""
    by_class: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        by_class.setdefault(label, []).append(place)
    held_out: set[int] = set()
    for number, label in enumerate(sorted(by_class)):
        places = by_class[label]
        count = max(len(places) // 8, 1) if len(places) > 1 else 0
        held_out |= {
            places[at] for at in np.random.default_rng([seed, number]).permutation(len(places))[:count].tolist()
        }
    return [place for place in range(len(labels)) if place not in held_out], sorted(held_out)


def _split_folder(path: Path, names: Sequence[str]) -> Path | None:
    return next((path / name for name in names if (path / name).is_dir()), None)


def _labelled_files(path: Path, exclude: Sequence[str]) -> list[tuple[Path, str]]:
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    return [
        (file, folder.name.replace("_", " "))
        for folder in folders
        if folder.name not in exclude
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in IMAGES
    ]
