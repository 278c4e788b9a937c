"""GRPO or PPO over episodes of several turns, each with a new picture: ``dataproto walk``.

With no arguments it draws grids, makes a small Qwen2.5-VL, shows it the form of an answer, and lets it find out by itself how to
walk to the goal, on the CPU within minutes. With ``--environment FILE.py:NAME`` and ``--model-path`` the same loop trains any
checkpoint of a known family in an environment of your own, with the rows of ``--data-path``.

Each evaluation walks greedily in grids that are drawn for it, and measures two controls: pictures of other grids, and white ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from dataproto.errors import InvalidConfig
from recipes.configs.ppo_config import ActorCriticConfig
from recipes.configs.shared.policy_gradient_config import DataConfig, PolicyGradientConfig, parse_with_defaults
from recipes.configs.shared.run_config import RunConfig
from workers.model.model_config import OptimizerConfig

if TYPE_CHECKING:
    from rollout.environments import EpisodeLimits

OUTPUT_DIR = Path("outputs/walk")


@dataclass(frozen=True)
class EpisodesConfig:
    """Episodes: where they take place and how long they may be. ``data.max_response_length`` is the limit of one turn."""

    environment: str | None = None  # FILE.py:NAME of a class or function that makes one; a drawn grid by default
    turns: int = 6  # of an episode
    tokens: int | None = None  # of an episode behind its prompt, observations included; default: no limit
    seconds: float = 60.0  # that the environment of an episode may take
    last_pictures: int | None = None  # of the observations that a turn sees; default: all
    memory_gib: float | None = None  # of the environment, in a process of its own; default: a thread, no limit
    drop_cut: bool = False  # learn nothing from episodes that a limit cut: turns, tokens, or a turn's length

    def limits(self) -> "EpisodeLimits":
        """The limits of an episode. Raises `InvalidConfig`."""
        from rollout.environments import EpisodeLimits

        return EpisodeLimits(self.turns, self.tokens, self.seconds, self.last_pictures, self.memory_gib)


@dataclass(frozen=True)
class WarmUpPhaseConfig:
    """The supervised phase on walks in random directions, which teaches the form of an answer."""

    steps: int = 30  # updates
    batch_size: int = 32  # walks of an update
    lr: float = 2e-3  # learning rate

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise InvalidConfig(f"warm_up.steps={self.steps}, batch_size={self.batch_size}: must be at least 1")


@dataclass(frozen=True)
class EpisodeAlgorithmConfig(ActorCriticConfig):
    """The algorithm's settings. A critic learns too if the advantage needs one: gae, turn_gae or bi_level_gae."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settings.advantage == "reverse_kl":
            raise InvalidConfig("algorithm.advantage=reverse_kl needs a teacher: run recipes.distil")


@dataclass(frozen=True)
class WalkConfig(PolicyGradientConfig):
    """A run over episodes."""

    algorithm: EpisodeAlgorithmConfig = field(default_factory=EpisodeAlgorithmConfig)
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))  # of a critic
    episodes: tyro.conf.OmitArgPrefixes[EpisodesConfig] = field(default_factory=EpisodesConfig)
    warm_up: WarmUpPhaseConfig = field(default_factory=WarmUpPhaseConfig)  # of the small model
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is not None:
            raise InvalidConfig(f"reward={self.reward}: the rewards of episodes come from their environment")
        if (self.episodes.environment is None) != (self.data.data_path is None):
            raise InvalidConfig("--environment and --data-path go together: the drawn grid has its own rows")
        if self.episodes.environment is not None and self.model_path is None:
            raise InvalidConfig("--environment needs --model-path: the small model knows only the words of the grid")
        if self.episodes.last_pictures is not None and self.algorithm.needs_greedy:
            raise InvalidConfig(
                "--last-pictures makes several rows of an episode, but remax needs one: choose another advantage"
            )
        if self.engine == "vllm" and self.episodes.tokens is None:
            raise InvalidConfig("engine=vllm needs --tokens: it reserves room for the longest episode")

    @property
    def updates(self) -> dict[str, int]:
        policy = super().updates["optimizer"]
        epochs = self.algorithm.critic_epochs
        critic = {"critic_optimizer": epochs * policy // self.algorithm.epochs} if self.algorithm.needs_critic else {}
        return {"optimizer": policy, **critic}

    @property
    def critic(self) -> OptimizerConfig | None:
        return self.critic_optimizer if self.algorithm.needs_critic else None

    @property
    def longest_response(self) -> int:
        """The largest number of tokens behind a prompt."""
        if self.episodes.tokens is not None:
            return self.episodes.tokens
        return self.episodes.turns * self.data.max_response_length


# For a model of under a million parameters, on two cores.
TINY = WalkConfig(
    data=DataConfig(batch_size=16, eval_rows=64, max_prompt_length=64, max_response_length=3, instruction=""),
    # The reward of a move counts for that move, and half as much with each token that was sampled before it.
    algorithm=EpisodeAlgorithmConfig(n=8, advantage="reinforce_plus_plus", gamma=0.5, kl_coef=0.0, entropy_coef=0.02),
    optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), schedule="linear", warmup_steps=5),
    critic_optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=5),
    run=RunConfig(steps=150, eval_every=25, save_every=75, output_dir=OUTPUT_DIR),
)
REAL = WalkConfig(data=DataConfig(batch_size=64, eval_rows=256, max_prompt_length=2048, max_response_length=512))


def parse(arguments: Sequence[str]) -> WalkConfig:
    """The configuration of a command line. Defaults are the tiny model's, or with ``--model-path`` those for real ones.

    The tiny model's discount belongs to its advantage: it is dropped where the command line names another one.

    Raises:
        InvalidConfig: an unknown or ill-typed option, or an impossible combination, in one line.
    """
    named = any(each.partition("=")[0] == "--algorithm.advantage" for each in arguments)
    tiny = replace(TINY, algorithm=replace(TINY.algorithm, gamma=1.0)) if named else TINY
    return parse_with_defaults(arguments, REAL, {"tiny": tiny}, __doc__, "dataproto walk")
