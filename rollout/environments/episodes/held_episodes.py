"""Episodes that go on later, with their environments."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataproto.errors import InvalidConfig, end_after
from rollout.carried_samples import BegunTurn, WholeGroups
from rollout.engine import RequestEngine, SamplingParams
from rollout.environments.environment import MakeEnvironment
from rollout.environments.environment_host import EnvironmentHost
from rollout.environments.episodes.episode import Episode, EpisodeLimits, EpisodeStart
from rollout.environments.episodes.episode_loop import go_on
from rollout.environments.episodes.turn_renderer import TurnRenderer


@dataclass(frozen=True)
class EpisodePlan:
    """Where episodes take place, and how long they may be."""

    make_environment: MakeEnvironment
    limits: EpisodeLimits

    def __post_init__(self) -> None:
        if self.limits.last_pictures is not None:
            raise InvalidConfig(
                f"last_pictures={self.limits.last_pictures} makes several rows of an episode; one that goes on later has "
                "one row"
            )


class HeldEpisodes:
    """The episodes of this process that have begun and not ended, and their environments."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}  # by trajectory
        self._host: EnvironmentHost | None = None
        self._shut: Callable[[], Any] = lambda: None  # closes the environments, also when the process ends

    def go_on(
        self,
        engine: RequestEngine,
        renderer: TurnRenderer,
        starts: Sequence[EpisodeStart],
        begun: Sequence[Sequence[Mapping[str, Any]]],
        plan: EpisodePlan,
        sampling: SamplingParams,
        groups: WholeGroups,
        weight_version: int,
    ) -> list[Episode]:
        """Plays episodes until there are enough whole groups, and holds those that have not ended.

        An episode that is held goes on in its environment. Another one that has ``begun``, in an earlier process, is played
        again with what was sampled then; see `rollout.environments.episodes.go_on`. Held episodes that are not among ``starts``
        are dropped. If this raises, nothing is held: the episodes are somewhere between ``begun`` and what comes next.
        """
        turns = [[BegunTurn.of(turn) for turn in each] for each in begun]
        episodes = [self._taken(start, before) for start, before in zip(starts, turns, strict=True)]
        host = self._opened(plan)
        names = [episode.start.trajectory for episode in episodes]
        held = {name for name, episode in zip(names, episodes, strict=True) if self._episodes.get(name) is episode}
        for name in host.episodes:
            if name not in held:
                host.close(name)
        host.resume()
        try:
            go_on(engine, renderer, episodes, host, sampling, plan.limits, groups, weight_version)
        except BaseException as error:
            end_after(error, self.release)
            raise
        host.pause()
        self._episodes = {each.start.trajectory: each for each in episodes if not each.ended}
        if not self._episodes:
            self.release()
        return episodes

    def release(self) -> None:
        """Closes all environments. Episodes that have not ended can be played again."""
        self._shut()
        self._host, self._episodes = None, {}

    def _taken(self, start: EpisodeStart, begun: list[BegunTurn]) -> Episode:
        held = self._episodes.get(start.trajectory)
        if held is not None and held.begun == begun:
            return held
        return Episode(start, repeated=begun)

    def _opened(self, plan: EpisodePlan) -> EnvironmentHost:
        if self._host is None:
            self._host = EnvironmentHost(plan.make_environment, plan.limits.seconds, plan.limits.memory_gib)
            self._shut = weakref.finalize(self, self._host.shut)
        else:
            self._host.make_by(plan.make_environment)
        return self._host
