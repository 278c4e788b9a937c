"""Decoding ahead, ``--rollout.staleness N``: what is not finished waits, and samples of later groups begin while others learn.

With N = 0 a step learns from samples of its own prompts and of its own weights. Its groups come in parts, in the order in which
they are whole, and engines with devices of their own decode the next part while one is scored and learned from.

With N of 1 or more a step takes the first groups that are whole. The samples of the others keep their tokens, log-probs, streams
and environments, and continue with the weights of the next step; engines with devices of their own decode the next step's groups
during the update. The column ``weight_version`` has the number of the weights that sampled each token. No group is learned from
more than N updates after it has begun. What has begun is part of a checkpoint.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto, object_array
from dataproto.errors import DataProtoError, InvalidRow, RowCountMismatch
from dataproto.packing import equally_wide
from recipes.configs.shared.rollout_options import AT_A_TIME
from recipes.run.look_ahead import LookAhead
from recipes.run.loop import Loader
from recipes.run.metrics import Measure, measure_rollouts
from recipes.run.phases import StepState
from rollout.continuation import BEGUN
from rollout.engine import SamplingParams
from rollout.environments.held_episodes import Plan
from rollout.responses import OCCURRENCE, number_occurrences
from workers import Roles
from workers.roles.carried_groups import DEALT, FAILED, FINISHED, GROUPS, engine_error
from workers.roles.rollout_worker import RolloutWorker

__all__ = ["OWNER", "CarriedSamples", "CarryingRollout", "carry_samples", "staleness"]

OWNER = "_owner"
"""The column of prompts with the number of the run's batch that they belong to: their samples may be carried over. Prompts
without it, such as those of an evaluation, are decoded to their end at once."""

PARTS = 4
"""Parts in which the groups of a step come while nothing may be older than the weights that learn from it."""


@dataclass
class CarriedSamples:
    """The samples that a run has not learned from: they wait, have begun, or have finished before their group."""

    unfinished: DataProto | None = None
    """A row for each sample: its prompt's columns, `OCCURRENCE`, `BEGUN` and `DEALT`."""
    finished: DataProto | None = None  # rollout rows, with `OCCURRENCE`
    since: dict[str, int] = field(default_factory=dict)
    """The number of the weights that each group began with, 0 for one that waits, by uid in the order of the data."""
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of the rows being decoded

    def add(self, prompts: DataProto, n: int) -> None:
        """Adds ``n`` samples of each prompt, which wait.

        Raises:
            InvalidRow: a prompt has the uid of another group.
        """
        names = [str(uid) for uid in prompts["uid"]]
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
        names = list(zip(found["uid"], found[OCCURRENCE], strict=True))
        # the first row of each sample; an episode may have several
        first = {name: row for row, name in reversed(list(enumerate(names)))}
        asked = self.unfinished[self.places]
        told = found[[first[name] for name in zip(asked["uid"], asked[OCCURRENCE], strict=True)]]
        errors = [
            engine_error(failed, self._name_of(place))
            for place, failed in zip(self.places, told[FAILED], strict=True)
            if failed is not None
        ]
        for name in (BEGUN, DEALT):
            column = self.unfinished[name].copy()
            column[self.places] = told[name]
            self.unfinished[name] = column
        rows = found[np.flatnonzero(found[FINISHED].numpy())]
        rows.pop([FINISHED], [BEGUN, DEALT, FAILED])
        rows.meta_info.pop(GROUPS, None)
        if len(rows):
            self.finished = rows if self.finished is None else DataProto.concat([self.finished, rows])
        left = np.setdiff1d(np.arange(len(self.unfinished)), self.places[told[FINISHED].numpy()])
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
        rows = {"unfinished": self.unfinished, "finished": self.finished}
        files = {name: None if each is None else _file_bytes(each) for name, each in rows.items()}
        return {**files, "since": dict(self.since)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        files = state["unfinished"], state["finished"]
        self.unfinished, self.finished = (None if each is None else _from_file_bytes(each) for each in files)
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


@dataclass(eq=False, repr=False)
class CarryingRollout:
    """A rollout group whose rows, for prompts of the run (`OWNER`), are the first groups that are whole: also of other prompts.

    Other prompts it passes on. It is the loader of its run, too: its saved position includes the samples. Nothing is decoded
    before the first call.

    Attributes:
        bound: the largest number of updates between the weights that a group began with and those that learn from it.
        updates: the number of updates so far.
        goes_on: whether another step follows the current one.
        apart: whether the engines can decode during an update.
        corrected: whether the algorithm itself corrects for weights that sampled earlier; else ``old_log_probs`` are those of
            the engine, so that the ratio in the loss corrects.
    """

    group: Any
    loader: LookAhead
    bound: int
    updates: Callable[[], int]
    goes_on: Callable[[], bool] = lambda: True
    apart: bool = False
    corrected: bool = False
    samples: CarriedSamples = field(default_factory=CarriedSamples, init=False)
    _future: Any = field(default=None, init=False)  # of the samples that are being decoded
    _batches: int = field(default=0, init=False)  # that were given to steps
    _known: set[str] = field(default_factory=set, init=False)  # prompts whose step has not ended; see `owned_names`
    _error: DataProtoError | None = field(default=None, init=False)  # the next step raises it

    # The rollout role

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """As many whole groups as there are prompts; see `workers.RolloutWorker.generate`.

        If the engine refuses or fails at a sample, the call raises its error, which names the uid and the sample. What has begun
        is kept: the same call again, or that of a later step, continues with it.
        """
        if OWNER not in prompts:
            return self.group.generate(prompts, sampling)
        return next(self.in_parts(prompts, sampling, parts=1))

    def episodes(self, prompts: DataProto, plan: Plan, sampling: SamplingParams) -> DataProto:
        """As many whole groups of episodes as there are prompts; see `workers.RolloutWorker.episodes`."""
        if OWNER not in prompts:
            return self.group.episodes(prompts, plan, sampling)
        return next(self.in_parts(prompts, sampling, plan, parts=1))

    play, run = RolloutWorker.play, RolloutWorker.run  # which make the plan of `episodes`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def in_parts(
        self, prompts: DataProto, sampling: SamplingParams, plan: Plan | None = None, parts: int = PARTS
    ) -> Iterator[DataProto]:
        """As `generate`, or `play` with a ``plan``, in parts. The next one is decoded while one is used."""
        left, names = len(prompts), set(owned_names(prompts))
        self._collect()  # its error is raised below, when these prompts have been added
        self._add(prompts, sampling.n)
        sizes = [len(part) for part in np.array_split(np.arange(left), min(parts, left))]
        for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
            self._collect_or_raise()
            self._decode(left, size, 0, sampling, plan)
            self._collect_or_raise()
            data = self.samples.take(size)
            left -= size
            self._known -= names.intersection(owned_names(data)) if left else names
            data.pop(non_tensor_batch_keys=[OWNER])
            if left:
                self._decode(left, following, 0, sampling, plan)
            elif self.bound and self.apart and self.goes_on():  # those of the next step, which learns one update later
                batch = len(self.loader.peek())
                self._decode(batch, batch, 1, sampling, plan)
            if self.bound and not self.corrected:
                data["old_log_probs"] = data["rollout_log_probs"]
            yield data

    def _decode(self, batch: int, wanted: int, age: int, sampling: SamplingParams, plan: Plan | None) -> None:
        """Starts to decode until ``wanted`` of the ``batch`` groups of a step are whole, if they are not.

        That step learns from them ``age`` updates after the engine's weights. Further groups begin too if the step after it may
        still learn from them; those that it may not learn from are waited for now.
        """
        version = self.updates() + 1
        at_a_time = ceil(AT_A_TIME * batch) if age < self.bound and self.goes_on() else batch
        number = 0
        while len(self.samples.since) < at_a_time:  # with samples of the next batches
            self._add(owned(self.loader.peek(number), self._batches + number), sampling.n)
            number += 1
        due = self.samples.due(version + age - self.bound, batch - wanted)
        wanted -= len(self.samples.whole)
        if wanted > 0 or due:
            samples = self.samples.begin(at_a_time, version)
            self._future = self.group.submit("advance", samples, sampling, max(wanted, 0), version, tuple(due), plan)

    def _add(self, prompts: DataProto, n: int) -> None:
        """Adds samples of those prompts that have not been added before, for an earlier step or by the same call."""
        names = owned_names(prompts)
        new = np.flatnonzero([name not in self._known for name in names])
        if len(new):
            self.samples.add(prompts[new], n)
        self._known.update(names)

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
        prompts, number = next(self.loader), self._batches
        self._batches += 1
        return owned(prompts, number)

    def state_dict(self) -> dict[str, Any]:
        """The loader's position and all samples; waits for those that are being decoded."""
        self._collect()
        return {
            "loader": self.loader.state_dict(),
            "samples": self.samples.state_dict(),
            "batches": self._batches,
            "known": sorted(self._known),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        future, self._future, self._error = self._future, None, None
        if future is not None:
            with suppress(DataProtoError):  # what becomes of the samples that it replaces is of no use
                future.result()
        self.loader.load_state_dict(state["loader"])
        self.samples.load_state_dict(state["samples"])
        self._batches, self._known = int(state["batches"]), set(state["known"])


def owned(prompts: DataProto, batch: int) -> DataProto:
    """The prompts with the column `OWNER`."""
    prompts = prompts[:]
    prompts[OWNER] = np.full(len(prompts), batch)
    return prompts


def owned_names(prompts: DataProto) -> list[str]:
    """The names of prompts, and of their batch."""
    return [f"{batch} {uid}" for batch, uid in zip(prompts[OWNER], prompts["uid"], strict=True)]


def carry_samples(
    roles: Roles,
    loader: LookAhead,
    bound: int | None,
    state: StepState,
    steps: int,
    apart: bool = False,
    corrected: bool = False,
) -> tuple[Loader, Measure]:
    """Replaces the rollout group by a `CarryingRollout`, if there is something to carry, for a run of ``steps``.

    `recipes.run.episode_roles.with_episodes` takes the roles after this.

    Args:
        bound: `RolloutOptions.staleness`. With 0 and engines that are not ``apart`` nothing can be decoded while the model
            learns, so the step is the plain one.
        apart, corrected: see `CarryingRollout`.

    Returns:
        The loader of the run, and its measure, which adds ``training/staleness/{mean,max}`` (updates between the weights that
        sampled a token and those that learn from it) and ``training/carried_groups`` (that have begun and continue).
    """
    if bound is None or not (bound or apart):
        return loader, measure_rollouts
    goes_on: Callable[[], bool] = lambda: state.steps + 1 < steps  # noqa: E731
    rollout = CarryingRollout(roles.rollout, loader, bound, lambda: state.steps, goes_on, apart, corrected)
    roles.rollout = rollout
    where = "engines with devices of their own" if apart else "engines that share the models' devices"
    corrects = "" if not bound else "; the correction weighs it" if corrected else "; the ratio in the loss weighs it"
    print(f"decoding ahead, {where}: sampled tokens are at most {bound} updates old{corrects}")

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
