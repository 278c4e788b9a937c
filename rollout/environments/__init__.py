"""Environments that the policy acts in for several turns: what they are, playing them, and adapters of other libraries' ones."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from rollout.environments.environment import Environment, EnvironmentFailed, MakeEnvironment, Observation
    from rollout.environments.episodes import Episode, EpisodeLimits, EpisodeStart, play_episodes
    from rollout.environments.turn_renderer import TurnRenderer

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "Episode",
    "EpisodeLimits",
    "EpisodeStart",
    "MakeEnvironment",
    "Observation",
    "TurnRenderer",
    "play_episodes",
]

__getattr__ = lazy_names(__name__, __file__)
