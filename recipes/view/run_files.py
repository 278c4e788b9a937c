"""What the viewer shows of a run, read from its directory while the run may write there."""

import math
import re
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from dataproto.errors import FileFormatError, InvalidConfig
from recipes.report.kept_rollouts import kept_steps, load_kept, load_tokens, read_lines, rows_file, tokens_file
from recipes.report.metrics_file import METRICS_FILE, read_metrics
from recipes.report.page import curves
from recipes.report.samples import FOLDER, rollout_steps
from recipes.view.rollout_filter import fields_of, in_order, matching

Row = dict[str, Any]

PREVIEW = 160  # characters of a response in the list
PICTURE = re.compile(r"[0-9a-f]{16}\.(png|jpg)")


class RunFiles:
    """The metrics and rollouts of a run. Each file is read again only after it has changed.

    There are two sets of rollouts: ``training``, as the steps sampled them, and ``held-out``, of the evaluations.
    """

    def __init__(self, directory: str | Path) -> None:
        """
        Raises:
            FileFormatError: the directory is missing.
        """
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise FileFormatError(f"{directory} is not the directory of a run")
        self._read: dict[Path, tuple[tuple[int, int], Any]] = {}  # stamp and content of each file
        self._lock = threading.Lock()  # the server answers in several threads

    def overview(self) -> dict[str, Any]:
        """The name of the run, the steps whose rollouts are kept, and a stamp that changes with the metrics."""
        metrics = self.directory / METRICS_FILE
        return {
            "name": self.directory.resolve().name,
            "steps": {name: self.steps(name) for name in ("training", "held-out")},
            "metrics": _stamp(metrics) if metrics.exists() else None,
        }

    def curves(self) -> str:
        """Tiles and charts as HTML, with all text escaped."""
        path = self.directory / METRICS_FILE
        if not path.exists():
            return ""
        return self._cached(path, lambda: curves(read_metrics(path)))

    def steps(self, name: str) -> list[int]:
        """The steps of a set, in order."""
        return kept_steps(self.directory) if name == "training" else rollout_steps(self.directory)

    def rows(self, name: str, step: int | None = None) -> list[Row]:
        """The rows of a set at one step, or at all of them, without tokens.

        Raises:
            InvalidConfig: no rows of the step are kept.
        """
        steps = self.steps(name)
        if step is not None and step not in steps:
            raise InvalidConfig(f"no {name} rollouts of step {step} are kept")
        return [row for each in (steps if step is None else [step]) for row in self._rows_of(name, each)]

    def listing(
        self, name: str, step: int | None, text: str, sort: str, descending: bool, start: int, count: int
    ) -> dict[str, Any]:
        """``count`` rows from ``start`` of those that match, in order, in short form; their total number; fields to sort by.

        Raises:
            InvalidConfig: the filter or the field is not understood.
        """
        rows = self.rows(name, step)
        found = in_order(matching(rows, text), sort, descending) if rows else []  # type: ignore[arg-type]
        return {
            "total": len(found),
            "of": len(rows),
            "fields": fields_of(rows),
            "rows": [_short(row) for row in found[start : start + count]],
        }

    def group(self, name: str, step: int, uid: str) -> list[Row]:
        """All kept rows of a prompt: the samples of a step with their tokens, or the answers of all evaluations.

        Raises:
            InvalidConfig: there is none.
        """
        if name == "training":
            rows = self.rows(name, step)
            tokens = _tokens(self.directory, step, _stamp(tokens_file(self.directory, step)))
            if len(rows) != len(tokens):
                raise FileFormatError(f"step {step}: {len(rows)} rows, but the tokens of {len(tokens)}")
            found = [row | token for row, token in zip(rows, tokens, strict=True) if row["uid"] == uid]
        else:
            found = [row for row in self.rows(name) if row["uid"] == uid]
        if not found:
            raise InvalidConfig(f"no rollouts of uid {uid!r} at step {step}")
        return found

    def picture(self, name: str) -> bytes | None:
        """The content of a kept picture; ``None`` for any other name."""
        path = self.directory / FOLDER / "images" / name
        return path.read_bytes() if PICTURE.fullmatch(name) and path.is_file() else None

    def _rows_of(self, name: str, step: int) -> list[Row]:
        if name == "training":
            path = rows_file(self.directory, step)
            return self._cached(path, lambda: load_kept(self.directory, step))
        path = self.directory / FOLDER / f"step_{step}.jsonl"
        return self._cached(path, lambda: [_held_out(row, step) for row in read_lines(path, path.read_bytes(), "key")])

    def _cached(self, path: Path, read: Callable[[], Any]) -> Any:
        with self._lock:
            stamp = _stamp(path)
            if self._read.get(path, (None,))[0] != stamp:
                self._read[path] = stamp, read()
            return self._read[path][1]


@lru_cache(maxsize=4)
def _tokens(directory: Path, step: int, stamp: tuple[int, int]) -> list[Row]:
    """`load_tokens` of the steps that were read last; ``stamp`` changes with the file."""
    return load_tokens(directory, step)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _held_out(row: Mapping[str, Any], step: int) -> Row:
    """An answer of an evaluation with the fields of a kept row."""
    accuracy = row.get("accuracy")
    return {
        "step": step,
        "uid": str(row["key"]),
        "sample": 0,
        "source": "",
        "prompt": str(row.get("prompt", "")),
        "response": str(row.get("response", "")),
        "ground_truth": str(row.get("ground_truth", "")),
        "reward": _finite(row.get("reward")),
        "parts": {} if accuracy is None else {"acc": _finite(accuracy)},
        "truncated": False,
        "images": list(row.get("images", ())),
        "length": None,
        "mismatch": None,
    }


def _short(row: Mapping[str, Any]) -> Row:
    kept = ("step", "uid", "sample", "reward", "parts", "length", "mismatch", "truncated")
    return {name: row[name] for name in kept} | {
        "response": row["response"][:PREVIEW],
        "image": (row["images"] or [None])[0],
    }


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
