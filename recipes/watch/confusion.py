"""Confusion of classes: counted, saved in the run's directory, and shown in its report."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataproto.errors import FileFormatError
from recipes.watch.pages import render
from recipes.watch.rollout_files import replace_file

FOLDER = "confusion"
CELL, MOST = 14, 110  # pixels; classes that are shown
OTHER = "(another answer)"


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
        names = [*self.classes, OTHER]
        mistakes = [
            (self.classes[i], names[j], count)
            for i, row in enumerate(self.counts)
            for j, count in enumerate(row)
            if count and i != j
        ]
        return sorted(mistakes, key=lambda mistake: -mistake[2])[:number]

    @property
    def shown(self) -> list[str]:
        """The classes that a picture has room for."""
        return self.classes[:MOST]

    def picture(self) -> str:
        """The table as inline SVG: one row a class, one column an answer; the most frequent answers of a row are the darkest."""
        answers = [*self.shown, OTHER]
        rows = [zip(answers, [*counts[: len(self.shown)], counts[-1]], strict=True) for counts in self.counts[:MOST]]
        return render(
            "confusion.svg",
            cell=CELL,
            longest=max((min(len(name), 24) for name in self.shown), default=0),
            classes=list(zip(self.shown, rows, strict=True)),
            totals=[sum(counts) or 1 for counts in self.counts],
        )


def save_confusion(directory: Path, step: int, confusion: Confusion) -> Path:
    """Writes ``<directory>/confusion/step_<step>.json``."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return replace_file(folder / f"step_{step}.json", json.dumps(vars(confusion)).encode())


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
