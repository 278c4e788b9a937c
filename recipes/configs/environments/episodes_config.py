"""The options of training over episodes, for any environment."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from dataproto.errors import InvalidConfig
from recipes.configs.grpo_config import GRPORunConfig
from recipes.configs.shared.run_config import RunConfig

if TYPE_CHECKING:
    from rollout.environments import EpisodeLimits


@dataclass(frozen=True)
class EpisodesConfig:
    """Episodes: where they take place and how long they may be. ``data.max_response_length`` is the limit of one turn."""

    environment: str | None = None  # FILE.py:NAME of a class or function that makes one; the recipe's own by default
    turns: int = 6  # of an episode
    tokens: int | None = None  # of an episode behind its prompt, observations included; default: no limit
    seconds: float = 60.0  # that the environment of an episode may take

    def limits(self) -> "EpisodeLimits":
        """The limits of an episode. Raises `InvalidConfig`."""
        from rollout.environments import EpisodeLimits

        return EpisodeLimits(self.turns, self.tokens, self.seconds)


@dataclass(frozen=True)
class WarmUpPhaseConfig:
    """The supervised phase on demonstrations, before the small model plays its first episode."""

    steps: int = 30  # updates
    batch_size: int = 32  # demonstrations of an update
    lr: float = 2e-3  # learning rate

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise InvalidConfig(f"warm_up.steps={self.steps}, batch_size={self.batch_size}: must be at least 1")


@dataclass(frozen=True)
class EpisodeRunConfig(GRPORunConfig):
    """A run of GRPO over episodes."""

    episodes: tyro.conf.OmitArgPrefixes[EpisodesConfig] = field(default_factory=EpisodesConfig)
    warm_up: WarmUpPhaseConfig = field(default_factory=WarmUpPhaseConfig)  # of the small model
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(
        default_factory=lambda: RunConfig(output_dir=Path("outputs/episodes"))
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is not None:
            raise InvalidConfig(f"reward={self.reward}: the rewards of episodes come from their environment")
        if self.one_step_off:
            raise InvalidConfig("one_step_off generates single responses ahead; episodes are played in their step")
        if (self.episodes.environment is None) != (self.data.data_path is None):
            raise InvalidConfig(
                "--environment and --data-path go together: the recipe's environment draws its own rows"
            )
        if self.episodes.environment is not None and self.model_path is None:
            raise InvalidConfig("--environment needs --model-path: the small model knows only the words of this recipe")
        if self.run.epochs is not None:
            raise InvalidConfig("epochs: the length of a run over episodes is --steps")
        if self.engine == "vllm" and self.episodes.tokens is None:
            raise InvalidConfig("engine=vllm needs --tokens: it reserves room for the longest episode")

    @property
    def longest_response(self) -> int:
        """The largest number of tokens behind a prompt."""
        if self.episodes.tokens is not None:
            return self.episodes.tokens
        return self.episodes.turns * self.data.max_response_length
