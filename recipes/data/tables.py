"""Data sets as tables of rows: parquet and JSON files, folders of them, names on the Hugging Face hub, streams.

Files are read as data only; relative paths in them start at the file's folder.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from dataproto.errors import DataProtoError, FileFormatError, InvalidConfig, InvalidRow

READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

Table = tuple[Any, Path | None]  # anything with a length and integer indices of dicts; where its relative paths start
ReadRow = Callable[[dict[str, Any], int], dict[str, Any]]  # raw row and its number -> row for a builder


class TableRows(Sequence[dict[str, Any]]):
    """Rows of several tables one after the other, read from disk when asked for and turned by ``read``.

    ``rows[i]`` has ``media_root`` besides what ``read`` returns. Raises `InvalidRow` for a row that it refuses.

    >>> TableRows([([{"a": 1}, {"a": 2}], None)], lambda raw, place: {"b": 10 * raw["a"] + place})[1]
    {'b': 21, 'media_root': None}
    """

    def __init__(self, tables: Sequence[Table], read: ReadRow) -> None:
        self.tables = [(_plain(table), root) for table, root in tables]
        self.ends = list(accumulate(len(table) for table, _ in tables))
        self.read = read

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        number = bisect_right(self.ends, place)
        table, root = self.tables[number]
        return read_one(self.read, table[place - (self.ends[number] - len(table))], place) | {"media_root": root}


def read_one(read: ReadRow, raw: Any, place: int) -> dict[str, Any]:
    """A row by ``read``; whatever is wrong with it becomes an `InvalidRow` of its place."""
    try:
        return read(raw, place)
    except InvalidRow:
        raise
    except DataProtoError as error:
        raise InvalidRow(place, str(error)) from error


class JsonLines(Sequence[dict[str, Any]]):
    """The rows of a JSON Lines file, whose values may be of another type in each row. Only the places of lines are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            ends = np.fromiter(accumulate(len(line) for line in file), dtype=np.int64)
        self.starts = np.append(0, ends)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        with self.path.open("rb") as file:
            file.seek(int(self.starts[place]))
            line = file.read(int(self.starts[place + 1] - self.starts[place]))
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidRow(place, f"line {place + 1} of {self.path} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InvalidRow(place, f"line {place + 1} of {self.path} is not a JSON object")
        return row


class _ArrowTable(Sequence[dict[str, Any]]):
    """A `datasets.Dataset` whose images stay the bytes and paths they are."""

    def __init__(self, table: Any) -> None:
        self.table = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        return self.table[index].to_pylist()[0]


def _plain(table: Any) -> Any:
    return _ArrowTable(table) if hasattr(table, "with_format") else table


def open_tables(source: str | Path | Sequence[str | Path], split: str = "train") -> tuple[list[Table], str]:
    """The tables of a data set, and its name: the hub's, or the first file's or folder's.

    Args:
        source: parquet (or JSON) file or files, a folder of them, or a name on the Hugging Face hub.
        split: which files of a folder (``train-00000-of-00001.parquet``, ``train.parquet``, also under ``data/``), or
            which split on the hub. A file is taken whole.

    Raises:
        InvalidConfig: no such file, folder or data set.
        FileFormatError: a file cannot be read.
    """
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    if not sources:
        raise InvalidConfig("no data set given")
    tables: list[Table] = []
    for one in sources:
        if Path(one).exists():
            tables += [(_read_file(file), file.parent) for file in _files(Path(one), split)]
        else:
            tables.append((_download(str(one), split), None))
    return tables, str(sources[0]) if tables[0][1] is None else Path(sources[0]).resolve().stem


def open_stream(source: str, split: str = "train") -> tuple[Any, Path | None]:
    """A data set as `datasets.IterableDataset`, of which nothing is downloaded or read ahead; see `open_tables`."""
    from datasets import load_dataset

    path = Path(source)
    if not path.exists():
        return _download(source, split, streaming=True), None
    files = _files(path, split)
    kinds = {READERS.get(file.suffix) for file in files}
    if len(kinds) > 1 or None in kinds:
        raise InvalidConfig(f"{path}: a stream is of parquet or of JSON files")
    return load_dataset(kinds.pop(), data_files=[str(file) for file in files], split="train", streaming=True), files[
        0
    ].parent


class StreamRows:
    """Rows that are only ever read one after the other, shuffled within blocks of ``buffer``, epoch after epoch.

    What is drawn depends on (seed, number of the draw) alone, so a run resumes exactly by reading up to where it was.
    """

    def __init__(self, stream: Any, root: Path | None, read: ReadRow, buffer: int = 1024) -> None:
        """``stream``: a `datasets.IterableDataset`, or anything else that can be iterated again and again."""
        if buffer < 1:
            raise InvalidConfig(f"shuffle_buffer={buffer}: must be at least 1")
        self.stream, self.root, self.read, self.buffer = stream, root, read, buffer

    def draws(self, seed: int, shuffle: bool, start: int) -> Iterator[tuple[str, int, dict[str, Any] | None]]:
        """Name of the occurrence, place and raw row of each draw, from the ``start``-th on."""
        epoch, before = 0, 0
        while True:
            rows = 0
            for block, place, raws in self._blocks():
                rows += len(raws)
                if before + len(raws) > start:
                    order = np.arange(len(raws))
                    if shuffle:
                        order = np.random.default_rng([seed, epoch, block]).permutation(len(raws))
                    for at in order[max(start - before, 0) :].tolist():
                        yield f"{epoch}-{place + at}", place + at, raws[at]
                before += len(raws)
            if not rows:
                raise InvalidConfig("the stream has no rows")
            epoch += 1

    def _blocks(self) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
        raws: list[dict[str, Any]] = []
        number = place = 0
        for raw in self.stream:
            raws.append(raw)
            if len(raws) == self.buffer:
                yield number, place, raws
                number, place, raws = number + 1, place + len(raws), []
        if raws:
            yield number, place, raws

    def read_row(self, raw: dict[str, Any], place: int) -> dict[str, Any]:
        """The row for a builder."""
        return read_one(self.read, raw, place) | {"media_root": self.root}


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    found = [file for folder in (path, path / "data") for file in sorted(folder.glob("*")) if file.suffix in READERS]
    files = [file for file in found if re.match(rf"{re.escape(split)}(\W|_|$)", file.stem)]
    if not files:
        names = ", ".join(file.name for file in found[:10]) or "no parquet or JSON file"
        raise InvalidConfig(f"{path} has no file of split {split!r}; it has {names}")
    return files


def _read_file(file: Path) -> Any:
    from datasets import load_dataset

    if file.suffix not in READERS:
        raise InvalidConfig(f"{file}: data files end in {', '.join(READERS)}")
    if file.suffix == ".jsonl":
        return JsonLines(file)
    try:
        return load_dataset(READERS[file.suffix], data_files=str(file), split="train")
    except Exception as error:  # datasets wraps whatever its readers raise
        raise FileFormatError(f"{file} cannot be read as {READERS[file.suffix]}: {error.__cause__ or error}") from error


def _download(name: str, split: str, streaming: bool = False) -> Any:
    from datasets import load_dataset

    if not _HUB_NAME.fullmatch(name) or Path(name).suffix in READERS:
        raise InvalidConfig(f"{name}: there is no such file or folder")
    try:
        return load_dataset(name, split=split, **({"streaming": True} if streaming else {}))
    except Exception as error:  # network, name or split
        raise InvalidConfig(
            f"{name} is no file or folder here, and could not be loaded from the hub: {error}"
        ) from error
