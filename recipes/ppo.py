"""PPO (arXiv:1707.06347) with a critic: ``dataproto ppo``.

Data, model, reward and report are those of `recipes.grpo`; a critic of the same kind learns the value of each
token.
"""

from dataclasses import replace

from torch import Tensor

from dataproto import DataProto
from recipes.algorithms.losses import value_loss
from recipes.configs.episodes_config import EpisodeRunConfig
from recipes.configs.ppo_config import PRESETS, TINY, ActorCriticConfig, PPOConfig, PPORunConfig, parse
from recipes.grpo import policy_loss, step_for
from recipes.options import training_command
from recipes.run.metrics import merge_updates, timed
from recipes.run.phases import StepState, log_probs_before_update, policy_log_probs, sample, with_advantages
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
    state: StepState | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """One step: sample, score, update critic and policy. Returns the rollouts and the metrics.

    ``state`` is what goes from step to step, see `StepState`; the number of steps decides whether the critic still warms up.
    """
    state, metrics = state or StepState(), dict[str, float]()
    policy_learns = state.steps >= config.critic_warmup
    data, scores = sample(roles, prompts, config, sampling, state, metrics)  # config.n rows a prompt
    scored = config if policy_learns else replace(config, minibatch=None, epochs=1)  # nothing reads the policy's update
    data |= policy_log_probs(roles, data, scored, metrics)
    with timed(metrics, "values"):
        data |= roles.critic.values(data)
    data |= scores()
    data, learned = with_advantages(data, config, sampling, state, metrics)
    if len(learned):
        with timed(metrics, "update_critic"):
            found = roles.critic.update(learned, critic_loss(config), config.minibatch, config.critic_epochs)
        metrics = merge_updates(metrics, found)
    if len(learned) and policy_learns:
        with timed(metrics, "update_actor"):
            updated = roles.actor.update_and_score(
                learned, policy_loss(config), config.minibatch, config.epochs, config.aggregation, entropy=True
            )
        metrics = merge_updates(metrics, updated.metrics)
        metrics |= log_probs_before_update(data, learned, config, updated.scores)
    for role in (roles.actor, roles.critic):  # also in a step that did not update them
        role.forget_features()
    roles.sync_weights()
    state.steps += 1
    return data, metrics


def episode_step(config: EpisodeRunConfig) -> AlgorithmStep:
    """The step function of a run over episodes: of PPO if the advantage needs a critic, else of GRPO."""
    return ppo_step if config.algorithm.needs_critic else step_for(config)


main = training_command(parse, run, lambda _: ppo_step)
