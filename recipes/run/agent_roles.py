"""Agents in place of single responses: roles whose rollouts are episodes of an agent, with the rewards that it returns."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.function_files import load_named_function
from recipes.configs.shared.agents_config import EpisodeOptions
from recipes.run.environment_roles import EnvironmentReward, PlayingRollout
from rollout.agents import Agent, AgentPlan, CommandAgent
from rollout.agents.agent import MOST_PROCESSES
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits
from workers import Roles


def load_agent(name: str, memory_gib: float | None = None, processes: int = MOST_PROCESSES) -> Agent:
    """The agent that a command line names as ``FILE.py:NAME``, or as a command of several words, for which the limits are.

    Raises:
        InvalidConfig: the file or the name does not exist, or the file cannot be imported.
    """
    if " " in name.strip():
        return CommandAgent(name, memory_gib, processes)
    return load_named_function(name, "agent", InvalidConfig)


@dataclass(frozen=True)
class PlayedAgent:
    """An agent and the limits of its episodes. With ``drop_cut`` nothing is learned from episodes that a limit cut."""

    agent: Agent
    limits: EpisodeLimits
    drop_cut: bool = False

    @classmethod
    def of(cls, name: str, options: EpisodeOptions) -> "PlayedAgent":
        """The agent of a command line. Raises `InvalidConfig`, see `load_agent`."""
        return cls(load_agent(name, options.memory_gib, options.processes), options.limits(), options.drop_cut)


def with_agent(roles: Roles, played: PlayedAgent) -> Roles:
    """The same roles, except that ``roles.rollout.generate`` runs an agent, whose rewards ``roles.reward.score`` leaves.

    Episodes for which the agent returns no reward are scored by the reward role.
    """
    rollout = AgentRollout(roles.rollout, played, reward=roles.optional.get("reward"))
    return replace(
        roles, rollout=rollout, optional={**roles.optional, "reward": EnvironmentReward()}, scores_apart=False
    )


@dataclass(frozen=True)
class AgentRollout(PlayingRollout):
    """A rollout role whose ``generate`` is its ``run``."""

    who: ClassVar[str] = "agent"
    played: Any
    reward: Any = None  # the role that scores episodes without a reward of their agent

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """See `workers.RolloutWorker.run`, and `PlayingRollout.generate`."""
        return self._taken(self.rollout.run(prompts, self.played.agent, sampling, self.played.limits))

    @property
    def _plan(self) -> AgentPlan:
        return AgentPlan(self.played.agent, self.played.limits)

    def _taken(self, data: DataProto) -> DataProto:
        self._score(data)
        return super()._taken(data)

    def _score(self, data: DataProto) -> None:
        """Scores the last rows of episodes for which the agent returned no reward, in addition to what it gave for turns.

        Raises:
            InvalidConfig: there are some, and no reward function.
        """
        last = {name: row for row, name in enumerate(data["trajectory"])}
        learned, scored = data["response_mask"].any(1), data["agent_scored"]
        rows = [row for row in sorted(last.values()) if learned[row] and not scored[row]]
        if not rows:
            return
        if self.reward is None:
            raise InvalidConfig(
                f"row {rows[0]} (uid {data['uid'][rows[0]]}): the agent returned no reward: let it return a number, or give "
                "--reward"
            )
        asked = data[rows]
        asked.pop(["token_level_rewards"], ["score", "response_text"])  # which the reward function writes
        found = self.reward.score(asked)
        data["token_level_rewards"][rows] += found["token_level_rewards"]
        for name in set(found.non_tensor_batch) - {"response_text"}:
            column = data[name] if name in data else np.full(len(data), None, dtype=object)
            for row, value in zip(rows, found[name], strict=True):
                told = np.flatnonzero(data["trajectory"] == data["trajectory"][row])
                column[told] = value + column[row] if name == "score" else value
            data[name] = column
