"""The file of a run's metrics: written by the run, read by its report and by a resumed run."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import SupportsFloat

from dataproto.errors import InvalidConfig, wait_for_disk, writing
from recipes.watch.rollout_files import read_lines

METRICS_FILE = "metrics.jsonl"


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl``, null as NaN; none if there is no file.

    A half-written last line, which a killed process may leave, is ignored.

    Raises:
        FileFormatError: another line is not a JSON object with a ``step``; names the line.
    """
    rows = read_lines(Path(path), "step", may_be_cut=True) if Path(path).exists() else []
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


def truncate_after(path: str | Path, step: int) -> None:
    """Drops the rows of later steps, and a half-written last line, from a ``metrics.jsonl``; all or nothing."""
    path = Path(path)
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    replacement = path.with_name(path.name + ".tmp")
    with writing(path, replacement):
        replacement.write_bytes(b"".join(map(_line, kept)))
        wait_for_disk(replacement)
        replacement.replace(path)


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """A run's metrics: one JSON object a step in ``metrics.jsonl``.

    A row is one write, so a killed process leaves whole lines, except perhaps the last one, which readers then ignore. Steps
    only increase, so each step is in the file once.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with MetricsLog(folder) as log:
    ...         log.log(0, {"reward": 0.25})
    ...         log.log(1, {"reward": float("nan")})
    ...     with MetricsLog(folder, resume_after=0) as log:
    ...         log.log(1, {"reward": 0.5})
    ...     (Path(folder) / "metrics.jsonl").read_text()
    '{"step": 0, "reward": 0.25}\\n{"step": 1, "reward": 0.5}\\n'
    """

    def __init__(self, directory: str | Path, resume_after: int | None = None) -> None:
        """Opens the log of a run.

        Args:
            directory: of the run; created if it is missing.
            resume_after: the last step to keep from an earlier process, -1 to keep none; by default this is a new run.

        Raises:
            InvalidConfig: this is a new run, but the directory holds the metrics of another.
        """
        self.path = Path(directory) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_after is not None:
            truncate_after(self.path, resume_after)
        elif self.path.exists() and self.path.stat().st_size:
            raise InvalidConfig(f"{directory} holds the metrics of an earlier run: resume it, or choose another")
        rows = read_metrics(self.path)
        self._last = int(rows[-1]["step"]) if rows else -1
        with writing(self.path):
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Appends a step's row; NaN and infinity become null.

        Raises:
            InvalidConfig: the step is not above the last one written.
            FileNotWritten: the disk is full, say; the file then holds the rows before this one.
        """
        if step <= self._last:
            raise InvalidConfig(f"metrics of step {step} after those of step {self._last}: each step is written once")
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        with writing(self.path):
            self._append(_line({"step": step, **numbers}))
        self._last = step

    def _append(self, line: bytes) -> None:
        """Appends a whole line or nothing: a full disk takes the part that fits, and says so at the next write only."""
        size, left = os.fstat(self._file).st_size, line
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __exit__(self, *error: object) -> None:
        self.close()


def _line(row: Mapping[str, float]) -> bytes:
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return (json.dumps(finite, allow_nan=False) + "\n").encode()
