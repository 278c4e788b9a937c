"""Loaders that build batches of prompts from rows: endless and shuffled for training, in order for evaluation.

The position of a training loader is (seed, number of rows drawn). A resumed run therefore continues exactly, also within an
epoch and with another number of workers.
"""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from dataproto import DataProto
from dataproto.errors import CheckpointError, DataProtoError, InvalidConfig, InvalidRow, check_at_least
from recipes.data.column_keys import OnBadRow
from rollout.prompts import Prompt, PromptBuilder, row_digest, row_number
from rollout.prompts.prepared_rows import conversation_of, invalid_row

WAY_OUT = "(--on-bad-row skip leaves such rows out)"

COMPARED = 8
"""The number of rows, spread from the first to the last, whose texts tell a data set from another one of equal length."""

Draw = tuple[str, int, Any]
"""Name of the occurrence, place of the row, and the raw row if rows cannot be looked up by place, else None."""


def occurrences(rows: int, seed: int, shuffle: bool = True, start: int = 0) -> Iterator[tuple[int, int]]:
    """Epoch and place of each row, in endless epochs from draw ``start`` on, each in another order if ``shuffle``.

    >>> from itertools import islice
    >>> list(islice(occurrences(2, seed=0, shuffle=False), 5))
    [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    """
    first, skipped = divmod(start, rows)
    for epoch in count(first):
        order = np.random.default_rng([seed, epoch]).permutation(rows) if shuffle else np.arange(rows)
        for place in order[skipped:]:  # a list of a million numbers takes 32 MiB more
            yield epoch, int(place)
        skipped = 0


def draws(rows: Any, seed: int, shuffle: bool = True, start: int = 0) -> Iterator[Draw]:
    """The draws of ``rows`` from draw ``start`` on: ``rows.draws`` if it exists, else `occurrences` with names
    ``"<epoch>-<place>"``.
    """
    if hasattr(rows, "draws"):
        yield from rows.draws(seed, shuffle, start)
    else:
        for epoch, place in occurrences(len(rows), seed, shuffle, start):
            yield f"{epoch}-{place}", place, None


def read_draw(rows: Any, draw: Draw) -> Any:
    """The row of a draw, or the error that says why it cannot be read."""
    _, place, raw = draw
    try:
        return rows[place] if raw is None else rows.read_row(raw, place)
    except DataProtoError as error:
        return error


def may_recur(rows: Any) -> bool:
    """Whether a run may meet the images of ``rows`` again: rows that are drawn say so as ``rows.recurring``, others may."""
    return bool(getattr(rows, "recurring", True))


@dataclass(eq=False, repr=False)
class PromptLoader:
    """An endless iterator of batches of ``batch_size`` prompts.

    The ``uid`` of a row is ``"<epoch>-<place>-<digest of the row>"``, so that rows of two loaders have the same ``uid`` only if
    they are equal. For a row that cannot be used (see `PromptBuilder.prepare`) the loader raises `InvalidRow`, or, with
    ``on_bad_row="skip"``, records it in ``skipped`` and takes the next row. Processed images are kept if they `may_recur`.

    Attributes:
        rows: a sequence of rows that ``builder`` accepts, a `recipes.data.tables.StreamRows`, or a
            `recipes.data.mixture.Mixture`.
        builder: turns rows into prompts.
        batch_size: prompts of a batch.
        seed: seed of the order.
        shuffle: whether to shuffle each epoch.
        on_bad_row: ``stop`` or ``skip``.
        num_workers: processes that decode and process images ahead; 0 does it in threads when a batch is read.
        drawn: number of rows taken so far.
        skipped: the reason why a row could not be used, by index of the row.
    """

    rows: Any
    builder: PromptBuilder
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    on_bad_row: OnBadRow = "stop"
    num_workers: int = 0
    drawn: int = field(default=0, init=False)
    skipped: dict[int, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Raises `InvalidConfig` if there are no rows, or an argument is out of range."""
        _check(self)
        check_at_least(0, self, "num_workers")
        self._texts, self._from_start = _of_sources(self.rows, _texts_digest), True
        self._useful: dict[str, int] = {}
        """The last epoch in which a row of a source could be used, by the source's name."""
        self._stream: Iterator[Any] | None = None

    def steps(self, epochs: int) -> int:
        """The number of batches after which every row has been drawn at least ``epochs`` times.

        Raises:
            InvalidConfig: the rows have no length.
        """
        rows = _count(self.rows)
        if rows is None:
            raise InvalidConfig("epochs: a stream, or a mixture of data sets, has no length: give --steps")
        return -(-epochs * rows // self.batch_size)

    def __iter__(self) -> "PromptLoader":
        return self

    def __next__(self) -> DataProto:
        if self._stream is None:
            self._stream = self._start()
        prompts: list[Prompt] = []
        drawn = self.drawn
        while len(prompts) < self.batch_size:
            coming = [next(self._stream) for _ in range(self.batch_size - len(prompts))]
            found = [pickle.loads(each) for each in coming] if self.num_workers else self._prepared.in_threads(coming)
            for prepared in found:
                drawn += 1
                if isinstance(prepared, Prompt):
                    source, epoch = _source_and_epoch(prepared.columns["uid"])
                    self._useful[source] = epoch
                    prompts.append(prepared)
                else:
                    _reject(prepared, self.on_bad_row, self.skipped, _count(self.rows))
                    self._check_useful(prepared)
        self.drawn = drawn
        return self.builder.collate(prompts)

    def _check_useful(self, bad: "_BadRow") -> None:
        """Raises `InvalidRow` if no row of a whole epoch of a source could be used: skipping would have no end."""
        source, epoch = _source_and_epoch(f"{bad.occurrence}-")
        before = -1 if self._from_start else epoch  # a resumed loader has not seen the first part of its epoch
        if epoch > self._useful.setdefault(source, before) + 1:
            named = f" of data set {int(source) + 1}" if source.isdigit() else ""
            raise InvalidRow(bad.index, f"{bad.reason}; none of the rows{named} can be used")

    def _start(self) -> Iterator[Any]:
        """The draws from the present position on, or the prompts that processes prepare of them."""
        self._useful.clear()
        self._from_start = self.drawn == 0
        drawn = draws(self.rows, self.seed, self.shuffle, self.drawn)
        if not self.num_workers:
            return drawn
        loader = DataLoader(
            self._prepared,
            batch_size=None,
            sampler=drawn,
            num_workers=self.num_workers,
            prefetch_factor=max(2, -(-self.batch_size // self.num_workers)),
            generator=torch.Generator(),  # the default would draw from the global generator
        )
        return iter(loader)

    @property
    def _prepared(self) -> "_Prepared":
        return _Prepared(self.rows, self.builder if may_recur(self.rows) else self.builder.without_cache())

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, in values that JSON can represent."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": _of_sources(self.rows, _count),
            "texts": self._texts,
            "weights": getattr(self.rows, "weights", None),
            "drawn": self.drawn,
            "skipped": [[index, reason] for index, reason in self.skipped.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a position: the following batches equal those of the uninterrupted run.

        Raises:
            CheckpointError: the position belongs to other data or another order.
        """
        own = self.state_dict()
        for name in ("seed", "shuffle", "rows", "weights", "texts"):
            if state.get(name, own[name]) != own[name]:  # earlier versions did not compare texts
                raise CheckpointError(
                    f"the data position was saved with {name}={state.get(name)}, not {own[name]}: resume with seed and data of "
                    "the run, of which eval-rows and eval-data-path may hold out rows, or begin a new run from its weights"
                )
        self.drawn = int(state["drawn"])
        self.skipped = {int(index): str(reason) for index, reason in state["skipped"]}
        self._stream = None


@dataclass
class EvaluationLoader:
    """Batches of every row once, in order; the last batch may be smaller. ``uid`` is ``"val-<place>-<digest of the row>"``.

    It can be iterated repeatedly. With ``on_bad_row="skip"``, rows that cannot be used are left out and recorded in
    ``skipped``.
    """

    rows: Any
    builder: PromptBuilder
    batch_size: int
    on_bad_row: OnBadRow = "stop"
    skipped: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def __iter__(self) -> Iterator[DataProto]:
        prepared = _Prepared(self.rows, self.builder)
        prompts: list[Prompt] = []
        places = iter(range(len(self.rows)))
        while drawn := [(f"val-{place}", place, None) for place in islice(places, self.batch_size - len(prompts))]:
            for one in prepared.in_threads(drawn):
                if isinstance(one, Prompt):
                    prompts.append(one)
                else:
                    _reject(one, self.on_bad_row, self.skipped, len(self.rows))
            if len(prompts) == self.batch_size:
                yield self.builder.collate(prompts)
                prompts = []
        if prompts:
            yield self.builder.collate(prompts)


def drop_overlong(rows: Any, builder: PromptBuilder, on_bad_row: OnBadRow = "skip") -> "tuple[Subset[Any], list[int]]":
    """The rows whose prompts fit into ``builder.max_prompt_length`` tokens, and the places of the others.

    Image tokens are counted from the headers of the images, without decoding pixels. Rows whose length cannot be determined are
    kept with ``on_bad_row="skip"``, so that the loader skips them; how many they are is printed.

    Raises:
        InvalidConfig: no prompt fits.
        InvalidRow: with ``on_bad_row="stop"``, the length of a row cannot be determined; else, that of no row can. Names the
            first such row.
    """
    kept: list[int] = []
    dropped: list[int] = []
    first: InvalidRow | None = None
    unknown = 0
    for place in range(len(rows)):
        row, fits = dict[str, Any](), True
        try:
            row = rows[place]
            fits = builder.prompt_length(row) <= builder.max_prompt_length
        except DataProtoError as error:
            if on_bad_row == "stop":
                check_row(rows, place, builder)
            first = first or (error if isinstance(error, InvalidRow) else invalid_row(row, place, str(error)))
            unknown += 1
        (kept if fits else dropped).append(place)
    if first is not None:
        if unknown == len(rows):
            raise InvalidRow(first.index, f"{first.reason}; none of the {len(rows)} rows can be used")
        print(f"{unknown} of {len(rows)} rows cannot be used and are skipped; the first is {first}")
    if not kept:
        limit = f"{builder.limit_name}={builder.max_prompt_length}"
        raise InvalidConfig(f"all {len(rows)} {builder.counted}s are longer than {limit}")
    return Subset(rows, kept), dropped


def check_rows(loader: PromptLoader, draws: int | None = None) -> None:
    """Raises `InvalidRow` for the first row, of those that the next ``draws`` give or of all, that `check_row` refuses.

    Rows without a length, those of streams and mixtures, are not checked: they are read as they are drawn.
    """
    count = _count(loader.rows)
    if count is None:
        return
    places: Sequence[int] = range(count)
    if draws is not None and draws < count:
        coming = occurrences(count, loader.seed, loader.shuffle, loader.drawn)
        places = sorted({place for _, place in islice(coming, draws)})
    for place in places:
        check_row(loader.rows, place, loader.builder)


def check_row(rows: Any, place: int, builder: PromptBuilder) -> None:
    """Raises `InvalidRow` for a row that cannot be read, or whose prompt is too long, without decoding its images."""
    row: Mapping[str, Any] = {}
    try:
        row = rows[place]
        builder.check_length(builder.prompt_length(row))
    except DataProtoError as error:
        bad = error if isinstance(error, InvalidRow) else invalid_row(row, place, str(error))
        raise InvalidRow(bad.index, f"{bad.reason.removesuffix(f' {WAY_OUT}')} {WAY_OUT}") from error


@dataclass(frozen=True)
class _BadRow:
    occurrence: str
    index: int
    reason: str


class _Prepared(Dataset[bytes]):
    """Prepared prompts; a row that cannot be used becomes a `_BadRow`."""

    def __init__(self, rows: Any, builder: PromptBuilder) -> None:
        self.rows = rows
        self.builder = builder

    def __getitem__(self, draw: Draw) -> bytes:
        """For a process, which returns bytes because each tensor that it sends would use a file descriptor."""
        return pickle.dumps(self.prepare(draw, read_draw(self.rows, draw)), protocol=5)

    def in_threads(self, drawn: Sequence[Draw]) -> list[Prompt | _BadRow]:
        """The rows of a batch, which are read one after another: their source need not work in several threads."""
        return self.builder.in_threads(self.prepare, drawn, [read_draw(self.rows, draw) for draw in drawn])

    def prepare(self, draw: Draw, row: Mapping[str, Any] | DataProtoError) -> Prompt | _BadRow:
        occurrence, index, _ = draw
        try:
            if isinstance(row, DataProtoError):
                raise row
            index = row_number(row, index)
            named = row["index"] if isinstance(row.get("index"), str) else index
            prompt = self.builder.prepare({**row, "index": named})
            return replace(prompt, columns={**prompt.columns, "uid": f"{occurrence}-{row_digest(prompt)}"})
        except DataProtoError as error:
            given = row if isinstance(row, Mapping) else {}
            bad = error if isinstance(error, InvalidRow) else invalid_row(given, index, str(error))
            return _BadRow(occurrence, bad.index, bad.reason)


def _count(rows: Any) -> int | None:
    """The number of rows, or None if it is unknown."""
    return len(rows) if hasattr(rows, "__len__") else None


def _of_sources(rows: Any, measure: Callable[[Any], Any]) -> Any:
    """What is measured of rows, of a mixture that of its sources."""
    return [_of_sources(each, measure) for each in rows.sources] if hasattr(rows, "sources") else measure(rows)


def _texts_digest(rows: Any) -> str | None:
    """A digest of the conversations and answers of `COMPARED` rows. Media and their paths do not count, nor do rows that cannot
    be read. ``None`` for a stream.

    >>> _texts_digest([{"prompt": "2 + 2?"}]) == _texts_digest([{"prompt": "2 + 2?", "media_root": "/data"}])
    True
    >>> _texts_digest([{"prompt": "2 + 2?"}]) == _texts_digest([{"prompt": "2 + 3?"}])
    False
    """
    if (count := _count(rows)) is None:
        return None
    texts: list[Any] = []
    for place in np.linspace(0, count - 1, min(count, COMPARED)).astype(int).tolist():
        with suppress(DataProtoError):
            if isinstance(row := rows[place], Mapping):
                texts += [vars(replace(conversation_of(row), media=[])), row.get("reward_model"), row.get("answers")]

    def plain(value: Any) -> Any:
        """None for what has no text that is the same in each process."""
        return value.tolist() if isinstance(value, np.ndarray | np.integer | np.float32 | np.bool_) else None

    return blake2b(json.dumps(texts, default=plain, skipkeys=True).encode(), digest_size=8).hexdigest()


def _source_and_epoch(uid: str) -> tuple[str, int]:
    """The source of a row, empty if there is only one, and its epoch.

    >>> _source_and_epoch("1-0-17-5f"), _source_and_epoch("2-17-5f")
    (('1', 0), ('', 2))
    """
    *source, epoch, _, _ = uid.split("-")
    return "-".join(source), int(epoch)


def _check(loader: PromptLoader | EvaluationLoader) -> None:
    if _count(loader.rows) == 0:
        raise InvalidConfig("there are no rows to load")
    check_at_least(1, loader, "batch_size")
    if loader.on_bad_row not in ("stop", "skip"):
        raise InvalidConfig(f"on_bad_row={loader.on_bad_row!r}: must be 'stop' or 'skip'")


def _reject(bad: _BadRow, on_bad_row: OnBadRow, skipped: dict[int, str], rows: int | None) -> None:
    if on_bad_row == "stop":
        raise InvalidRow(bad.index, f"{bad.reason} {WAY_OUT}")
    skipped[bad.index] = bad.reason
    if len(skipped) == rows:
        raise InvalidRow(bad.index, f"{bad.reason}; none of the {rows} rows can be used")
