"""Agents that go on in a later step of training, with the conversations that they began."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataproto import DataProto
from dataproto.errors import end_after
from rollout.agents.agent import Agent
from rollout.agents.agent_loop import AgentEpisode, AgentRun, agent_columns
from rollout.continuation import BegunTurn, WholeGroups
from rollout.engine import RequestEngine, SamplingParams
from rollout.environments.episode import EpisodeLimits, EpisodeStart
from rollout.environments.turn_renderer import TurnRenderer


@dataclass(frozen=True)
class AgentPlan:
    """Which agent plays episodes, and how long they may be; as `rollout.environments.EpisodePlan`."""

    agent: Agent
    limits: EpisodeLimits

    def hold(self) -> "HeldAgents":
        """What holds episodes between two steps."""
        return HeldAgents()

    def add_columns(self, data: DataProto, episodes: Sequence[Any]) -> None:
        """See `agent_columns`."""
        agent_columns(data, episodes)


class HeldAgents:
    """The agents of this process that have begun and not ended, and their endpoint."""

    def __init__(self) -> None:
        self._run: AgentRun | None = None
        self._shut: Callable[[], Any] = lambda: None  # ends the agents, also when the process ends

    def go_on(
        self,
        engine: RequestEngine,
        renderer: TurnRenderer,
        starts: Sequence[EpisodeStart],
        begun: Sequence[Sequence[Mapping[str, Any]]],
        plan: AgentPlan,
        sampling: SamplingParams,
        groups: WholeGroups,
        weight_version: int,
    ) -> list[AgentEpisode]:
        """Lets agents go on until there are enough whole groups, and holds those that have not ended.

        An agent that is held waits for its replies, which come now. Another one that has ``begun``, in an earlier process, is
        called again. As long as it asks for the same as then, it gets what was sampled then; else its requests are sampled as
        new ones. Held agents that are not among ``starts`` are ended. If this raises, nothing is held.
        """
        if self._run is None:
            self._run = AgentRun(plan.agent, plan.limits)
            self._shut = weakref.finalize(self, self._run.close)
        run, held = self._run, {live.start.trajectory: live for live in self._run.lives.values()}
        try:
            episodes = []
            for start, plain in zip(starts, begun, strict=True):
                turns, live = [BegunTurn.of(turn) for turn in plain], held.get(start.trajectory)
                episodes.append(live if live is not None and live.begun == turns else run.live(start, turns))
            for live in set(held.values()).difference(episodes):
                run.drop(live)
            run.go_on(engine, renderer, episodes, sampling, groups, weight_version)
        except BaseException as error:
            end_after(error, self.release)
            raise
        for live in [live for live in episodes if live.ended]:
            run.drop(live)
        if not run.lives:
            self.release()
        return [live.record() for live in episodes]

    def release(self) -> None:
        """Ends all agents. Those that have not returned can be called again."""
        self._shut()
        self._run, self._shut = None, lambda: None
