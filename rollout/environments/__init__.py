"""Environments that the policy acts in for several turns: what they are, playing them, and adapters of other libraries' ones."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from rollout.environments.environment import Environment, EnvironmentFailed, MakeEnvironment, Observation
    from rollout.environments.episodes.episode import Episode, EpisodeLimits, EpisodeStart
    from rollout.environments.episodes.episode_loop import play_episodes
    from rollout.environments.episodes.turn_renderer import TurnRenderer
    from rollout.environments.gymnasium_environment import from_gymnasium
    from rollout.environments.tool_environment import ToolEnvironment, hermes_calls, with_tools
    from rollout.environments.trl_environment import from_trl, trl_tools
    from rollout.environments.vagen_environment import from_vagen

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "Episode",
    "EpisodeLimits",
    "EpisodeStart",
    "MakeEnvironment",
    "Observation",
    "ToolEnvironment",
    "TurnRenderer",
    "from_gymnasium",
    "from_trl",
    "from_vagen",
    "hermes_calls",
    "play_episodes",
    "trl_tools",
    "with_tools",
]

__getattr__ = lazy_names(
    __name__,
    ".environment",
    ".episodes.episode",
    ".episodes.episode_loop",
    ".episodes.turn_renderer",
    ".gymnasium_environment",
    ".tool_environment",
    ".trl_environment",
    ".vagen_environment",
)
