"""Data sets as tables of rows: parquet and JSON files, folders of them, names on the Hugging Face hub, streams.

Reading a file runs no code. Relative paths in a file start at its folder.
"""

import contextlib
import json
import re
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataproto.errors import DataProtoError, FileFormatError, InvalidConfig, InvalidRow, raised_as
from recipes.data.column_keys import KNOWN, ColumnKeys

_READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_CONVERT = "convert it by datasets: load_from_disk(...) or load_dataset('csv', data_files=...), then .to_parquet('train.parquet')"
_SPACE = re.compile(r"[ \t\r\n]*")
_WHO = {"role", "from"}  # names of which a message has one
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

ReadRow = Callable[[dict[str, Any], int], dict[str, Any]]
"""Converts a raw row and its place to a row for a builder."""


class Table(NamedTuple):
    """A sequence of dicts, the folder at which its relative paths start, and the file that it was read from."""

    rows: Any
    root: Path | None = None
    file: Path | None = None


class TableRows(Sequence[dict[str, Any]]):
    """The rows of several tables in sequence, read from disk on access and converted by ``read``.

    ``rows[i]`` is the result of ``read`` with ``media_root`` and ``where``, the line of its file for messages. It raises
    `InvalidRow`, which says where the row is, if ``read`` does not accept it.

    >>> TableRows([Table([{"a": 1}, {"a": 2}])], lambda raw, place: {"b": 10 * raw["a"] + place})[1]
    {'b': 21, 'media_root': None, 'where': None}
    """

    def __init__(self, tables: Sequence[Table], read: ReadRow) -> None:
        self.tables = [
            table._replace(rows=_ArrowTable(table.rows)) if hasattr(table.rows, "with_format") else table
            for table in tables
        ]
        self.ends = list(accumulate(len(table.rows) for table in tables))
        self.read = read

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        table, local = self._found(place)
        found = {"media_root": table.root, "where": self.where(place)}
        try:
            return read_one(self.read, table.rows[local], place) | found
        except InvalidRow as error:
            raise self.invalid(place, error.reason) from error

    def _found(self, place: int) -> tuple[Table, int]:
        """The table of a row, and its place there."""
        number = bisect_right(self.ends, place)
        table = self.tables[number]
        return table, place - (self.ends[number] - len(table.rows))

    def where(self, place: int) -> str | None:
        """The file of a row, and its place there, for messages; ``None`` if it is unknown."""
        table, local = self._found(place)
        if isinstance(table.rows, JsonRows):
            return table.rows.where(local)
        if table.file is None:
            return None
        return f"row {local} of {table.file}" if len(self.tables) > 1 else str(table.file)

    def invalid(self, place: int, reason: str) -> InvalidRow:
        """The error for a row that cannot be used."""
        where = self.where(place)  # `rollout.prompts.invalid_row` says the same, but imports torch
        return InvalidRow(place, reason if where is None or reason.startswith(where) else f"{where}: {reason}")


def read_one(read: ReadRow, raw: Any, place: int) -> dict[str, Any]:
    """Converts a row by ``read``; a `DataProtoError` becomes an `InvalidRow` with the place of the row."""
    if isinstance(raw, InvalidRow):  # of a `JsonStream`
        raise InvalidRow(place, raw.reason)
    try:
        return read(raw, place)
    except InvalidRow:
        raise
    except DataProtoError as error:
        raise InvalidRow(place, str(error)) from error


@dataclass(frozen=True)
class ConvertedRows(Sequence[dict[str, Any]]):
    """Rows that ``convert`` makes of other rows and their places, each when it is read.

    >>> ConvertedRows([{"a": 1}, {"a": 2}], lambda row, place: {"b": 10 * row["a"] + place})[1]
    {'b': 21}
    """

    rows: Sequence[Any]
    convert: Callable[[Any, int], dict[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        return self.convert(self.rows[place], place)


class JsonRows(Sequence[dict[str, Any]]):
    """The rows of a JSON file: one object on each line that is not blank, or the objects of one array in a ``.json`` file. Only
    their offsets are in memory, and values keep the types that they have in the file, which may vary by row.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Finds the rows; ``name`` is that of the file on the hub. Raises `FileFormatError` if a ``.json`` file is neither."""
        self.path, self.name = path, name or str(path)
        in_lines = self.name.lower().endswith(".jsonl")
        with path.open("rb") as file:
            self.in_array = not in_lines and file.read(64).removeprefix(BOM_UTF8).lstrip()[:1] == b"["
            file.seek(0)
            spans = _objects_of_array(file.read(), self.name) if self.in_array else _lines(file)
            self.numbers, self.starts, self.ends = np.fromiter(spans, np.dtype((np.int64, 3))).T
        if not in_lines and not self.in_array and len(self):
            try:
                self[0]
            except InvalidRow as error:
                way_out = "it must be an array of objects, or have one object on each line"
                raise FileFormatError(f"{self.name} cannot be read as json: {error.reason}; {way_out}") from error

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        with self.path.open("rb") as file:
            file.seek(int(self.starts[place]))
            text = file.read(int(self.ends[place] - self.starts[place]))
        with raised_as(partial(InvalidRow, place), f"{self.where(place)} is not JSON", ValueError, RecursionError):
            row = json.loads(text)
        if not isinstance(row, dict):
            raise InvalidRow(place, f"{self.where(place)} is not a JSON object")
        return row

    def where(self, place: int) -> str:
        """The place of a row in the file, for messages."""
        return f"{'object' if self.in_array else 'line'} {self.numbers[place]} of {self.name}"


Span = tuple[int, int, int]
"""Number of a row for messages, and the offsets of its first byte and after its last one."""


def _lines(file: Iterable[bytes]) -> Iterator[Span]:
    """The lines that are not blank."""
    start = 0
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, start, start + len(line)
        start += len(line)


def _objects_of_array(content: bytes, name: str) -> Iterator[Span]:
    """The items of an array that is the whole of a file."""
    text = content.decode("latin-1")  # so that places are those of bytes: all signs of JSON are ASCII
    decoder, number = json.JSONDecoder(), 0
    at = _after_space(text, text.index("[") + 1)
    with raised_as(FileFormatError, f"{name} cannot be read as json", ValueError, RecursionError):
        while not text.startswith("]", at):
            _, end = decoder.raw_decode(text, at)
            number += 1
            yield number, at, end
            at = _after_space(text, end)
            if text.startswith(",", at):
                at = _after_space(text, at + 1)
            elif not text.startswith("]", at):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        if _after_space(text, at + 1) < len(text):
            raise json.JSONDecodeError("Extra data", text, at + 1)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


class JsonStream:
    """The rows of JSON files in sequence; for one that cannot be read, the error. It can be iterated repeatedly.

    A file of the hub is downloaded when its first row is read.
    """

    def __init__(self, files: Sequence[Path | str]) -> None:
        """``files``: those on the hub by their addresses."""
        self.files = files

    def __iter__(self) -> Iterator[dict[str, Any] | InvalidRow]:
        for file in self.files:
            yield from rows_or_errors(_json_rows(file))


def rows_or_errors(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any] | InvalidRow]:
    """All rows; for one that cannot be read, the error."""
    for place in range(len(rows)):
        try:
            yield rows[place]
        except InvalidRow as error:
            yield error


class _ArrowTable(Sequence[dict[str, Any]]):
    """The rows of a `datasets.Dataset`, with images as bytes and paths, and other values as `meant`."""

    def __init__(self, table: Any) -> None:
        self.table = table.with_format("arrow")
        self.column_names = table.column_names
        self.features = features_of(table)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        return _as_meant(self.table[index].to_pylist()[0], self.features)


def features_of(table: Any) -> Mapping[str, Any]:
    """The types of the columns of a `datasets.Dataset`, or of a stream of one; others have none. Integers that pandas has made
    floats are integers.
    """
    features = dict(getattr(table, "features", None) or {})
    for name, each in features.items():
        if getattr(each, "dtype", None) == "float64" and _were_integers(table, name):
            features[name] = replace(each, dtype="int64")
    return features


def _were_integers(table: Any, name: str) -> bool:
    """Whether a column of floats has missing values and all others are whole: pandas stores integers as floats then."""
    from pyarrow import compute

    if not hasattr(table, "data"):
        return False  # a stream
    column = table.data.column(name)
    known = column.filter(compute.invert(compute.is_null(column, nan_is_null=True)))
    whole = compute.and_(compute.equal(compute.floor(known), known), compute.less(compute.abs(known), 2**53))
    return 0 < len(known) < len(column) and bool(compute.all(whole).as_py())


def meant(value: Any, feature: Any) -> Any:
    """A value of a column as it was meant: the name of a class for its number, of which -1 is "no label" in data sets of the hub,
    for a float of few bits the number that was written, and for a float that `features_of` calls an integer the integer.

    >>> from datasets import ClassLabel, Value
    >>> meant(1, ClassLabel(names=["cat", "dog"])), meant(5.300000190734863, Value("float32"))
    ('dog', 5.3)
    """
    if isinstance(value, int) and hasattr(feature, "names"):
        return feature.names[value] if value >= 0 else None
    dtype = getattr(feature, "dtype", None)
    if isinstance(value, float) and dtype == "int64":
        return int(value) if value == value else None
    if isinstance(value, float) and dtype in ("float16", "float32"):
        return float(str(np.dtype(dtype).type(value)))
    return value


def _as_meant(row: Mapping[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    return without_nulls({name: meant(value, features.get(name)) for name, value in row.items()})


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose messages and ``tools`` lack the names that Arrow adds with ``None``: it gives all mappings of a column the same
    names. Other columns stay as they are.

    >>> row = {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"box": [1], "name": None}}}]}]}
    >>> without_nulls(row)["messages"][0]["tool_calls"]
    [{'function': {'arguments': {'box': [1]}}}]
    """
    return {
        name: _without_nulls(value) if name == "tools" or _are_messages(value) else value for name, value in row.items()
    }


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) and bool(each.keys() & _WHO) for each in value[:1])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def open_tables(
    source: str | Path | Sequence[str | Path], split: str = "train", media_root: str | Path | None = None
) -> tuple[list[Table], str]:
    """Opens a data set and returns its tables and its name, which is that on the hub, or of the first file or folder.

    Args:
        source: parquet or JSON files, folders of them, or names on the Hugging Face hub.
        split: the split on the hub, or of a folder: the files whose names begin with it (``train.parquet``,
            ``train-00000-of-00001.parquet``, also in ``data/``). It does not apply to a single file.
        media_root: the folder at which relative paths in rows start; by default that of each file.

    Raises:
        InvalidConfig: the file, folder or data set, or ``media_root``, does not exist.
        FileFormatError: a file cannot be read.
    """
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    if not sources:
        raise InvalidConfig("no data set given")
    root = _folder(media_root)
    tables: list[Table] = []
    for one in sources:
        if Path(one).exists():
            tables += [Table(_read_file(file), root or file.parent, file) for file in _files(Path(one), split)]
        else:
            tables += [Table(rows, root) for rows in _download(str(one), split)]
    return tables, Path(sources[0]).resolve().stem if Path(sources[0]).exists() else str(sources[0])


def _folder(media_root: str | Path | None) -> Path | None:
    if media_root is not None and not Path(media_root).is_dir():
        raise InvalidConfig(f"media_root {media_root}: no such folder")
    return None if media_root is None else Path(media_root)


def open_rows(
    read: Callable[..., dict[str, Any]],
    source: str | Path | Sequence[str | Path],
    split: str = "train",
    keys: ColumnKeys = KNOWN,
    media_root: str | Path | None = None,
    data_source: str | None = None,
) -> TableRows:
    """The rows of a data set as ``read`` converts them, with ``keys`` and ``data_source``, by default the name of the data set.

    Raises:
        InvalidConfig: the data set does not exist, has no rows, or lacks a column that ``keys`` names.
        FileFormatError: a file cannot be read.
    """
    tables, name = open_tables(source, split, media_root)
    keys.check([table.rows for table in tables], name)
    rows = TableRows(tables, partial(read, data_source=data_source or name, keys=keys))
    if not len(rows):
        raise InvalidConfig(f"data set {name!r} has no rows")
    return rows


def open_stream(
    read: Callable[..., dict[str, Any]],
    source: str,
    split: str = "train",
    buffer: int = 1024,
    keys: ColumnKeys = KNOWN,
    media_root: str | Path | None = None,
) -> "StreamRows":
    """The rows of a data set as `open_rows` has them, without reading ahead, shuffled within blocks of ``buffer`` rows."""
    from datasets import load_dataset

    path, root = Path(source), _folder(media_root)
    stream: Any
    if not path.exists():
        name = source
        with _of_hub(source) as builder:
            addresses = _json_files(builder, split)
            stream = JsonStream(addresses) if addresses else builder.as_streaming_dataset(split=split)
    else:
        name, files = path.resolve().stem, _files(path, split)
        root, kinds = root or files[0].parent, {_reader(file) for file in files}
        if len(kinds) > 1 or None in kinds:
            raise InvalidConfig(f"{path}: a stream needs parquet files or JSON files")
        if kinds == {"json"}:
            stream = JsonStream(files)
        else:
            stream = load_dataset("parquet", data_files=[str(file) for file in files], split="train", streaming=True)
    if hasattr(stream, "decode"):
        stream = stream.decode(False)  # keep images as bytes and paths
    keys.check([stream], name)
    return StreamRows(stream, root, partial(read, data_source=name, keys=keys), buffer)


class StreamRows:
    """Rows that can only be read in sequence; each epoch is shuffled within blocks of ``buffer`` rows.

    A draw depends only on (seed, number of the draw), so a resumed run reads up to its position and continues exactly.
    """

    def __init__(self, stream: Any, root: Path | None, read: ReadRow, buffer: int = 1024) -> None:
        """``stream`` is a `datasets.IterableDataset`, or any object that can be iterated repeatedly."""
        if buffer < 1:
            raise InvalidConfig(f"shuffle_buffer={buffer}: must be at least 1")
        self.stream, self.root, self.read, self.buffer = stream, root, read, buffer

    def draws(self, seed: int, shuffle: bool, start: int) -> Iterator[tuple[str, int, dict[str, Any] | None]]:
        """The draws from draw ``start`` on; see `recipes.data.loader.Draw`."""
        epoch, before = 0, 0
        while True:
            rows = 0
            for block, place, raws in self._blocks():
                rows += len(raws)
                if before + len(raws) > start:
                    random = np.random.default_rng([seed, epoch, block])
                    order = random.permutation(len(raws)) if shuffle else np.arange(len(raws))
                    for at in order[max(start - before, 0) :].tolist():
                        yield f"{epoch}-{place + at}", place + at, raws[at]
                before += len(raws)
            if not rows:
                raise InvalidConfig("the stream has no rows")
            epoch += 1

    def _blocks(self) -> Iterator[tuple[int, int, list[Any]]]:
        features, is_json = features_of(self.stream), isinstance(self.stream, JsonStream)
        rows = iter(self.stream if is_json else (_as_meant(raw, features) for raw in self.stream))
        for number, raws in enumerate(iter(lambda: list(islice(rows, self.buffer)), [])):
            yield number, number * self.buffer, raws

    def read_row(self, raw: dict[str, Any], place: int) -> dict[str, Any]:
        """Converts a raw row of the stream."""
        return read_one(self.read, raw, place) | {"media_root": self.root}


def _reader(file: Path) -> str | None:
    """What reads a file, by the end of its name in any case; ``None`` if nothing does."""
    return _READERS.get(file.suffix.lower())


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    found = [file for folder in (path, path / "data") for file in sorted(folder.glob("*")) if _reader(file)]
    files = [file for file in found if re.match(rf"{re.escape(split)}(\W|_|$)", file.stem)]
    if not files:
        names = ", ".join(file.name for file in found[:10]) or "no parquet or JSON file"
        held_out = "name one file by --eval-data-path, or by --data-path, whose last rows are then held out"
        way_out = held_out if split == "test" else f"name one file, or if it is of another kind, {_CONVERT}"
        raise InvalidConfig(f"{path} has no file of the split {split!r}; it has {names}: {way_out}")
    return files


def _read_file(file: Path) -> Any:
    from datasets import load_dataset
    from pyarrow.parquet import read_metadata

    if _reader(file) == "json":
        return _json_rows(file)
    if _reader(file) is None:
        raise InvalidConfig(f"{file}: names of data files must end in {', '.join(_READERS)}: {_CONVERT}")
    try:
        count = read_metadata(file).num_rows if file.stat().st_size else 0
        with _quiet():
            rows = load_dataset("parquet", data_files=str(file), split="train") if count else []
    except Exception as error:  # datasets wraps the exceptions of its readers
        raise FileFormatError(f"{file} cannot be read as parquet: {error.__cause__ or error}") from error
    if not count:
        raise InvalidConfig(f"{file} has no rows")
    return rows


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps `datasets` from drawing bars and logging errors beside the one line that an error of ours has."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    with contextlib.ExitStack() as restored:
        restored.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(logging.CRITICAL)
        if not are_progress_bars_disabled():
            restored.callback(enable_progress_bars)
            disable_progress_bars()
        yield


def _json_rows(file: Path | str) -> JsonRows:
    """The rows of a file, which is downloaded and unpacked first if it is an address. Raises `InvalidConfig` without rows."""
    if isinstance(file, Path):
        rows = JsonRows(file)
    else:
        from datasets import DownloadManager

        rows = JsonRows(Path(DownloadManager().download_and_extract(file)), file)
    if not len(rows):
        raise InvalidConfig(f"{file} has no rows")
    return rows


@contextlib.contextmanager
def _of_hub(name: str) -> Iterator[Any]:
    """The builder of a data set on the hub; what goes wrong there, such as a network, name or split, is an `InvalidConfig`."""
    from datasets import load_dataset_builder

    if not _HUB_NAME.fullmatch(name) or _reader(Path(name)):
        hint = ": a path has no split after @, leave it out" if "@" in name else ""
        raise InvalidConfig(f"{name}: no such file or folder{hint}")
    try:
        yield load_dataset_builder(name)
    except DataProtoError:
        raise
    except Exception as error:
        raise InvalidConfig(f"{name} is not a file or folder, and could not be loaded from the hub: {error}") from error


def _json_files(builder: Any, split: str) -> list[str]:
    """The addresses of a split's files if they are JSON; else none.

    The reader of `datasets` gives all values of a column one type: 5 becomes 5.0 where another row has 5.5, and a date of a text.
    """
    from datasets.packaged_modules.json.json import Json

    if not isinstance(builder, Json) or builder.config.field is not None:  # a field: rows within an object
        return []
    files = {str(name): found for name, found in builder.config.data_files.items()}
    if split not in files:
        raise InvalidConfig(f"{builder.repo_id or 'the data set'} has no split {split!r}; it has {', '.join(files)}")
    return [str(file) for file in files[split]]


def _download(name: str, split: str) -> list[Any]:
    """The tables of a data set on the hub."""
    with _of_hub(name) as builder:
        if files := _json_files(builder, split):
            return [_json_rows(file) for file in files]
        builder.download_and_prepare()
        return [builder.as_dataset(split=split)]
