"""Episodes: playing them on an engine, the tokens of their turns, and the rows that they become."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from rollout.environments.episodes.episode import Episode, EpisodeLimits, EpisodeStart
    from rollout.environments.episodes.episode_loop import go_on, play_episodes
    from rollout.environments.episodes.episode_rows import episode_columns, episode_starts
    from rollout.environments.episodes.held_episodes import EpisodePlan, HeldEpisodes
    from rollout.environments.episodes.turn_renderer import TurnRenderer

__all__ = [
    "Episode",
    "EpisodeLimits",
    "EpisodePlan",
    "EpisodeStart",
    "HeldEpisodes",
    "TurnRenderer",
    "episode_columns",
    "episode_starts",
    "go_on",
    "play_episodes",
]

__getattr__ = lazy_names(__name__, ".episode", ".episode_loop", ".episode_rows", ".held_episodes", ".turn_renderer")
