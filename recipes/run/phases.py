"""The phases of a step that policy-gradient recipes share; each adds to the step's metrics."""

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from dataproto.planning import cut_minibatches
from recipes.algorithms.correction import importance_weights, kept_tokens
from recipes.algorithms.mismatch import correction_metrics, difference_metrics
from recipes.algorithms.options import KL_ESTIMATORS, AlgorithmConfig, add_loss_columns, policy_loss
from recipes.algorithms.penalties import KLController, overlong_penalty, penalised_rewards
from recipes.run.dynamic_sampling import More, sample_informative_groups
from recipes.run.metrics import add_update, timed
from rollout.engine import SamplingParams
from workers import Roles
from workers.roles.reward import place_on_last_token

Metrics = MutableMapping[str, float]


@dataclass
class Progression:
    """What an algorithm carries from step to step, besides the models; saved with checkpoints."""

    kl: KLController
    steps: int = 0  # done

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "kl_coef": self.kl.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.kl.coef = int(state["steps"]), float(state["kl_coef"])


def roll_out(
    roles: Roles,
    prompts: DataProto,
    config: AlgorithmConfig,
    sampling: SamplingParams,
    more: More | None,
    metrics: Metrics,
) -> DataProto:
    """Samples and scores, ``config.n`` rows for each prompt; with dynamic sampling until all groups teach something."""

    def sample(prompts: DataProto) -> DataProto:
        with timed(metrics, "gen"):
            data: DataProto = roles.rollout.generate(prompts, replace(sampling, n=config.n))
        with timed(metrics, "reward"):
            data |= roles.reward.score(data)
        if config.needs_greedy:
            data["reward_baselines"] = greedy_scores(roles, prompts, sampling, metrics).repeat_interleave(config.n)
        return data

    generations = config.settings.dynamic_sampling
    if not generations:
        return sample(prompts)
    if more is None:
        raise InvalidConfig("dynamic sampling needs further prompts: pass the step what gives them")
    data, found = sample_informative_groups(sample, prompts, more, generations, config.filter_metric)
    metrics.update(found)
    return data


def greedy_scores(roles: Roles, prompts: DataProto, sampling: SamplingParams, metrics: Metrics) -> Tensor:
    """``(B,)`` float32: the scores of the greedy responses to the prompts."""
    with timed(metrics, "gen"):
        data: DataProto = roles.rollout.generate(prompts, replace(sampling, n=1, temperature=0.0))
    with timed(metrics, "reward"):
        scores: Tensor = roles.reward.score(data)["token_level_rewards"].sum(-1)
    metrics["reward/greedy_baseline"] = float(scores.mean())
    return scores


def add_log_probs(roles: Roles, data: DataProto, config: AlgorithmConfig, updates: int, metrics: Metrics) -> None:
    """Columns ``old_log_probs`` and ``ref_log_prob``, each where it is needed.

    With one update for each batch the old log-probs are those that the update computes itself. A batch that an older policy
    sampled has them already.
    """
    if config.skip_old_log_probs and "old_log_probs" not in data:
        data["old_log_probs"] = data["rollout_log_probs"]
    if config.needs_old_log_probs(updates) and "old_log_probs" not in data:
        with timed(metrics, "old_log_prob"):
            data["old_log_probs"] = roles.actor.log_probs(data, into="old_log_probs")["old_log_probs"]
    if config.settings.kl_coef:
        with timed(metrics, "ref"):
            data["ref_log_prob"] = roles.reference.log_probs(data, into="ref_log_prob")["ref_log_prob"]


def shape_rewards(
    data: DataProto, config: AlgorithmConfig, controller: KLController, max_tokens: int, metrics: Metrics
) -> None:
    """``token_level_rewards`` less what length and distance from the reference cost; what they were stays as
    ``token_level_scores``.
    """
    mask, rewards = data["response_mask"], data["token_level_rewards"]
    buffer = config.overlong_tokens(max_tokens)
    if buffer or config.kl_in_reward:
        data["token_level_scores"] = rewards
    if buffer:
        penalty = config.overlong_penalty * overlong_penalty(mask, max_tokens, buffer)
        rewards = rewards + place_on_last_token(penalty, mask)
        metrics["reward/overlong_penalty"] = float(penalty.mean())
    if config.kl_in_reward:
        kl = KL_ESTIMATORS[config.settings.kl](data["old_log_probs"], data["ref_log_prob"])
        metrics["actor/reward_kl_penalty_coeff"] = controller.coef
        rewards, mean = penalised_rewards(rewards, kl, mask, controller.coef)
        metrics["actor/reward_kl_penalty"] = mean
        controller.update(mean, rows=len(data))
    data["token_level_rewards"] = rewards


def rows_to_learn(data: DataProto, config: AlgorithmConfig, seed: tuple[int, int], metrics: Metrics) -> DataProto:
    """What the update is given: the rows with the columns that the loss reads, and corrected for the engine.

    Rejected tokens are 0 in the ``response_mask`` of the result, and so in no denominator; advantages count them still. A
    mini-batch of which nothing is left is left out, so the result may have no row.

    Args:
        seed: of what is drawn for the loss.
    """
    learned = data[:]
    if config.compares_engine:
        old, engine, mask = data["old_log_probs"], data["rollout_log_probs"], data["response_mask"]
        weights = kept = None
        if config.correction != "none":
            weights = importance_weights(old, engine, mask, config.correction, config.correction_limit)
            learned["rollout_is_weights"] = weights
        if config.rejection != "none":
            kept = kept_tokens(old, engine, mask, config.rejection, config.rejection_bounds)
            learned["response_mask"] = kept
            learned = without_empty_minibatches(learned, config.minibatch)
        metrics.update(correction_metrics(old, engine, mask, weights, kept) | difference_metrics(data, old))
    add_loss_columns(config, learned, seed)
    return learned


def without_empty_minibatches(data: DataProto, minibatch: int | None) -> DataProto:
    """The rows less those of mini-batches, of so many prompts, in which no token is left."""
    while len(data):
        parts = [np.arange(len(data))] if minibatch is None else cut_minibatches(data["uid"], minibatch)
        alive = [rows for rows in parts if bool(data["response_mask"][rows].any())]
        if len(alive) == len(parts):
            break
        data = data[np.sort(np.concatenate([*alive, np.zeros(0, dtype=np.int64)]))]
    return data


def entropy_coefficient(data: DataProto, config: AlgorithmConfig) -> float:
    """Weight of the entropy bonus for a batch of rollouts; with ``entropy_anneal`` the less, the more answers are right."""
    return config.entropy_coef * (1 - accuracy(data) if config.entropy_anneal else 1)


def update_actor(roles: Roles, data: DataProto, config: AlgorithmConfig, entropy_coef: float, metrics: Metrics) -> None:
    """The policy's update, if there is a row; the engine takes the new weights before it next generates.

    Args:
        data: what `rows_to_learn` gives.
        entropy_coef: what `entropy_coefficient` gives for all rollouts of the batch.
    """
    if len(data):
        with timed(metrics, "update_actor"):
            updated = roles.actor.update_and_score(
                data,
                policy_loss(config, entropy_coef),
                minibatch=config.minibatch,
                epochs=config.epochs,
                aggregation=config.settings.aggregation,
                entropy=True,
            )
        add_update(metrics, updated.metrics)
        if not config.compares_engine:  # else the whole batch has been compared
            metrics.update(engine_differences(data, updated.scores, config.minibatch))
    roles.sync_weights()
    metrics["actor/entropy_coeff"] = entropy_coef


def engine_differences(data: DataProto, seen: Tensor, minibatch: int | None) -> dict[str, float]:
    """How far the engine's log-probs are from the actor's before its update; see `difference_metrics`.

    The actor's are ``old_log_probs``. Where that column is missing or the engine's own, they are those that the update has
    ``seen (B, R)``, of the rows of its first mini-batch: the others met a policy that had learned. (Of a batch that an older
    policy sampled, the distance includes what has been learned since.)
    """
    if "rollout_log_probs" not in data:
        return {}
    if "old_log_probs" in data and not torch.equal(data["old_log_probs"], data["rollout_log_probs"]):
        return difference_metrics(data, data["old_log_probs"])
    if minibatch is None:
        return difference_metrics(data, seen)
    rows = cut_minibatches(data["uid"], minibatch)[0]
    return difference_metrics(data[rows], seen[rows])


def accuracy(data: DataProto) -> float:
    """Share of right answers, between 0 and 1: the mean of ``acc`` where the reward function gives one, else of the score."""
    column = data["acc"] if "acc" in data else data["score"]
    values = [float(value) for value in column if value is not None]
    return min(max(sum(values) / len(values), 0.0), 1.0) if values else 0.0
