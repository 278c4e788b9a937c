"""GRPO (DeepSeekMath, arXiv:2402.03300) and its relatives without a critic: ``dataproto grpo``.

With no arguments it draws problems, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With ``--preset``,
``--model-path`` and ``--data-path`` the same loop trains any checkpoint of a known family on prompts with images.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dataproto import DataProto
from recipes.algorithms.options import KL_ESTIMATORS, AlgorithmConfig, NamedLoss, outcome_advantage
from recipes.configs.grpo_config import PRESETS, TINY, GRPOConfig, GRPORunConfig, parse
from recipes.configs.shared.policy_gradient_config import PolicyGradientConfig
from recipes.options import exit_status
from recipes.run.dynamic_sampling import More, joined_parts
from recipes.run.metrics import timed
from recipes.run.phases import (
    Progression,
    add_actor_log_probs,
    add_first_log_probs,
    begin_scores,
    engine_differences,
    entropy_coefficient,
    generate_and_score,
    log_probs_for_update,
    policy_log_probs,
    rows_to_learn,
    shape_rewards,
    whole_update,
    with_scores,
)
from recipes.run.policy_gradient import AlgorithmStep, run
from rollout.engine import SamplingParams
from workers import Roles
from workers.model.packed_model import Outputs
from workers.training.forward_pass import LossFn

__all__ = ["PRESETS", "TINY", "GRPOConfig", "GRPORunConfig", "grpo_step", "main", "parse", "policy_loss"]

SEEN = "_seen_log_probs"
"""The column with the log-probs that the update computed before it changed the policy, ``(B, R)``."""


def policy_loss(config: AlgorithmConfig, entropy_coef: float) -> LossFn:
    """The loss that ``config.loss`` names, with importance weights, entropy bonus and KL term where they are set."""
    named, kl_coef, kl_in_loss = NamedLoss.find(config), config.kl_coef, config.kl_in_loss
    estimate_kl = KL_ESTIMATORS[config.kl]

    def loss_fn(outputs: Outputs, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        given = named.arguments(outputs, data)
        with named.guarded():
            loss, metrics = named.function(**given)  # each (B, R)
        named.check(outputs, loss, *metrics.values())
        if "rollout_is_weights" in data:
            loss = loss * data["rollout_is_weights"]
        metrics = metrics | {"actor/pg_loss": loss, "actor/entropy": outputs.entropy}
        if entropy_coef:
            loss = loss - entropy_coef * outputs.entropy
        if kl_in_loss:
            metrics["actor/kl_loss"] = estimate_kl(outputs.log_probs, data["ref_log_prob"])
            loss = loss + kl_coef * metrics["actor/kl_loss"]
        return loss, metrics

    return loss_fn


def grpo_step(
    roles: Roles,
    prompts: DataProto,
    config: AlgorithmConfig,
    sampling: SamplingParams,
    progression: Progression | None = None,
    more: More | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """One step: sample, score, compare, update. Returns the rollouts and the metrics.

    ``progression`` carries state between steps, such as an adaptive KL weight; ``more`` returns further prompts, for dynamic
    sampling.
    """
    progression = progression or Progression(config.kl_controller())
    log_probs = partial(log_probs_for_update, roles, config)  # computed while a reward function scores
    data, metrics = generate_and_score(roles, prompts, config, sampling, more, log_probs)  # config.n rows a prompt
    with timed(metrics, "adv"):
        data, shaped = shape_rewards(data, config, progression.kl, sampling.max_tokens)
        data["advantages"] = outcome_advantage(config, data)
        learned, corrected = rows_to_learn(data, config, seed=(sampling.seed, progression.steps))
    metrics |= shaped | corrected | {"actor/entropy_coeff": entropy_coefficient(data, config)}
    if len(learned):
        loss, aggregation = policy_loss(config, metrics["actor/entropy_coeff"]), config.aggregation
        with timed(metrics, "update_actor"):
            updated = roles.actor.update_and_score(
                learned, loss, config.minibatch, config.epochs, aggregation, entropy=True
            )
        add_first_log_probs(data, learned, updated.scores)
        metrics |= updated.metrics | engine_differences(learned, config, updated.scores)
        add_actor_log_probs(data, learned, config, updated.scores)
    roles.sync_weights()
    progression.steps += 1
    return data, metrics


def grpo_step_in_parts(
    roles: Roles,
    prompts: DataProto,
    config: AlgorithmConfig,
    sampling: SamplingParams,
    progression: Progression | None = None,
    more: More | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """As `grpo_step`, in one optimizer step whose gradients begin with the first groups, while the others are decoded.

    What a group adds must not depend on other groups: see `AlgorithmConfig.needs_whole_batches`.
    """
    progression = progression or Progression(config.kl_controller())
    config = replace(config, minibatch=None)  # the batch is one mini-batch: nothing waits for the rows of a later one
    loss, aggregation = policy_loss(config, config.entropy_coef), config.aggregation
    seed = (sampling.seed, progression.steps)
    metrics: dict[str, float] = {}
    parts: list[DataProto] = []
    groups = roles.rollout.in_parts(prompts, replace(sampling, n=config.n))
    with whole_update(roles.actor):
        while (part := next_part(groups, metrics)) is not None:
            part = score_part(roles, part, config, metrics)
            shaped, _ = shape_rewards(part, config, progression.kl, sampling.max_tokens)
            shaped["advantages"] = outcome_advantage(config, shaped)
            learned, _ = rows_to_learn(shaped, config, seed)
            part[SEEN] = torch.zeros(part["response_mask"].shape)
            if len(learned):
                with timed(metrics, "update_actor"):
                    part[SEEN] = roles.actor.accumulate(learned, loss, aggregation=aggregation, entropy=True).scores
            parts.append(part)
        data = joined_parts(parts)
        seen = data.pop([SEEN])[SEEN]
        data, found = shape_rewards(data, config, progression.kl, sampling.max_tokens)
        data["advantages"] = outcome_advantage(config, data)
        learned, corrected = rows_to_learn(data, config, seed)
        metrics |= found | corrected | {"actor/entropy_coeff": config.entropy_coef}
        if len(learned):
            with timed(metrics, "update_actor"):
                metrics |= roles.actor.finish_update()
    if len(learned):
        metrics |= engine_differences(learned, config, seen)
        add_actor_log_probs(data, learned, config, seen)
    roles.sync_weights()
    progression.steps += 1
    return data, metrics


def next_part(parts: Iterator[DataProto], metrics: dict[str, float]) -> DataProto | None:
    """The next part, or ``None`` at the end; adds the time for which it was waited."""
    with timed(metrics, "gen"):
        return next(parts, None)


def score_part(roles: Roles, data: DataProto, config: AlgorithmConfig, metrics: dict[str, float]) -> DataProto:
    """The rows with rewards, and with the log-probs that one update needs."""
    log_probs = partial(policy_log_probs, roles, config)
    return with_scores(data, begin_scores(roles, data, metrics), config, metrics, log_probs)


def step_for(config: PolicyGradientConfig) -> AlgorithmStep:
    """The step function of a run of GRPO."""
    return grpo_step_in_parts if config.rollout.early_update else grpo_step


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit status; a user's mistake is one line on stderr."""
    with exit_status(arguments) as status:
        print(f"report: {run(config := parse(status.arguments), step_for(config))}")
    return status.code


if __name__ == "__main__":
    sys.exit(main())
