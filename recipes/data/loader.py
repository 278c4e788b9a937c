"""Batches of prompts from rows: shuffled and endless for training, in order for evaluation.

Where a run stands is (seed, how many rows were drawn), so a resumed run draws on exactly, in the middle of an epoch as
well, with whatever number of workers.
"""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from dataproto import DataProto
from dataproto.errors import CheckpointError, DataProtoError, InvalidConfig, InvalidRow
from rollout.prompts import Prompt, PromptBuilder, row_digest, row_number

OnBadRow = Literal["stop", "skip"]
Occurrence = tuple[int, int]  # epoch, place among the rows
Draw = tuple[
    str, int, Any
]  # name of the occurrence, place, and for rows that have no places to be looked up at the raw row, else None


def occurrences(rows: int, seed: int, shuffle: bool = True, start: int = 0) -> Iterator[Occurrence]:
    """Epoch after epoch without end, each in an order of its own, from the ``start``-th draw on.

    >>> from itertools import islice
    >>> list(islice(occurrences(2, seed=0, shuffle=False), 5))
    [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    """
    first, skipped = divmod(start, rows)
    for epoch in count(first):
        order = np.random.default_rng([seed, epoch]).permutation(rows) if shuffle else np.arange(rows)
        for place in order[skipped:].tolist():
            yield epoch, place
        skipped = 0


def draws(rows: Any, seed: int, shuffle: bool = True, start: int = 0) -> Iterator[Draw]:
    """What is shown when: the rows' own order if they have one (``rows.draws``), else `occurrences`, called
    ``"<epoch>-<place>"``.
    """
    if hasattr(rows, "draws"):
        yield from rows.draws(seed, shuffle, start)
    else:
        for epoch, place in occurrences(len(rows), seed, shuffle, start):
            yield f"{epoch}-{place}", place, None


class PromptLoader:
    """An endless iterator of prompt batches, every one with ``batch_size`` rows.

    The ``uid`` of a row is ``"<epoch>-<place>-<digest of the row>"``, so that of two loaders only equal rows share one. A row
    that cannot be used (see `PromptBuilder.prepare`) stops the run with `InvalidRow`, or with ``on_bad_row="skip"`` is noted in
    ``skipped`` and replaced by the next good one.
    """

    def __init__(
        self,
        rows: Any,
        builder: PromptBuilder,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        on_bad_row: OnBadRow = "stop",
        num_workers: int = 0,
    ) -> None:
        """``rows``: anything with a length and integer indices, of rows as ``builder`` takes them; or a
        `recipes.data.tables.StreamRows`, or a `recipes.data.mixture.Mixture`.

        Args:
            num_workers: processes that decode and process images ahead; 0 does it when a batch is asked for.
        """
        _check(rows, batch_size, on_bad_row)
        if num_workers < 0:
            raise InvalidConfig(f"num_workers={num_workers}: must be at least 0")
        self.rows = rows
        self.builder = builder
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.on_bad_row = on_bad_row
        self.num_workers = num_workers
        self.drawn = 0
        self.skipped: dict[int, str] = {}
        """Rows that could not be used so far: index to reason."""
        self._stream: Iterator[Any] | None = None

    @property
    def epoch(self) -> int:
        """Full passes over the rows so far."""
        return self.drawn // len(self.rows)

    def __iter__(self) -> "PromptLoader":
        return self

    def __next__(self) -> DataProto:
        if self._stream is None:
            self._stream = self._start()
        prompts: list[Prompt] = []
        drawn = self.drawn
        while len(prompts) < self.batch_size:
            prepared = _unpack(next(self._stream))
            drawn += 1
            if isinstance(prepared, Prompt):
                prompts.append(prepared)
            else:
                _reject(prepared, self.on_bad_row, self.skipped, _count(self.rows))
        self.drawn = drawn
        return self.builder.collate(prompts)

    def _start(self) -> Iterator[Any]:
        workers: dict[str, Any] = {}
        if self.num_workers:
            workers["prefetch_factor"] = max(2, -(-self.batch_size // self.num_workers))
        loader = DataLoader(
            _Prepared(self.rows, self.builder),
            batch_size=None,
            sampler=_Draws(self.rows, self.seed, self.shuffle, self.drawn),
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            generator=torch.Generator(),  # or it would draw from the global one
            **workers,
        )
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in plain values that JSON holds."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": _count(self.rows),
            "drawn": self.drawn,
            "skipped": [[index, reason] for index, reason in self.skipped.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the batches that follow are those of the uninterrupted run. Raises `CheckpointError` if the
        state is of other data or another order.
        """
        own = self.state_dict()
        for name in ("seed", "shuffle", "rows"):
            if state.get(name) != own[name]:
                raise CheckpointError(
                    f"the data position was saved with {name}={state.get(name)}, but this run has {own[name]}"
                )
        self.drawn = int(state["drawn"])
        self.skipped = {int(index): str(reason) for index, reason in state["skipped"]}
        self._stream = None


@dataclass
class EvaluationLoader:
    """Every row once, in order; the last batch holds what is left. ``uid`` is ``"val-<place>-<digest of the row>"``.

    It can be iterated again. With ``on_bad_row="skip"``, rows that cannot be used are missing, and noted in ``skipped``.
    """

    rows: Any
    builder: PromptBuilder
    batch_size: int
    on_bad_row: OnBadRow = "stop"
    skipped: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self.rows, self.batch_size, self.on_bad_row)

    def __iter__(self) -> Iterator[DataProto]:
        prepared = _Prepared(self.rows, self.builder)
        prompts: list[Prompt] = []
        for place in range(len(self.rows)):
            one = prepared.prepare(f"val-{place}", place)
            if isinstance(one, Prompt):
                prompts.append(one)
            else:
                _reject(one, self.on_bad_row, self.skipped, len(self.rows))
            if len(prompts) == self.batch_size:
                yield self.builder.collate(prompts)
                prompts = []
        if prompts:
            yield self.builder.collate(prompts)


def drop_overlong(rows: Any, builder: PromptBuilder) -> "tuple[Subset[Any], list[int]]":
    """The rows whose prompts fit ``builder.max_prompt_length``, and the places of those that do not.

    Image tokens are counted from the images' headers; no pixel is decoded. Rows that cannot be measured stay, for the
    loader to stop at or skip.
    """
    kept: list[int] = []
    dropped: list[int] = []
    for place in range(len(rows)):
        try:
            fits = builder.prompt_length(rows[place]) <= builder.max_prompt_length
        except DataProtoError:
            fits = True
        (kept if fits else dropped).append(place)
    if not kept:
        raise InvalidConfig(f"all {len(rows)} prompts are longer than max_prompt_length={builder.max_prompt_length}")
    return Subset(rows, kept), dropped


@dataclass(frozen=True)
class _BadRow:
    index: int
    reason: str


class _Prepared(Dataset[Any]):
    """Rows made ready; one that cannot be used becomes a `_BadRow`."""

    def __init__(self, rows: Any, builder: PromptBuilder) -> None:
        self.rows = rows
        self.builder = builder

    def __getitem__(self, draw: Draw) -> Any:
        prepared = self.prepare(*draw)
        # Bytes, because tensors would each hold a file descriptor on their way here.
        return prepared if get_worker_info() is None else pickle.dumps(prepared, protocol=5)

    def prepare(self, occurrence: str, place: int, raw: Any = None) -> Prompt | _BadRow:
        index = place
        try:
            row = self.rows[place] if raw is None else self.rows.read_row(raw, place)
            index = row_number(row, place)
            named = row["index"] if isinstance(row.get("index"), str) else index
            prompt = self.builder.prepare({**row, "index": named})
            return replace(prompt, columns={**prompt.columns, "uid": f"{occurrence}-{row_digest(prompt)}"})
        except InvalidRow as error:
            return _BadRow(error.index, error.reason)
        except DataProtoError as error:
            return _BadRow(index, str(error))


@dataclass(frozen=True)
class _Draws:
    rows: Any
    seed: int
    shuffle: bool
    start: int

    def __iter__(self) -> Iterator[Draw]:
        return draws(self.rows, self.seed, self.shuffle, self.start)


def _count(rows: Any) -> int | None:
    """How many rows there are, if that is known."""
    return len(rows) if hasattr(rows, "__len__") else None


def _as_it_is(prepared: Any) -> Any:
    return prepared


def _unpack(prepared: Any) -> Any:
    return pickle.loads(prepared) if isinstance(prepared, bytes) else prepared


def _check(rows: Any, batch_size: int, on_bad_row: str) -> None:
    if _count(rows) == 0:
        raise InvalidConfig("there are no rows to load")
    if batch_size < 1:
        raise InvalidConfig(f"batch_size={batch_size}: must be at least 1")
    if on_bad_row not in ("stop", "skip"):
        raise InvalidConfig(f"on_bad_row={on_bad_row!r}: must be 'stop' or 'skip'")


def _reject(bad: _BadRow, on_bad_row: OnBadRow, skipped: dict[int, str], rows: int | None) -> None:
    if on_bad_row == "stop":
        raise InvalidRow(bad.index, bad.reason)
    skipped[bad.index] = bad.reason
    if len(skipped) == rows:
        raise InvalidRow(bad.index, f"{bad.reason}; so none of the {rows} rows can be used")
