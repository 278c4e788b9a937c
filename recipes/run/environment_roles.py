"""Episodes in place of single responses: roles whose rollouts are played, with the rewards of the environment."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dataproto import DataProto
from dataproto.columns import require
from dataproto.errors import InvalidConfig
from recipes.algorithms.function_files import load_named_function
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, MakeEnvironment
from workers import Roles


def load_environment(name: str) -> MakeEnvironment:
    """The environment that a command line names as ``FILE.py:NAME``: a class without arguments, or a function that makes one.

    Raises:
        InvalidConfig: the file or the name does not exist, or the file cannot be imported.
    """
    return load_named_function(name, "environment", InvalidConfig)


@dataclass(frozen=True)
class PlayedEnvironment:
    """An environment, the limits of its episodes, and the actions of a typical one if they are known, for the forecast."""

    make: MakeEnvironment
    limits: EpisodeLimits
    actions: tuple[str, ...] = ()


def with_environment(roles: Roles, played: PlayedEnvironment) -> Roles:
    """The same roles, except that ``roles.rollout.generate`` plays episodes and ``roles.reward.score`` leaves their rewards.

    So every recipe that samples and scores trains on episodes.
    """
    optional = {**roles.optional, "reward": EnvironmentReward()}
    return replace(roles, rollout=PlayingRollout(roles.rollout, played), optional=optional)


@dataclass(frozen=True)
class PlayingRollout:
    """A rollout role whose ``generate`` is its ``play``."""

    rollout: Any
    played: PlayedEnvironment

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """See `workers.RolloutWorker.play`; numbers in ``info``, such as ``acc``, become columns."""
        environment = self.played
        data: DataProto = self.rollout.play(prompts, environment.make, sampling, **vars(environment.limits))
        infos = data["info"]
        numbers = [name for info in infos for name, value in info.items() if not isinstance(value, str)]
        for name in dict.fromkeys(numbers):
            if name not in data:
                data[name] = np.array([info.get(name) for info in infos], dtype=object)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)


class EnvironmentReward:
    """A reward role for rows that have their rewards."""

    def score(self, data: DataProto) -> DataProto:
        """Nothing to add. Raises `MissingColumn` for rows that were not played."""
        require(data, "token_level_rewards", "score", "response_text")
        return DataProto()
