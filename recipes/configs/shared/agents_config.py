"""The options of training over episodes: of an environment, or of an agent that somebody else wrote."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.environments import EpisodeLimits


@dataclass(frozen=True)
class EpisodeOptions:
    """The limits of episodes.

    Attributes:
        wall_clock: seconds of an episode, decoding included; not reproducible; default: no limit
        processes: processes of an agent that is a command, at a time, of each engine
    """

    turns: int = 6
    tokens: int | None = None
    seconds: float = 60.0
    memory_gib: float | None = None
    wall_clock: float | None = None
    drop_cut: bool = False
    processes: int = 32

    def limits(self) -> "EpisodeLimits":
        """The limits of an episode. Raises `InvalidConfig`."""
        from rollout.environments import EpisodeLimits

        pictures = getattr(self, "last_pictures", None)
        return EpisodeLimits(self.turns, self.tokens, self.seconds, pictures, self.memory_gib, self.wall_clock)


@dataclass(frozen=True)
class AgentsConfig(EpisodeOptions):
    """Episodes of an agent. ``data.max_response_length`` is the limit of one turn.

    Attributes:
        turns: requests of an episode
        tokens: tokens of a row after the first prompt of its episode; default: no limit
        seconds: seconds that the agent of an episode may take between its requests, without the time of decoding
        memory_gib: memory of each process of an agent that is a command; default: no limit
        drop_cut: learn nothing from episodes that a limit cut: turns, tokens or time
    """
