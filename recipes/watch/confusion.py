"""Confusion of classes: counted, saved in the run's directory, and drawn for its report."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataproto.errors import FileFormatError, writing
from recipes.watch.charts import safe_text

FOLDER = "confusion"
CELL, MOST = 14, 110  # pixels; classes that are drawn


@dataclass(frozen=True)
class Confusion:
    """``counts[i][j]`` is the number of times that the answer to class i was class j; the last column counts other answers.

    >>> confusion = Confusion.of(["cat", "dog"], [("cat", "cat"), ("cat", "dog"), ("dog", "a dog")])
    >>> confusion.counts, round(confusion.accuracy, 2)
    ([[1, 1, 0], [0, 0, 1]], 0.33)
    """

    classes: list[str]
    counts: list[list[int]]

    @classmethod
    def of(cls, classes: Sequence[str], pairs: Iterable[tuple[str, str]]) -> "Confusion":
        """``pairs`` are (class, answer)."""
        found = Counter(pairs)
        rows = []
        for truth in classes:
            known = [found[truth, answer] for answer in classes]
            rows.append([*known, sum(count for (t, _), count in found.items() if t == truth) - sum(known)])
        return cls(list(classes), rows)

    @property
    def accuracy(self) -> float:
        total = sum(map(sum, self.counts))
        return sum(row[place] for place, row in enumerate(self.counts)) / total if total else 0.0

    @property
    def other_share(self) -> float:
        """The share of answers that name no class."""
        total = sum(map(sum, self.counts))
        return sum(row[-1] for row in self.counts) / total if total else 0.0

    def worst(self, number: int = 5) -> list[tuple[str, str, int]]:
        """The most frequent mistakes: class, answer, count."""
        names = [*self.classes, "(another answer)"]
        mistakes = [
            (self.classes[i], names[j], count)
            for i, row in enumerate(self.counts)
            for j, count in enumerate(row)
            if count and i != j
        ]
        return sorted(mistakes, key=lambda mistake: -mistake[2])[:number]


def save_confusion(directory: Path, step: int, confusion: Confusion) -> Path:
    """Writes ``<directory>/confusion/step_<step>.json``."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}.json"
    temporary = path.with_suffix(".tmp")
    with writing(path, temporary):
        temporary.write_text(json.dumps(vars(confusion)), encoding="utf-8")
        return temporary.replace(path)


def latest_confusion(directory: Path) -> tuple[int, Confusion] | None:
    """The step and the confusion of a run's last evaluation; ``None`` if it saved none.

    Raises:
        FileFormatError: the file is damaged.
    """
    steps = [int(path.stem.removeprefix("step_")) for path in (directory / FOLDER).glob("step_*.json")]
    if not steps:
        return None
    path = directory / FOLDER / f"step_{max(steps)}.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return max(steps), Confusion(
            list(map(str, fields["classes"])), [list(map(int, row)) for row in fields["counts"]]
        )
    except (ValueError, TypeError, KeyError) as error:
        raise FileFormatError(f"{path}: not a table of confusion ({error})") from error


def confusion_picture(confusion: Confusion) -> str:
    """The table as inline SVG: one row a class, one column an answer; the most frequent answers of a row are the darkest."""
    classes = confusion.classes[:MOST]
    size = len(classes)
    names = 8 * max((min(len(name), 24) for name in classes), default=0)
    columns = [*range(size), len(confusion.classes)]
    cells = []
    for i in range(size):
        total = sum(confusion.counts[i]) or 1
        for at, j in enumerate(columns):
            if count := confusion.counts[i][j]:
                colour = 2 if i == j else 4
                cells.append(
                    f'<rect class="c{colour}" style="fill:var(--c)" x="{names + at * CELL}" y="{i * CELL}" width="{CELL - 1}" '
                    f'height="{CELL - 1}" fill-opacity="{0.15 + 0.85 * count / total:.2f}"><title>{safe_text(classes[i])}: '
                    f"{count} x {safe_text([*confusion.classes, '(another answer)'][j])}</title></rect>"
                )
    labels = [
        f'<text x="{names - 6}" y="{i * CELL + CELL - 4}" text-anchor="end">{safe_text(name[:24])}</text>'
        for i, name in enumerate(classes)
    ]
    width, height = names + (size + 1) * CELL, size * CELL
    frame = f'<rect x="{names}" y="0" width="{width - names}" height="{height}" fill="none" class="grid"/>'
    return (
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" aria-label="confusion">'
        f"{frame}{''.join(labels)}{''.join(cells)}</svg>"
    )
