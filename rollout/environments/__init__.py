"""Environments that the policy acts in for several turns: what they are, playing them, and adapters of other libraries' ones."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from rollout.environments.environment import Environment, EnvironmentFailed, MakeEnvironment, Observation
    from rollout.environments.episode import Episode, EpisodeLimits, EpisodeStart
    from rollout.environments.episode_loop import EpisodePlan, HeldEpisodes, go_on, play_episodes
    from rollout.environments.episode_rows import episode_columns, episode_starts
    from rollout.environments.other_libraries import from_gymnasium, from_trl, from_vagen, trl_tools
    from rollout.environments.tool_environment import ToolEnvironment, hermes_calls, with_tools
    from rollout.environments.turn_renderer import TurnRenderer

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "Episode",
    "EpisodeLimits",
    "EpisodePlan",
    "EpisodeStart",
    "HeldEpisodes",
    "MakeEnvironment",
    "Observation",
    "ToolEnvironment",
    "TurnRenderer",
    "episode_columns",
    "episode_starts",
    "from_gymnasium",
    "from_trl",
    "from_vagen",
    "go_on",
    "hermes_calls",
    "play_episodes",
    "trl_tools",
    "with_tools",
]

__getattr__ = lazy_names(
    __name__,
    ".environment",
    ".episode",
    ".episode_loop",
    ".episode_rows",
    ".other_libraries",
    ".tool_environment",
    ".turn_renderer",
)
