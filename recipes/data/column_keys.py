"""How the rows of a data set are read: names of its columns where its schema is not known, and what to do at a bad row."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dataproto.errors import InvalidConfig, InvalidRow
from rollout.prompts.messages import MEDIA

OnBadRow = Literal["stop", "skip"]
"""Stop at an unusable row, or skip it and take the next good one."""

STREAM_HEAD = 1024
"""Rows of a stream among which a named column is sought."""

# For each option the name that the readers of rows know, and the columns of the known schemas that it replaces.
QUESTIONS = ("prompt", "messages", "problem", "conversations", "texts")
_PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_key": ("prompt", QUESTIONS),
    "messages_key": ("messages", QUESTIONS),
    "answer_key": ("answer", ("answer", "solution", "ground_truth", "completion", "response", "reward_model")),
} | {f"{kind}_key": (column, (column, kind)) for kind, column in MEDIA.items()}


@dataclass(frozen=True)
class ColumnKeys:
    """Which columns of a data set hold what; by default those of the known schemas.

    Attributes:
        prompt_key: column of the question: text, or messages
        messages_key: column of chat messages; a last turn of the assistant is the answer
        answer_key: column of the ground truth, or of the answer to learn
        image_key: column of an image or a list of images
        video_key: column of a video or a list of videos
        audio_key: column of a sound or a list of sounds

    >>> keys = ColumnKeys(prompt_key="question", answer_key="label")
    >>> keys.rename({"question": "2 + 2?", "label": "4", "answer": "see below", "level": 1}, place=0)
    {'level': 1, 'prompt': '2 + 2?', 'answer': '4'}
    """

    prompt_key: str | None = None
    messages_key: str | None = None
    answer_key: str | None = None
    image_key: str | None = None
    video_key: str | None = None
    audio_key: str | None = None

    def __post_init__(self) -> None:
        if self.prompt_key and self.messages_key:
            raise InvalidConfig("prompt_key and messages_key both name the question: give one of them")

    def given(self) -> dict[str, str]:
        """The columns that are named, by option."""
        return {option: key for option in _PLACES if (key := getattr(self, option)) is not None}

    def rename(self, raw: Mapping[str, Any], place: int) -> Mapping[str, Any]:
        """The row under the names that the readers know; a named column replaces those of the known schemas.

        Raises:
            InvalidRow: the row lacks the column of the question.
        """
        given = self.given()
        if not given:
            return raw
        question = self.prompt_key or self.messages_key
        if question and raw.get(question) is None:
            raise InvalidRow(place, why_lacking(raw, [question], f"no {question!r} among its columns {sorted(raw)}"))
        replaced = {*given.values(), *(name for option in given for name in _PLACES[option][1])}
        kept = {name: value for name, value in raw.items() if name not in replaced}
        return kept | {_PLACES[option][0]: raw.get(key) for option, key in given.items()}

    def read_of(self, known: Collection[str]) -> set[str]:
        """The columns that are read, of those that the readers of a schema know and those that are named.

        >>> sorted(ColumnKeys(answer_key="label").read_of(["problem", "answer", "solution"]))
        ['label', 'problem']
        """
        given = self.given()
        replaced = {name for option in given for name in _PLACES[option][1]}
        return {*known} - replaced | {*given.values()}

    def check(self, tables: Sequence[Any], source: str) -> None:
        """Checks that tables have the named columns; of JSON Lines, whose rows may differ, at least one row.

        Raises:
            InvalidConfig: a column is missing; names the option and the columns that are present.
        """
        if given := self.given():
            check_columns(given, tables, source)


KNOWN = ColumnKeys()
"""The columns of the known schemas."""
EvalPaths = str | tuple[str, ...] | None
"""What ``--eval-data-path`` gives: a held-out set, or several, each as PATH or NAME=PATH."""


def eval_sets(given: EvalPaths) -> dict[str, str]:
    """The paths of held-out sets by name: the one that is given, else of several that of the file; of one "".

    Raises:
        InvalidConfig: two sets have one name.

    >>> eval_sets(("new/easy.jsonl", "hard=b.jsonl")), eval_sets("a.jsonl")
    ({'easy': 'new/easy.jsonl', 'hard': 'b.jsonl'}, {'': 'a.jsonl'})
    """
    texts = (given,) if isinstance(given, str) else given or ()
    found: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).stem if len(texts) > 1 else "", text
        if name in found:
            raise InvalidConfig(f"eval_data_path: {found[name]} and {path} are both {name!r}: write NAME=PATH")
        found[name] = path
    return found


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Where rows come from, which of them are held out, and how they are read.

    Attributes:
        min_pixels: pixels to which smaller images are enlarged; default: as the checkpoint says
        max_pixels: pixels to which larger images are shrunk; default: as the checkpoint says
        template_arguments: arguments of the chat template, in training and evaluation, such as enable_thinking false
        on_bad_row: what to do at an unusable row: stop, or skip it and take the next good one
    """

    data_path: str | tuple[str, ...] | None = None
    eval_data_path: EvalPaths = None
    batch_size: int = 64
    eval_rows: int = 256
    max_response_length: int = 128
    min_pixels: int | None = None
    max_pixels: int | None = None
    template_arguments: dict[str, int | float | bool | str] = field(default_factory=dict)
    on_bad_row: OnBadRow = "stop"
    num_workers: int = 0

    def __post_init__(self) -> None:
        eval_sets(self.eval_data_path)  # raises for two sets of one name


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(RowOptions):
    """Those of rows with columns of any names.

    Attributes:
        media_root: folder at which relative paths of images and videos start; default: that of the file
    """

    media_root: str | None = None
    keys: ColumnKeys = field(default_factory=ColumnKeys)


def refuse_without_data(data: Any, rows: str, *names: str) -> None:
    """Raises `InvalidConfig` for an option of a data set, one of ``names`` or of its ``keys``, where no data set is named.

    Args:
        rows: what takes the place of the data set's rows.
    """
    given = [*data.keys.given(), *(name for name in names if getattr(data, name))]
    if given and not data.data_path and ("eval_data_path" in names or not data.eval_data_path):
        raise InvalidConfig(
            f"{given[0]} without data_path: synthetic {rows} have columns and held-out rows of their own"
        )


def check_columns(wanted: Mapping[str, str], tables: Sequence[Any], source: str) -> None:
    """Raises `InvalidConfig` if no row of a table has a column; names its option, of which they are the values.

    >>> check_columns({"image_key": "c"}, [[{"a": 1}, {"b": 2}]], "pets")
    Traceback (most recent call last):
    dataproto.errors.InvalidConfig: --image-key c: pets has no such column; it has a, b
    """
    for table in tables:
        present = dict[str, None]()
        for columns in columns_of(table):
            present |= dict.fromkeys(columns)
            if {*wanted.values()} <= present.keys():
                break
        for option, column in wanted.items():
            if column not in present:
                named = f"--{option.replace('_', '-')} {column}"
                raise InvalidConfig(f"{named}: {source} has no such column; it has {', '.join(present)}")


def why_lacking(raw: Mapping[str, Any], names: Sequence[str], otherwise: str) -> str:
    """Why a row has no usable value in any of the columns: what the first one holds, or ``otherwise`` if it has none of them.

    >>> why_lacking({"problem": None}, ["prompt", "problem"], "no question"), why_lacking({}, ["prompt"], "no question")
    ("'problem' holds nothing, but must be text or messages", 'no question')
    """
    found = next((name for name in names if name in raw), None)
    if found is None:
        return otherwise
    return f"{found!r} holds {'nothing' if raw[found] is None else repr(raw[found])}, but must be text or messages"


def columns_of(table: Any) -> Iterator[Sequence[str]]:
    """The columns of a table, or of each of its rows; of a stream, of each of its first rows."""
    names = getattr(table, "column_names", None)
    if names is not None:
        yield names
    elif not hasattr(table, "__len__"):
        yield from (list(row) for row in islice(table, STREAM_HEAD) if isinstance(row, Mapping))
    else:
        for place in range(len(table)):
            with suppress(InvalidRow):  # the loader reports it, or skips it
                yield list(table[place])
