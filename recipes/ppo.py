"""PPO (arXiv:1707.06347) with a critic: ``dataproto ppo``.

Data, model, reward and report are those of `recipes.grpo`; beside the policy, a critic of the same kind learns the value of each
token.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from torch import Tensor

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.advantages import gae, whiten
from recipes.algorithms.losses import value_loss
from recipes.algorithms.options import AlgorithmConfig
from recipes.grpo import policy_loss
from recipes.run.command_line import exit_status
from recipes.run.dynamic_sampling import More
from recipes.run.loop import RunConfig
from recipes.run.metrics import merge_updates, timed
from recipes.run.phases import (
    Progression,
    add_actor_log_probs,
    engine_differences,
    entropy_coefficient,
    generate_and_score,
    rows_to_learn,
    shape_rewards,
)
from recipes.run.policy_gradient import SIZES, DataConfig, PolicyGradientConfig, parse_with_defaults, run
from rollout.engine import SamplingParams
from workers import Layout, Roles
from workers.roles.critic import Values
from workers.training.forward_pass import LossFn
from workers.training.optimizer import OptimizerConfig

OUTPUT_DIR = Path("outputs/ppo")


@dataclass(frozen=True)
class PPOConfig(AlgorithmConfig):
    """The algorithm's settings; verl's defaults where they exist."""

    n: int = 1  # samples of each prompt
    advantage: str | None = "gae"  # baseline of a token: the critic's value
    lam: float = 1.0  # of gae: 0 trusts the critic alone, 1 the rewards alone
    whiten: bool = True  # shift and scale the batch's advantages to mean 0 and variance 1
    critic_epochs: int = 1  # passes of the critic over each batch, in the policy's mini-batches
    value_clip: float | None = 0.5  # largest change of a value in one update that the loss rewards; None: no limit
    critic_warmup: int = 0  # first steps, in which the critic alone learns

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settings.advantage != "gae":
            raise InvalidConfig(
                f"algorithm.advantage={self.settings.advantage} does not use a critic: run recipes.grpo or recipes.geo3k_grpo"
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
    """One step: sample, score, update critic and policy. Returns the rollouts and the metrics.

    ``progression`` carries state between steps: their number, for the critic's warm-up, and an adaptive KL weight; ``more``
    returns further prompts, for dynamic sampling.
    """
    progression = progression or Progression(config.kl_controller())
    data, metrics = generate_and_score(roles, prompts, config, sampling, more)  # config.n rows for each prompt
    if config.needs_old_log_probs(config.updates(len(prompts))) and "old_log_probs" not in data:
        with timed(metrics, "old_log_prob"):
            data |= roles.actor.log_probs(data, into="old_log_probs")
    if config.needs_reference:
        with timed(metrics, "ref"):
            data |= roles.reference.log_probs(data, into="ref_log_prob")
    with timed(metrics, "values"):
        data |= roles.critic.values(data)
    with timed(metrics, "adv"):
        data, shaped = shape_rewards(data, config, progression.kl, sampling.max_tokens)
        add_advantages(data, config)
        learned, corrected = rows_to_learn(data, config, seed=(sampling.seed, progression.steps))
    metrics |= shaped | corrected
    if len(learned):
        with timed(metrics, "update_critic"):
            found = roles.critic.update(learned, critic_loss(config), config.minibatch, config.critic_epochs)
        metrics = merge_updates(metrics, found)
    progression.steps += 1
    if progression.steps > config.critic_warmup:
        metrics["actor/entropy_coeff"] = entropy_coefficient(data, config)
        if len(learned):
            loss, aggregation = policy_loss(config, metrics["actor/entropy_coeff"]), config.settings.aggregation
            with timed(metrics, "update_actor"):
                updated = roles.actor.update_and_score(
                    learned, loss, config.minibatch, config.epochs, aggregation, entropy=True
                )
            metrics = merge_updates(metrics, updated.metrics) | engine_differences(learned, config, updated.scores)
            add_actor_log_probs(data, learned, config, updated.scores)
    roles.sync_weights()
    return data, metrics


def add_advantages(data: DataProto, config: PPOConfig) -> None:
    """Adds the columns ``advantages`` and ``returns`` ``(B, R)``, from rewards and values."""
    mask = data["response_mask"]
    advantages, data["returns"] = gae(data["token_level_rewards"], data["values"], mask, config.gamma, config.lam)
    data["advantages"] = whiten(advantages, mask) if config.whiten else advantages


@dataclass(frozen=True)
class PPORunConfig(PolicyGradientConfig):
    """A run of PPO."""

    algorithm: PPOConfig = field(default_factory=PPOConfig)
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))  # verl's rate

    @property
    def updates(self) -> dict[str, int]:
        policy = super().updates["optimizer"]
        critic = self.algorithm.critic_epochs * policy // self.algorithm.epochs
        return {"optimizer": policy, "critic_optimizer": critic}

    @property
    def critic(self) -> OptimizerConfig:
        return self.critic_optimizer


# What a model of under a million parameters learns from drawn problems within minutes on two cores.
TINY = PPORunConfig(
    data=DataConfig(batch_size=16, max_prompt_length=256, max_response_length=24, instruction=""),
    algorithm=PPOConfig(n=16, kl_coef=0.1),
    optimizer=OptimizerConfig(lr=5e-4, schedule="linear", warmup_steps=10),
    critic_optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=10),
    run=RunConfig(steps=500, eval_every=50, save_every=100, output_dir=OUTPUT_DIR),
)
PRESETS = {"tiny": TINY} | {
    size: PPORunConfig(algorithm=PPOConfig(minibatch=128, kl_coef=0.001, kl_in="reward"), **options)
    for size, options in (SIZES | {"3b": SIZES["3b"] | {"on": "ray", "layout": Layout(dp=2)}}).items()  # for the critic
}
"""The defaults of ``--preset``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit status; a user's mistake is one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with exit_status(arguments) as status:
        print(f"report: {run(parse(arguments), ppo_step)}")
    return status.code


def parse(arguments: Sequence[str]) -> PPORunConfig:
    """The configuration of a command line. Defaults are the tiny model's, or with ``--model-path`` those for real ones.

    Raises:
        InvalidConfig: an unknown or ill-typed option, or an impossible combination, in one line.
    """
    return parse_with_defaults(arguments, PPORunConfig(), PRESETS, __doc__, "dataproto ppo")


if __name__ == "__main__":
    sys.exit(main())
