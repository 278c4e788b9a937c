"""PPO (arXiv:1707.06347) with a critic: ``dataproto ppo``.

Data, model, reward and report are those of `recipes.grpo`; a critic of the same kind learns the value of each
token.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dataproto.errors import InvalidConfig, check_at_least
from recipes.algorithms.options import AlgorithmConfig
from recipes.configs.shared.policy_gradient_config import SIZES, DataConfig, PolicyGradientConfig, parse_with_defaults
from recipes.configs.shared.run_config import RunConfig
from workers.model.model_config import OptimizerConfig
from workers.ranks.layout import Layout

OUTPUT_DIR = Path("outputs/ppo")


@dataclass(frozen=True)
class ActorCriticConfig(AlgorithmConfig):
    """The settings of algorithms whose advantage may need a critic.

    Attributes:
        lam: decay of gae, turn_gae and bi_level_gae: 0 trusts only the critic, 1 only the rewards
        whiten: shift and scale the batch's advantages to mean 0 and variance 1
        critic_epochs: passes of the critic over each batch, in the policy's mini-batches
        value_clip: largest change of a value in one update that the loss rewards; None: no limit
        critic_warmup: number of first steps in which only the critic learns
    """

    lam: float = 1.0
    whiten: bool = True
    critic_epochs: int = 1
    value_clip: float | None = 0.5
    critic_warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lam <= 1:
            raise InvalidConfig(f"algorithm.lam={self.lam}: must be from 0 to 1")
        check_at_least(1, self, "critic_epochs", group="algorithm.")
        check_at_least(0, self, "critic_warmup", group="algorithm.")
        if self.value_clip is not None and self.value_clip <= 0:
            raise InvalidConfig(f"algorithm.value_clip={self.value_clip}: must be above 0")
        if self.advantage == "reverse_kl":
            raise InvalidConfig("algorithm.advantage=reverse_kl needs a teacher: run dataproto distil")


@dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """The algorithm's settings; verl's defaults where they exist.

    Attributes:
        n: samples of each prompt
        advantage: baseline from the critic's values: of tokens gae, over turns turn_gae and bi_level_gae
    """

    n: int = 1
    advantage: str = "gae"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.needs_critic:
            raise InvalidConfig(f"algorithm.advantage={self.advantage} does not use a critic: run dataproto grpo")


@dataclass(frozen=True)
class ActorCriticRunConfig(PolicyGradientConfig):
    """A run in which a critic learns if the advantage needs one.

    Attributes:
        critic_optimizer: optimizer of the critic, with verl's rate
    """

    algorithm: ActorCriticConfig = field(default_factory=ActorCriticConfig)
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))

    @property
    def updates(self) -> dict[str, int]:
        policy = super().updates["optimizer"]
        epochs = self.algorithm.critic_epochs
        critic = {"critic_optimizer": epochs * policy // self.algorithm.epochs} if self.algorithm.needs_critic else {}
        return {"optimizer": policy, **critic}

    @property
    def critic(self) -> OptimizerConfig | None:
        return self.critic_optimizer if self.algorithm.needs_critic else None


@dataclass(frozen=True)
class PPORunConfig(ActorCriticRunConfig):
    """A run of PPO."""

    algorithm: PPOConfig = field(default_factory=PPOConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))


# What a model of under a million parameters learns from synthetic problems within minutes on two cores.
TINY = PPORunConfig(
    preset="tiny",
    data=DataConfig(batch_size=16, max_prompt_length=256, max_response_length=24, instruction=""),
    algorithm=PPOConfig(n=16, kl_coef=0.1),
    optimizer=OptimizerConfig(lr=5e-4, schedule="linear", warmup_steps=10),
    critic_optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=10),
    run=RunConfig(steps=500, eval_every=50, save_every=100, output_dir=OUTPUT_DIR),
)
PRESETS = {"tiny": TINY, "any": PPORunConfig()} | {
    size: PPORunConfig(preset=size, algorithm=PPOConfig(minibatch=128, kl_coef=0.001, kl_in="reward"), **options)
    for size, options in (SIZES | {"3b": SIZES["3b"] | {"on": "ray", "layout": Layout(dp=2)}}).items()  # for the critic
}
"""The defaults of ``--preset``."""
parse = partial(parse_with_defaults, presets=PRESETS, description=__doc__, prog="dataproto ppo")
