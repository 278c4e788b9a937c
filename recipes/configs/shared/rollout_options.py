"""The options of rollouts: which samples are decoded when, what comes with them, and the limits of episodes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataproto.errors import check_at_least

if TYPE_CHECKING:
    from rollout.environments import EpisodeLimits

AT_A_TIME = 1.5
"""Groups that are decoded together, in batch sizes, where samples may continue after an update. More than that makes the engine
read about as much longer as it decodes less."""


@dataclass(frozen=True)
class RolloutOptions:
    """Which tokens are sampled, as far as the options of the algorithm leave that open, which samples are decoded when, and what
    comes with them.

    Attributes:
        staleness: updates by which weights that sample may be older than those that learn, for decoding ahead; 0: none, a
            step learns from its first groups while engines with devices of their own decode the others; default: a step
            decodes all of its samples, then learns
        replay_routing: let the actor use the experts that the engine chose, with a mixture of experts
        min_p: sample from tokens with at least this share of the likeliest token's probability; 0: from all
        stop: texts that end a response, in the evaluation too; the response keeps the text
    """

    staleness: int | None = None
    replay_routing: bool = True
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least(0, self, "staleness", group="rollout.")

    @property
    def at_a_time(self) -> float:
        """Groups that are decoded together at most, in batch sizes."""
        return AT_A_TIME if self.staleness else 1.0


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
