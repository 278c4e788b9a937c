"""Episodes in place of single responses: roles whose rollouts are played in environments or by agents, with their rewards."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dataproto import DataProto
from dataproto.columns import require, taken_names
from dataproto.errors import InvalidConfig, UserFunctionFailed
from recipes.algorithms.function_files import load_named_function, named_function
from recipes.algorithms.turn_advantages import uncut_tokens
from recipes.configs.shared.rollout_options import EpisodeOptions
from rollout.agents import AgentApart, AgentPlan, CommandAgent, in_process
from rollout.agents.agent import MOST_PROCESSES
from rollout.engine import SamplingParams
from rollout.environments import EpisodePlan, MakeEnvironment
from rollout.environments.environment import Failure
from workers import Roles

FAILURES = get_args(Failure)
FAILED_STEPS = 3
"""In a row, after which a run stops."""


def load_environment(name: str) -> MakeEnvironment:
    """The environment that a command line names as ``FILE.py:NAME``: a class without arguments, or a function that makes one.

    Raises:
        InvalidConfig: the file or the name does not exist, or the file cannot be imported.
    """
    return load_named_function(name, "environment", InvalidConfig)


def load_agent(name: str, memory_gib: float | None = None, processes: int = MOST_PROCESSES) -> AgentApart:
    """The agent that a command line names as ``FILE.py:NAME``, or as a command of several words, for which the limits are. It
    runs in a process of its own.

    Raises:
        InvalidConfig: the file, the name or the program does not exist, or the file cannot be imported.
    """
    if " " in name.strip():
        return in_process(CommandAgent(name, memory_gib, processes))
    named, agent = named_function(name, "agent", InvalidConfig)
    return replace(in_process(named), at_once=getattr(agent, "at_once", None))


@dataclass(frozen=True)
class Played:
    """Where episodes take place, and how long they may be.

    With ``drop_cut`` nothing is learned from episodes that a limit cut, see `uncut_tokens`.
    """

    plan: EpisodePlan | AgentPlan
    drop_cut: bool = False

    @classmethod
    def by_agent(cls, name: str, options: EpisodeOptions) -> "Played":
        """By the agent of a command line. Raises `InvalidConfig`, see `load_agent`."""
        agent = load_agent(name, options.memory_gib, options.processes)
        return cls(AgentPlan(agent, options.limits()), options.drop_cut)

    @property
    def who(self) -> str:
        """Who acts, for messages."""
        return "agent" if isinstance(self.plan, AgentPlan) else "environment"


def with_episodes(roles: Roles, played: Played) -> Roles:
    """The same roles, except that ``roles.rollout.generate`` plays episodes and ``roles.reward.score`` leaves their rewards.

    So every recipe that samples and scores trains on episodes. Those for which an agent returns no reward are scored by the
    reward role.
    """
    rollout = PlayingRollout(roles.rollout, played, roles.optional.get("reward"))
    optional = {**roles.optional, "reward": EpisodeReward()}
    return replace(roles, rollout=rollout, optional=optional, scores_apart=False)


@dataclass(frozen=True)
class PlayingRollout:
    """A rollout role whose ``generate`` plays episodes."""

    rollout: Any
    played: Played
    reward: Any = None  # the role that scores episodes without a reward of their agent
    told: set[str] = field(default_factory=set)  # failures and renamed columns that have been shown

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """See `workers.RolloutWorker.episodes`; numbers of ``info`` are columns: ``acc`` under this name, and ``turns``, whose
        name is taken (see `dataproto.columns.taken_names`), as ``info_turns``, told once.
        """
        return self._taken(self.rollout.episodes(prompts, self.played.plan, sampling))

    def in_parts(self, prompts: DataProto, sampling: SamplingParams) -> Iterator[DataProto]:
        """As `generate`; see `recipes.run.carrying.CarryingRollout.in_parts`."""
        return map(self._taken, self.rollout.in_parts(prompts, sampling, self.played.plan))

    def _taken(self, data: DataProto) -> DataProto:
        if "agent_scored" in data:
            self._score(data)
        self._tell_failures(data)
        if self.played.drop_cut:
            data["response_mask"] = uncut_tokens(data["response_mask"], data["end_reason"])
        return self._with_numbers(data)

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

    def _with_numbers(self, played: DataProto) -> DataProto:
        infos = [{name: each for name, each in info.items() if not isinstance(each, str)} for info in played["info"]]
        numbers, present = {name for info in infos for name in info}, played.names()
        taken = taken_names(numbers, present)
        for name in sorted(numbers):
            column = name
            if name in taken:
                column = f"info_{name}"
                while column in numbers or column in present:
                    column = f"info_{column}"
                renamed = f"{name} in the {self.played.who}'s info is the column {column}"
                self._warn(column, f"{renamed}: {name} is a column of the library or of the data (docs/columns.md)")
            played[column] = np.array([info.get(name) for info in infos], dtype=object)
        return played

    def _tell_failures(self, data: DataProto) -> None:
        """Shows each failure of an environment once, with the first row that has it, and the first episode without a turn for
        which the engine had no room.
        """
        for row in np.flatnonzero((data["turns"].numpy() == 0) & (data["end_reason"] == "tokens")):
            uid, why = data["uid"][row], data["end_message"][row]
            self._warn("tokens", f"the episode of row {row} (uid {uid}) has no turn, and further ones may not: {why}")
        for row in np.flatnonzero([reason in FAILURES for reason in data["end_reason"]]):
            message = str(data["end_message"][row])
            place = f"row {row} (uid {data['uid'][row]}, response {str(data['response_text'][row])!r:.100})"
            told = f"the {self.played.who} of {place} failed, nothing is learned from its episode: {message}"
            self._warn(message, told)

    def _warn(self, subject: str, text: str) -> None:
        """Shows the first warning about a subject."""
        if subject not in self.told:
            self.told.add(subject)
            print(f"warning: {text}", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)


class FailedSteps:
    """Stops a run that learns nothing: every episode failed in its first step, or in `FAILED_STEPS` in a row later on."""

    def __init__(self) -> None:
        self.in_a_row = FAILED_STEPS - 1  # as if some had come before the first step

    def check(self, data: DataProto, step: int, written: Path) -> None:
        """Looks at the rows of a step, which may be those of no episodes.

        Args:
            written: the file that has some of the rows, if there is one, each with its failure.

        Raises:
            UserFunctionFailed: the run should stop; the message has the commonest failure of the step.
        """
        if not len(data) or "end_reason" not in data or not all(reason in FAILURES for reason in data["end_reason"]):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if self.in_a_row < FAILED_STEPS:
            return
        (message, count), *others = Counter(data["end_message"].tolist()).most_common()
        so = f", {count} of them by the commonest failure" if others else ""
        place = f"; {written} has the failures of its rows" if written.is_file() else ""
        raise UserFunctionFailed(f"every episode of step {step} failed ({len(data)} rows{so}): {message}{place}")


class EpisodeReward:
    """A reward role for rows that have their rewards."""

    def score(self, data: DataProto) -> DataProto:
        """Nothing to add. Raises `MissingColumn` for rows that were not played."""
        require(data, "token_level_rewards", "score", "response_text")
        return DataProto()
