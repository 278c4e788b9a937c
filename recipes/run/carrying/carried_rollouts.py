"""Samples that go on after their step: more groups are decoded than a step learns from, or they are decoded during its update.

A step takes the first groups that are whole. The samples of the others keep their tokens, log-probs, streams and environments,
and go on with the weights of the next step. The column ``weight_version`` has the number of the weights that sampled each token.
No group is learned from later than a given number of updates after it has begun. What has begun is part of a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

from dataproto import DataProto
from dataproto.errors import DataProtoError, InvalidConfig
from recipes.configs.shared.carrying_config import CarryingConfig
from recipes.run.carrying.look_ahead import LookAhead
from recipes.run.carrying.unlearned_samples import CarriedSamples
from recipes.run.environment_roles import PlayingRollout
from recipes.run.loop import Loader
from recipes.run.metrics import Measure, measure_rollouts
from recipes.run.phases import StepState
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, MakeEnvironment
from rollout.environments.episodes.held_episodes import EpisodePlan
from workers import Roles


class CarryingRollout:
    """A rollout group whose rows, for the loader's prompts, are the first groups that are whole: also those of other prompts.

    Other prompts, such as those of an evaluation, it passes on. It is the loader of its run, too: its saved position includes the
    samples.
    """

    def __init__(
        self,
        group: Any,
        loader: LookAhead,
        config: CarryingConfig,
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
        is kept: the same call again, or that of a later step, goes on with it.
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
    roles: Roles, loader: LookAhead, config: CarryingConfig, state: StepState, steps: int, corrected: bool
) -> tuple[Loader, Measure]:
    """Replaces the rollout group by a `CarryingRollout`, if the options say so, for a run of ``steps``.

    The roles may be those of `recipes.run.environment_roles.with_environment`, or become so later.

    Returns:
        The loader of the run, and its measure, which adds ``training/staleness/{mean,max}`` (updates between the weights that
        sampled a token and those that learn from it) and ``training/carried_groups`` (that have begun and go on).
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
