"""PPO (arXiv:1707.06347) with a critic: ``dataproto ppo``.

Data, model, reward and report are those of `recipes.grpo`; beside the policy, a critic of the same kind learns the value of each
token.
"""

import sys
from collections.abc import Sequence

from torch import Tensor

from dataproto import DataProto
from recipes.algorithms.advantages import whiten
from recipes.algorithms.losses import value_loss
from recipes.algorithms.options import critic_advantage
from recipes.configs.episodes_config import EpisodeRunConfig
from recipes.configs.ppo_config import PRESETS, TINY, ActorCriticConfig, PPOConfig, PPORunConfig, parse
from recipes.grpo import policy_loss, step_for
from recipes.options import exit_status
from recipes.run.dynamic_sampling import More
from recipes.run.metrics import merge_updates, timed
from recipes.run.phases import (
    Metrics,
    Progression,
    add_actor_log_probs,
    add_first_log_probs,
    engine_differences,
    entropy_coefficient,
    generate_and_score,
    log_probs_for_update,
    policy_log_probs,
    rows_to_learn,
    shape_rewards,
)
from recipes.run.policy_gradient import AlgorithmStep, run
from rollout.engine import SamplingParams
from workers import Roles
from workers.roles.critic import Values
from workers.training.forward_pass import LossFn

__all__ = ["PRESETS", "TINY", "PPOConfig", "PPORunConfig", "critic_loss", "main", "parse", "ppo_step"]


def critic_loss(config: ActorCriticConfig) -> LossFn:
    """The clipped error of values against returns."""

    def loss_fn(outputs: Values, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        return value_loss(outputs.values, data["values"], data["returns"], config.value_clip)

    return loss_fn


def ppo_step(
    roles: Roles,
    prompts: DataProto,
    config: ActorCriticConfig,
    sampling: SamplingParams,
    progression: Progression | None = None,
    more: More | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """One step: sample, score, update critic and policy. Returns the rollouts and the metrics.

    ``progression`` carries state between steps: their number, for the critic's warm-up, and an adaptive KL weight; ``more``
    returns further prompts, for dynamic sampling.
    """
    progression = progression or Progression(config.kl_controller())
    policy_learns = progression.steps >= config.critic_warmup
    log_probs = log_probs_for_update if policy_learns else policy_log_probs

    def model_columns(data: DataProto, metrics: Metrics) -> DataProto:
        columns = log_probs(roles, config, data, metrics)
        with timed(metrics, "values"):
            return columns | roles.critic.values(data)

    data, metrics = generate_and_score(roles, prompts, config, sampling, more, model_columns)  # config.n rows a prompt
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
    if policy_learns:
        metrics["actor/entropy_coeff"] = entropy_coefficient(data, config)
        if len(learned):
            loss, aggregation = policy_loss(config, metrics["actor/entropy_coeff"]), config.aggregation
            with timed(metrics, "update_actor"):
                updated = roles.actor.update_and_score(
                    learned, loss, config.minibatch, config.epochs, aggregation, entropy=True
                )
            add_first_log_probs(data, learned, updated.scores)
            metrics = merge_updates(metrics, updated.metrics) | engine_differences(learned, config, updated.scores)
            add_actor_log_probs(data, learned, config, updated.scores)
    for role in (roles.actor, roles.critic):  # also in a step that did not update them
        role.forget_features()
    roles.sync_weights()
    return data, metrics


def add_advantages(data: DataProto, config: ActorCriticConfig) -> None:
    """Adds the columns ``advantages`` and ``returns`` ``(B, R)``, from rewards and values."""
    advantages, data["returns"] = critic_advantage(config, data)
    data["advantages"] = whiten(advantages, data["response_mask"]) if config.whiten else advantages


def episode_step(config: EpisodeRunConfig) -> AlgorithmStep:
    """The step function of a run over episodes: of PPO if the advantage needs a critic, else of GRPO."""
    return ppo_step if config.algorithm.needs_critic else step_for(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit status; a user's mistake is one line on stderr."""
    with exit_status(arguments) as status:
        print(f"report: {run(parse(status.arguments), ppo_step)}")
    return status.code


if __name__ == "__main__":
    sys.exit(main())
