"""PPO (arXiv:1707.06347) with a critic, as one function over roles."""

from dataclasses import dataclass

from torch import Tensor

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.advantages import gae, whiten
from recipes.algorithms.losses import value_loss
from recipes.algorithms.options import AlgorithmConfig
from recipes.run.dynamic_sampling import More
from recipes.run.metrics import add_update, timed
from recipes.run.phases import (
    Metrics,
    Progression,
    add_log_probs,
    entropy_coefficient,
    roll_out,
    rows_to_learn,
    shape_rewards,
    update_actor,
)
from rollout.engine import SamplingParams
from workers import Roles
from workers.roles.critic import Values
from workers.training.forward_pass import LossFn


@dataclass(frozen=True)
class PPOConfig(AlgorithmConfig):
    """The algorithm's settings; verl's defaults where they exist."""

    n: int = 1  # samples of each prompt
    advantage: str | None = "gae"  # what a token is compared with: the critic's value
    lam: float = 1.0  # of gae: 0 trusts the critic alone, 1 the rewards alone
    whiten: bool = True  # shift and scale the batch's advantages to mean 0 and variance 1
    critic_epochs: int = 1  # passes of the critic over each batch, in the policy's mini-batches
    value_clip: float | None = 0.5  # how far a value may move in one update and still gain by it
    critic_warmup: int = 0  # first steps, in which the critic alone learns

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settings.advantage != "gae":
            raise InvalidConfig(
                f"algorithm.advantage={self.settings.advantage} has no use for a critic: run recipes.geo3k_grpo"
            )
        if not 0 <= self.lam <= 1:
            raise InvalidConfig(f"algorithm.lam={self.lam}: must be from 0 to 1")
        if self.critic_epochs < 1 or self.critic_warmup < 0:
            raise InvalidConfig(
                f"algorithm.critic_epochs={self.critic_epochs} must be at least 1, critic_warmup={self.critic_warmup} "
                "at least 0"
            )
        if self.value_clip is not None and self.value_clip <= 0:
            raise InvalidConfig(f"algorithm.value_clip={self.value_clip}: must be above 0")


def critic_loss(config: PPOConfig) -> LossFn:
    """The clipped error of values against returns."""

    def loss_fn(outputs: Values, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        return value_loss(outputs.values, data["values"], data["returns"], config.value_clip)

    return loss_fn


def ppo_step(
    roles: Roles,
    prompts: DataProto,
    config: PPOConfig,
    sampling: SamplingParams,
    progression: Progression | None = None,
    more: More | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """Samples, scores and updates critic and policy once over; returns the rollout batch and the metrics of the step.

    Args:
        progression: what goes on from step to step; needed by the critic's warm-up and by a KL weight that adapts.
        more: gives further prompts; needed by dynamic sampling.
    """
    progression = progression or Progression(config.kl_controller())
    metrics: dict[str, float] = {}
    data = roll_out(roles, prompts, config, sampling, more, metrics)
    add_log_probs(roles, data, config, config.updates(len(prompts)), metrics)
    with timed(metrics, "values"):
        data["values"] = roles.critic.values(data)["values"]
    with timed(metrics, "adv"):
        shape_rewards(data, config, progression.kl, sampling.max_tokens, metrics)
        add_advantages(data, config)
        learned = rows_to_learn(data, config, (sampling.seed, progression.steps), metrics)
    update_critic(roles, learned, config, metrics)
    progression.steps += 1
    if progression.steps > config.critic_warmup:
        update_actor(roles, learned, config, entropy_coefficient(data, config), metrics)
    else:
        roles.sync_weights()  # the end of a step, whoever has learned
    return data, metrics


def add_advantages(data: DataProto, config: PPOConfig) -> None:
    """Columns ``advantages`` and ``returns`` ``(B, R)``, of rewards and values."""
    mask = data["response_mask"]
    advantages, data["returns"] = gae(data["token_level_rewards"], data["values"], mask, config.gamma, config.lam)
    data["advantages"] = whiten(advantages, mask) if config.whiten else advantages


def update_critic(roles: Roles, data: DataProto, config: PPOConfig, metrics: Metrics) -> None:
    """The critic's update, if there is a row."""
    if not len(data):
        return
    with timed(metrics, "update_critic"):
        found = roles.critic.update(
            data,
            critic_loss(config),
            minibatch=config.minibatch,
            epochs=config.critic_epochs,
            aggregation="token-mean",
        )
    add_update(metrics, found)
