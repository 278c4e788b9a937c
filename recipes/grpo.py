"""GRPO (DeepSeekMath, arXiv:2402.03300) and its relatives without a critic: ``dataproto grpo``.

With no arguments it draws problems, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With ``--preset``,
``--model-path`` and ``--data-path`` the same loop trains any checkpoint of a known family on prompts with images.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dataproto import DataProto
from recipes.algorithms.function_files import in_users_function
from recipes.algorithms.kl import KL_ESTIMATORS
from recipes.algorithms.options import AlgorithmConfig, NamedLoss
from recipes.configs.grpo_config import PRESETS, TINY, GRPOConfig, GRPORunConfig, parse
from recipes.configs.shared.policy_gradient_config import PolicyGradientConfig
from recipes.options import training_command
from recipes.run.metrics import timed
from recipes.run.phases import (
    StepState,
    begin_scores,
    in_order_of,
    joined_parts,
    log_probs_before_update,
    policy_log_probs,
    sample,
    whole_update,
    with_advantages,
)
from recipes.run.policy_gradient import AlgorithmStep, run
from rollout.engine import SamplingParams
from workers import Roles
from workers.model.packed_model import Outputs
from workers.training.forward_pass import LossFn
from workers.training.loss_sums import pair_of

__all__ = ["PRESETS", "TINY", "GRPOConfig", "GRPORunConfig", "grpo_step", "main", "parse", "policy_loss"]


def policy_loss(config: AlgorithmConfig) -> LossFn:
    """The loss that ``config.loss`` names, with importance weights, entropy bonus and KL term where they are set."""
    named, bonus, kl_coef, kl_in_loss = NamedLoss.find(config), config.entropy_coef, config.kl_coef, config.kl_in_loss
    estimate_kl = KL_ESTIMATORS[config.kl]

    def loss_fn(outputs: Outputs, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        given = named.arguments(outputs, data)
        with in_users_function(named.name, named.function):
            loss, metrics = pair_of(named.function(**given))  # each (B, R)
        named.check(outputs, loss, *metrics.values())
        if "rollout_is_weights" in data:
            loss = loss * data["rollout_is_weights"]
        metrics = metrics | {"actor/pg_loss": loss, "actor/entropy": outputs.entropy}
        if bonus:
            loss = loss - bonus * outputs.entropy
        if kl_in_loss:
            metrics["actor/kl_loss"] = estimate_kl(outputs.log_probs, data["ref_log_prob"])
            loss = loss + kl_coef * metrics["actor/kl_loss"]
        return loss, metrics

    return loss_fn


def grpo_step(
    roles: Roles, prompts: DataProto, config: AlgorithmConfig, sampling: SamplingParams, state: StepState | None = None
) -> tuple[DataProto, dict[str, float]]:
    """One step: sample, score, compare, update. Returns the rollouts and the metrics.

    ``state`` is what goes from step to step, see `StepState`; by default that of a first step.
    """
    state, metrics = state or StepState(), dict[str, float]()
    data, scores = sample(roles, prompts, config, sampling, state, metrics)  # config.n rows a prompt
    data |= policy_log_probs(roles, data, config, metrics)  # while reward functions in other processes score the rows
    data |= scores()
    data, learned = with_advantages(data, config, sampling, state, metrics)
    if len(learned):
        with timed(metrics, "update_actor"):
            found = roles.actor.update_and_score(
                learned, policy_loss(config), config.minibatch, config.epochs, config.aggregation, entropy=True
            )
        metrics |= found.metrics | log_probs_before_update(data, learned, config, found.scores)
    roles.sync_weights()
    state.steps += 1
    return data, metrics


def grpo_step_in_parts(
    roles: Roles, prompts: DataProto, config: AlgorithmConfig, sampling: SamplingParams, state: StepState | None = None
) -> tuple[DataProto, dict[str, float]]:
    """As `grpo_step`; the first groups are scored and learned from while engines of their own decode the others.

    Gradients add up to those of one optimizer step. Where an update needs the whole batch (`AlgorithmConfig.needs_whole_batch`),
    groups are only scored early.
    """
    state, metrics = state or StepState(), dict[str, float]()
    learns_early = not config.needs_whole_batch(len(prompts))
    groups = roles.rollout.in_parts(prompts, replace(sampling, n=config.n))
    parts: list[DataProto] = []
    with whole_update(roles.actor):
        while (part := next_part(groups, metrics)) is not None:
            scores = begin_scores(roles, part, metrics)
            if config.skip_old_log_probs:
                part["old_log_probs"] = part["rollout_log_probs"]
            part |= policy_log_probs(roles, part, config, metrics, len(prompts))
            part |= scores()
            if learns_early:
                add_gradients(roles, part, config, sampling, state, metrics)
            parts.append(part)
        data = in_order_of(prompts, joined_parts(parts))
        data, learned = with_advantages(data, config, sampling, state, metrics)
        if len(learned):
            with timed(metrics, "update_actor"):
                if learns_early:
                    metrics |= roles.actor.finish_update()
                    seen = learned["actor_log_probs"]
                else:
                    found = roles.actor.update_and_score(
                        learned, policy_loss(config), config.minibatch, config.epochs, config.aggregation, entropy=True
                    )
                    metrics |= found.metrics
                    seen = found.scores
            metrics |= log_probs_before_update(data, learned, config, seen)
    roles.sync_weights()
    state.steps += 1
    return data, metrics


def add_gradients(
    roles: Roles,
    part: DataProto,
    config: AlgorithmConfig,
    sampling: SamplingParams,
    state: StepState,
    metrics: dict[str, float],
) -> None:
    """Adds the gradients of a part of a batch, and to the part the column ``actor_log_probs (B, R)``."""
    _, learned = with_advantages(part, config, sampling, state, {})
    part["actor_log_probs"] = torch.full(part["response_mask"].shape, torch.nan)
    if len(learned):
        with timed(metrics, "update_actor"):
            found = roles.actor.accumulate(learned, policy_loss(config), aggregation=config.aggregation, entropy=True)
        part["actor_log_probs"] = found.scores


def next_part(parts: Iterator[DataProto], metrics: dict[str, float]) -> DataProto | None:
    """The next part, or ``None`` at the end; adds the time for which it was waited."""
    with timed(metrics, "gen"):
        return next(parts, None)


def step_for(config: PolicyGradientConfig) -> AlgorithmStep:
    """The step function of a run of GRPO."""
    return grpo_step_in_parts if config.rollout.staleness == 0 and config.layout.rollout else grpo_step


main = training_command(parse, run, step_for)
