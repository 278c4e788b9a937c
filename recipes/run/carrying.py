"""Samples that continue after their step: more groups are decoded than a step learns from, or they are decoded during its update.

A step takes the first groups that are whole. The samples of the others keep their tokens, log-probs, streams and environments,
and continue with the weights of the next step. The column ``weight_version`` has the number of the weights that sampled each
token. No group is learned from later than a given number of updates after it has begun. What has begun is part of a checkpoint.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto, object_array
from dataproto.errors import DataProtoError, InvalidConfig, InvalidRow, RowCountMismatch
from dataproto.packing import equally_wide
from recipes.configs.shared.rollout_options import RolloutOptions
from recipes.run.environment_roles import PlayingRollout
from recipes.run.loop import Loader
from recipes.run.metrics import Measure, measure_rollouts
from recipes.run.phases import StepState
from rollout.continuation import BEGUN
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, MakeEnvironment
from rollout.environments.episode_loop import EpisodePlan
from rollout.responses import OCCURRENCE, number_occurrences
from workers import Roles
from workers.roles.carried_groups import DEALT, FAILED, FINISHED, GROUPS, engine_error

__all__ = ["CarriedSamples", "CarryingRollout", "LookAhead", "carry_samples", "staleness"]

DELAY_S = 1.0
"""Seconds that a thread waits before it prepares the next batch, unless that is asked for: the step first sends its own batch."""

CLOSING_S = 60.0
"""Seconds that `LookAhead.close` waits for a batch that is being prepared."""


class BackgroundBatch:
    """A batch that a thread prepares."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.batch = loader, Future[DataProto]()
        self._begins, self._dropped = Event(), False
        self._thread = Thread(target=self._prepare, name="next batch", daemon=True)
        self._thread.start()

    def result(self) -> DataProto:
        """The batch, or what the loader raised, as soon as it is there."""
        self._begins.set()
        return self.batch.result()

    def drop(self) -> None:
        """Ends the thread: without the batch if it has not begun."""
        self._dropped = True
        self._begins.set()
        self._thread.join(CLOSING_S)

    def _prepare(self) -> None:
        self._begins.wait(DELAY_S)
        if self._dropped:
            return
        try:
            self.batch.set_result(next(self.loader))
        except BaseException as error:  # for the caller of `result`
            self.batch.set_exception(error)


class LookAhead:
    """A loader that can show its next batch early. Its saved position counts only the batches that it has returned."""

    def __init__(self, loader: Loader, background: bool = False) -> None:
        """``background``: a thread prepares the next batch while the caller uses one; `close` ends it."""
        self.loader, self.background = loader, background
        self.current: DataProto | None = None
        self._next: DataProto | None = None
        self._preparing: BackgroundBatch | None = None
        self._note_position()

    @property
    def skipped(self) -> dict[int, str]:
        """Rows that could not be used, up to the batch that was returned last: index to reason."""
        return self._skipped

    def peek(self) -> DataProto:
        """The next batch, which the next call of ``next`` returns."""
        if self._next is None:
            self._next = next(self.loader) if self._preparing is None else self._prepared(self._preparing)
        return self._next

    def _prepared(self, preparing: BackgroundBatch) -> DataProto:
        with suppress(Exception):  # an interrupt leaves the thread at work
            preparing.result()
        self._preparing = None
        return preparing.result()

    def __next__(self) -> DataProto:
        self.current, self._next = self.peek(), None
        self._note_position()
        if self.background:
            self._preparing = BackgroundBatch(self.loader)
        return self.current

    def _note_position(self) -> None:
        self._position, self._skipped = self.loader.state_dict(), dict(self.loader.skipped)

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self.loader.load_state_dict(state)
        self.current = self._next = None
        self._note_position()

    def close(self) -> None:
        """Ends the thread. A batch that it has prepared is lost, so `load_state_dict` comes next, if anything."""
        if self._preparing is not None:
            self._preparing.drop()
            self._preparing = None


@dataclass
class CarriedSamples:
    """The samples that a run has not learned from: they wait, have begun, or have finished before their group."""

    unfinished: DataProto | None = (
        None  # a row for each sample: its prompt's columns, `OCCURRENCE`, `BEGUN` and `DEALT`
    )
    finished: DataProto | None = None  # rollout rows, with `OCCURRENCE`
    since: dict[str, int] = field(default_factory=dict)
    """The number of the weights that each group began with, 0 for one that waits, by uid in the order of the data."""
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of the rows being decoded

    def add(self, prompts: DataProto, n: int) -> None:
        """Adds ``n`` samples of each prompt, which wait.

        Raises:
            InvalidRow: a prompt has the uid of another group.
        """
        names = uids(prompts)
        for row, uid in enumerate(names):
            if uid in self.since or uid in names[:row]:
                raise InvalidRow(
                    row,
                    f"uid {uid} is that of another prompt, whose samples continue: each prompt needs a uid of its own",
                )
        samples = number_occurrences(prompts.repeat(n, interleave=True))
        samples[BEGUN] = object_array([[] for _ in range(len(samples))])
        samples[DEALT] = np.full(len(samples), -1)
        self.unfinished = samples if self.unfinished is None else _joined([self.unfinished, samples])
        self.since |= dict.fromkeys(names, 0)

    @property
    def whole(self) -> list[str]:
        """The uids of the groups whose samples have all finished, oldest first."""
        unfinished = set() if self.unfinished is None else set(map(str, self.unfinished["uid"]))
        return [uid for uid in self.since if uid not in unfinished]

    def due(self, before: int, later: int = 0) -> list[str]:
        """The uids of unfinished groups that began with weights ``before`` or earlier ones, without the last ``later``."""
        whole = set(self.whole)
        unfinished = [uid for uid, since in self.since.items() if 0 < since <= before and uid not in whole]
        return unfinished[: max(len(unfinished) - later, 0)]

    def begin(self, groups: int, weight_version: int) -> DataProto:
        """The unfinished samples of the first ``groups`` groups, which are decoded from now on."""
        assert self.unfinished is not None
        chosen = list(self.since)[:groups]
        self.since |= {uid: self.since[uid] or weight_version for uid in chosen}
        self.places = np.flatnonzero(np.isin(self.unfinished["uid"].astype(str), chosen))
        return self.unfinished[self.places]

    def update(self, found: DataProto) -> DataProtoError | None:
        """Takes what became of the samples of `begin`. Returns the error of the engine, if it failed at one of them."""
        assert self.unfinished is not None
        done = found[FINISHED].numpy()
        occurrences = self.unfinished[OCCURRENCE][self.places]
        errors = [
            engine_error(found[FAILED][place], self._name_of(self.places[place]))
            for place in range(len(found))
            if found[FAILED][place] is not None
        ]
        for name in (BEGUN, DEALT):
            column = self.unfinished[name].copy()
            column[self.places] = found[name]
            self.unfinished[name] = column
        rows = found[np.flatnonzero(done)]
        rows.pop([FINISHED], [BEGUN, DEALT, FAILED])
        rows.meta_info.pop(GROUPS, None)
        rows[OCCURRENCE] = occurrences[done]
        if len(rows):
            self.finished = rows if self.finished is None else DataProto.concat([self.finished, rows])
        left = np.setdiff1d(np.arange(len(self.unfinished)), self.places[done])
        self.unfinished = self.unfinished[left] if len(left) else None
        self.places = self.places[:0]
        return errors[0] if errors else None

    def _name_of(self, place: int) -> str:
        """An unfinished sample, for messages."""
        assert self.unfinished is not None
        row, number = f"uid {self.unfinished['uid'][place]}", int(self.unfinished[OCCURRENCE][place])
        if "index" in self.unfinished:
            row = f"row {self.unfinished['index'][place]} ({row})"
        return f"{row}, sample {number}"

    def take(self, groups: int) -> DataProto:
        """Removes the oldest whole groups and returns their rows, in order of groups and samples.

        Raises:
            RowCountMismatch: so many are not whole.
        """
        if len(self.whole) < groups or self.finished is None:
            raise RowCountMismatch(
                f"{len(self.whole)} groups are whole, but a step takes {groups}: a rollout worker has ended too early"
            )
        chosen = {uid: place for place, uid in enumerate(self.whole[:groups])}
        number = np.array([chosen.get(str(uid), -1) for uid in self.finished["uid"]])
        taken = np.flatnonzero(number >= 0)
        data = self.finished[taken[np.lexsort((self.finished[OCCURRENCE][taken], number[taken]))]]
        left = np.flatnonzero(number < 0)
        self.finished = self.finished[left] if len(left) else None
        self.since = {uid: since for uid, since in self.since.items() if uid not in chosen}
        data.pop(non_tensor_batch_keys=[OCCURRENCE])
        return data

    def state_dict(self) -> dict[str, Any]:
        return {
            "unfinished": None if self.unfinished is None else _file_bytes(self.unfinished),
            "finished": None if self.finished is None else _file_bytes(self.finished),
            "since": dict(self.since),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rows = {name: state[name] for name in ("unfinished", "finished")}
        self.unfinished, self.finished = (None if each is None else _from_file_bytes(each) for each in rows.values())
        self.since = dict(state["since"])


def _joined(parts: Sequence[DataProto]) -> DataProto:
    """Rows of prompts, padded to the widest. A mask of no response tokens tells where they end."""
    marked = [part[:] for part in parts]
    for part in marked:
        part["response_mask"] = torch.zeros(len(part), 0, dtype=torch.int64)
    joined = DataProto.concat(equally_wide(marked))
    joined.pop(["response_mask"])
    return joined


def _file_bytes(data: DataProto) -> Tensor:
    """The bytes ``(N,)`` uint8 of a batch's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        data.save_to_disk(path)
        return torch.from_numpy(np.fromfile(path, dtype=np.uint8))


def _from_file_bytes(content: Tensor) -> DataProto:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        content.numpy().tofile(path)
        return DataProto.load_from_disk(path).writable()


class CarryingRollout:
    """A rollout group whose rows, for the loader's prompts, are the first groups that are whole: also those of other prompts.

    Other prompts, such as those of an evaluation, it passes on. It is the loader of its run, too: its saved position includes the
    samples.
    """

    def __init__(
        self,
        group: Any,
        loader: LookAhead,
        config: RolloutOptions,
        updates: Callable[[], int],
        goes_on: Callable[[], bool] = lambda: True,
        corrected: bool = False,
    ) -> None:
        """Nothing is decoded before the first call.

        Args:
            updates: the number of updates so far.
            goes_on: whether another step follows the current one.
            corrected: whether the algorithm itself corrects for weights that sampled earlier; else ``old_log_probs`` are those
                of the engine, so that the ratio in the loss corrects.
        """
        self.group, self.loader, self.config = group, loader, config
        self.updates, self.goes_on, self.corrected = updates, goes_on, corrected
        self.samples = CarriedSamples()
        self._future: Any = None  # of the samples that are being decoded
        self._has_next = False  # whether the samples of the loader's next batch have been added
        self._added: list[str] | None = None  # the uids of a step that has begun; if it fails, it can be made again
        self._given = 0  # parts of that batch
        self._error: DataProtoError | None = None  # of the engine at a sample, which the next step raises

    # The rollout role

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """As many whole groups as there are prompts; see `workers.RolloutWorker.generate`.

        If the engine refuses or fails at a sample, the call raises its error, which names the uid and the sample. What has begun
        is kept: the same call again, or that of a later step, continues with it.
        """
        if not self._is_own(prompts):
            data: DataProto = self.group.generate(prompts, sampling)
            return data
        return self._groups(prompts, sampling, None)

    def play(
        self,
        prompts: DataProto,
        make_environment: MakeEnvironment,
        sampling: SamplingParams,
        turns: int,
        tokens: int | None = None,
        seconds: float = 60.0,
        last_pictures: int | None = None,
        memory_gib: float | None = None,
        wall_clock: float | None = None,
    ) -> DataProto:
        """As many whole groups of episodes as there are prompts; see `workers.RolloutWorker.play`."""
        limits = EpisodeLimits(turns, tokens, seconds, last_pictures, memory_gib, wall_clock)
        if not self._is_own(prompts):
            data: DataProto = self.group.play(prompts, make_environment, sampling, **vars(limits))
            return data
        return self._groups(prompts, sampling, EpisodePlan(make_environment, limits))

    def _is_own(self, prompts: DataProto) -> bool:
        """Whether these are the loader's prompts, or those of a step that is made again."""
        current = self.loader.current
        return uids(prompts) in ([] if current is None else uids(current), self._added)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def in_parts(
        self, prompts: DataProto, sampling: SamplingParams, plan: EpisodePlan | None = None
    ) -> Iterator[DataProto]:
        """As `generate`, or `play` with a ``plan``, in ``config.parts`` parts. The next one is decoded while one is used.

        If the call fails, it can be made again only while it has given no part; else it raises `InvalidConfig`.
        """
        return self._parts(prompts, sampling, plan, self.config.parts)

    def _groups(self, prompts: DataProto, sampling: SamplingParams, plan: EpisodePlan | None) -> DataProto:
        (data,) = self._parts(prompts, sampling, plan, 1)
        return data

    def _parts(
        self, prompts: DataProto, sampling: SamplingParams, plan: EpisodePlan | None, count: int
    ) -> Iterator[DataProto]:
        batch, updates, named = len(prompts), self.updates(), uids(prompts)
        at_a_time = ceil(self.config.over_ask * batch)
        if named == self._added and self._given:
            raise InvalidConfig(
                f"{self._given} of {count} parts of this step were given before it failed, and cannot be given again: resume "
                "from the last checkpoint, or leave out rollout.early_update"
            )
        self._collect()  # its error is raised below, when it is known that these prompts have been added
        if not self._has_next and named != self._added:  # else a call is made again
            self._fill(prompts, sampling.n)
        self._has_next, self._added, self._given = False, named, 0
        ends = [ceil(batch * part / count) for part in range(count + 1)]
        for part, (start, end) in enumerate(pairwise(ends), 1):
            self._collect_or_raise()
            self._decode(at_a_time - start, end - start, self._due(updates, batch - end), sampling, plan)
            self._collect_or_raise()
            data = self.samples.take(end - start)
            if self.config.carries and not self.corrected:
                data["old_log_probs"] = data["rollout_log_probs"]
            self._given = part
            if part == count:
                self._added = None
            if part < count:
                following = ends[part + 1]
                self._decode(at_a_time - end, following - end, self._due(updates, batch - following), sampling, plan)
            elif self.config.ahead and self.goes_on():
                self._fill(self.loader.peek(), sampling.n)
                self._has_next = True
                first = ceil(batch / self.config.parts)
                self._decode(at_a_time, first, self._due(updates + 1, batch - first), sampling, plan)
            yield data

    def _due(self, updates: int, later: int) -> list[str]:
        """The uids of groups that are waited for now: update number ``updates``, from 0, has room for ``later`` further ones."""
        return self.samples.due(updates + 1 - self.config.staleness, later)

    def _fill(self, prompts: DataProto, n: int) -> None:
        """Adds samples of a batch and, in the first step, of those that are decoded beyond it."""
        self.samples.add(prompts, n)
        while len(self.samples.since) < ceil(self.config.over_ask * len(prompts)):
            self.samples.add(next(self.loader), n)

    def _decode(
        self, at_a_time: int, wanted: int, due: Sequence[str], sampling: SamplingParams, plan: EpisodePlan | None
    ) -> None:
        """Starts to decode until ``wanted`` groups, and those that are ``due``, are whole, if they are not.

        The first ``at_a_time`` groups are decoded together.
        """
        wanted -= len(self.samples.whole)
        if wanted > 0 or due:
            version = self.updates() + 1
            samples = self.samples.begin(at_a_time, version)
            self._future = self.group.submit("advance", samples, sampling, max(wanted, 0), version, tuple(due), plan)

    def _collect(self) -> None:
        if self._future is not None:
            future, self._future = self._future, None
            self._error = self.samples.update(future.result())

    def _collect_or_raise(self) -> None:
        self._collect()
        error, self._error = self._error, None
        if error is not None:
            raise error

    # The loader

    @property
    def skipped(self) -> dict[int, str]:
        """Rows that could not be used."""
        return self.loader.skipped

    def __next__(self) -> DataProto:
        return next(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """The loader's position and all samples; waits for those that are being decoded."""
        self._collect()
        return {
            "loader": self.loader.state_dict(),
            "samples": self.samples.state_dict(),
            "has_next": self._has_next,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        future, self._future, self._added, self._error = self._future, None, None, None
        if future is not None:
            with suppress(DataProtoError):  # what becomes of the samples that it replaces is of no use
                future.result()
        self.loader.load_state_dict(state["loader"])
        self.samples.load_state_dict(state["samples"])
        self._has_next = bool(state["has_next"])


def uids(prompts: DataProto) -> list[str]:
    """The names of prompts, which no other prompts of a run have."""
    return [str(uid) for uid in prompts["uid"]]


def carry_samples(
    roles: Roles, loader: LookAhead, config: RolloutOptions, state: StepState, steps: int, corrected: bool
) -> tuple[Loader, Measure]:
    """Replaces the rollout group by a `CarryingRollout`, if the options say so, for a run of ``steps``.

    The roles may be those of `recipes.run.environment_roles.with_environment`, or become so later.

    Returns:
        The loader of the run, and its measure, which adds ``training/staleness/{mean,max}`` (updates between the weights that
        sampled a token and those that learn from it) and ``training/carried_groups`` (that have begun and continue).
    """
    if config.in_order:
        return loader, measure_rollouts
    goes_on: Callable[[], bool] = lambda: state.steps + 1 < steps  # noqa: E731
    playing = roles.rollout if isinstance(roles.rollout, PlayingRollout) else None
    group = roles.rollout if playing is None else playing.rollout
    rollout = CarryingRollout(group, loader, config, lambda: state.steps, goes_on, corrected)
    roles.rollout = rollout if playing is None else replace(playing, rollout=rollout)

    def measure(data: DataProto, metrics: Mapping[str, float], devices: int) -> dict[str, float]:
        found = staleness(data, state.steps) | measure_rollouts(data, metrics, devices)
        carried = sum(since > 0 for since in rollout.samples.since.values())
        return {"training/carried_groups": carried} | found

    return rollout, measure


def staleness(data: DataProto, updates: int) -> dict[str, float]:
    """Updates between the weights that sampled a token and those that learned from it, in update number ``updates``.

    >>> import torch
    >>> rows = {"response_mask": torch.tensor([[1, 1, 0]]), "weight_version": torch.tensor([[1, 2, 0]])}
    >>> staleness(DataProto.from_dict(rows), updates=2)
    {'training/staleness/mean': 0.5, 'training/staleness/max': 1.0}
    """
    ages = updates - data["weight_version"][data["response_mask"] != 0].double()
    mean, most = (float(ages.mean()), float(ages.max())) if len(ages) else (0.0, 0.0)
    return {"training/staleness/mean": mean, "training/staleness/max": most}
