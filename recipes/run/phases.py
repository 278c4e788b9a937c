"""The phases of a step that policy-gradient recipes share. Each returns its rows and its metrics.

Dimension letters: B rows, R response tokens.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from dataproto.planning import cut_minibatches
from recipes.algorithms.correction import importance_weights, kept_tokens
from recipes.algorithms.mismatch import correction_metrics, difference_metrics
from recipes.algorithms.options import KL_ESTIMATORS, AlgorithmConfig, add_loss_columns
from recipes.algorithms.penalties import KLController, overlong_penalty, penalised_rewards
from recipes.run.dynamic_sampling import More, sample_informative_groups
from recipes.run.metrics import timed
from rollout.engine import SamplingParams
from workers import Roles
from workers.roles.reward import EARLY_RESULTS, place_on_last_token

Metrics = dict[str, float]
ModelColumns: TypeAlias = Callable[[DataProto, Metrics], DataProto]
"""Computes columns of sampled rows that need no rewards, and adds its metrics."""


@dataclass
class Progression:
    """What an algorithm carries from step to step, besides the models; saved with checkpoints."""

    kl: KLController
    steps: int = 0  # done

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "kl_coef": self.kl.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.kl.coef = int(state["steps"]), float(state["kl_coef"])


def generate_and_score(
    roles: Roles,
    prompts: DataProto,
    config: AlgorithmConfig,
    sampling: SamplingParams,
    more: More | None = None,
    model_columns: ModelColumns | None = None,
) -> tuple[DataProto, Metrics]:
    """Samples ``config.n`` responses to each prompt and scores them.

    Dynamic sampling repeats this until the samples of every group differ in their score. ReMax adds the column
    ``reward_baselines (B,)``, the scores of greedy responses. With ``skip_old_log_probs`` the engine's log-probs are also the
    column ``old_log_probs``.

    Args:
        more: returns further prompts; dynamic sampling needs it.
        model_columns: columns to add, such as `log_probs_for_update`. A reward function in processes of its own scores the rows
            meanwhile; dynamic sampling chooses them by their scores first.

    Raises:
        InvalidConfig: dynamic sampling without ``more``.
    """
    metrics: Metrics = {}

    def sample(prompts: DataProto, model_columns: ModelColumns | None = None) -> DataProto:
        with timed(metrics, "gen"):
            data: DataProto = roles.rollout.generate(prompts, replace(sampling, n=config.n))
        scores, baselines = begin_scores(roles, data, metrics), None
        if EARLY_RESULTS in data:
            metrics["reward/early_ratio"] = sum(each is not None for each in data[EARLY_RESULTS]) / len(data)
            data.pop(non_tensor_batch_keys=[EARLY_RESULTS])
        if config.needs_greedy:
            with timed(metrics, "gen"):
                greedy: DataProto = roles.rollout.generate(prompts, replace(sampling, n=1, temperature=0.0))
            baselines = begin_scores(roles, greedy, metrics)
        data = with_scores(data, scores, config, metrics, model_columns)
        if baselines is not None:
            with timed(metrics, "reward"):
                found: Tensor = baselines.result()["token_level_rewards"].sum(-1)
            metrics["reward/greedy_baseline"] = float(found.mean())
            data["reward_baselines"] = found.repeat_interleave(config.n)
        return data

    generations = config.dynamic_sampling
    if not generations:
        return sample(prompts, model_columns), metrics
    if more is None:
        raise InvalidConfig("dynamic sampling needs further prompts: pass the step a function `more`")
    data, found = sample_informative_groups(sample, prompts, more, generations, config.filter_metric)
    metrics |= found
    return data if model_columns is None else data | model_columns(data, metrics), metrics


def begin_scores(roles: Roles, data: DataProto, metrics: Metrics) -> "Future[DataProto]":
    """The future of the rows' scores, which is done unless a reward function scores in processes of its own."""
    with timed(metrics, "reward"):
        if roles.scores_apart:
            coming: Future[DataProto] = roles.reward.submit("score", data)
            return coming
        done: Future[DataProto] = Future()
        done.set_result(roles.reward.score(data))
        return done


def with_scores(
    data: DataProto,
    scores: "Future[DataProto]",
    config: AlgorithmConfig,
    metrics: Metrics,
    model_columns: ModelColumns | None,
) -> DataProto:
    """The rows with their scores and the columns of ``model_columns``, which are computed before it waits for the scores.

    Raises:
        Exception: an error of the reward; if it is known already, before ``model_columns`` is called.
    """

    def join() -> None:
        with timed(metrics, "reward"):
            data.union(scores.result())

    data = data[:]
    known = scores.done()
    if known:
        join()
    if config.skip_old_log_probs and "old_log_probs" not in data:
        data["old_log_probs"] = data["rollout_log_probs"]
    if model_columns is not None:
        data.union(model_columns(data, metrics))
    if not known:
        join()
    return data


def policy_log_probs(roles: Roles, config: AlgorithmConfig, data: DataProto, metrics: Metrics) -> DataProto:
    """The columns ``old_log_probs`` and ``ref_log_prob`` ``(B, R)``, where the step needs them of all rows and ``data`` has none.

    Rows that the actor and the reference score are prepared once. What only the update reads is left to `minibatch_log_probs`.
    """
    needs_old = config.needs_old_log_probs and "old_log_probs" not in data
    if needs_old and config.needs_reference:
        return _both_log_probs(roles, data, metrics)
    if needs_old:
        with timed(metrics, "old_log_prob"):
            return roles.actor.log_probs(data, into="old_log_probs")
    if config.needs_reference and not (config.reference_in_update_only and "old_log_probs" not in data):
        with timed(metrics, "ref"):
            return roles.reference.log_probs(data, into="ref_log_prob")
    return DataProto()


def minibatch_log_probs(roles: Roles, config: AlgorithmConfig, data: DataProto, metrics: Metrics) -> DataProto:
    """The columns that only the update reads: ``old_log_probs (B, R)`` of the mini-batches after the first, and ``ref_log_prob
    (B, R)`` where the actor scores the same rows.

    The update meets its first mini-batch with the policy that is still the old one, so the loss takes the log-probs of its own
    pass there, and ``old_log_probs`` is NaN in these rows. Both are NaN in rows that the update leaves out.
    """
    if "old_log_probs" in data or config.minibatch is None:
        return DataProto()
    rows = rows_with_tokens(data, config.minibatch)
    learned = data[rows]
    later = cut_minibatches(learned["uid"], config.minibatch)[1:] if len(rows) else []
    both = config.reference_in_update_only and "ref_log_prob" not in data and len(rows) > 0
    if later and both:
        found = _both_log_probs(roles, learned, metrics, config.minibatch)
    elif later:
        chosen = np.sort(np.concatenate(later))
        with timed(metrics, "old_log_prob"):
            found = roles.actor.log_probs(learned[chosen], into="old_log_probs")
        rows = rows[chosen]
    elif both:
        with timed(metrics, "ref"):
            found = roles.reference.log_probs(learned, into="ref_log_prob")
    else:
        return DataProto()
    columns = {name: torch.full(data["response_mask"].shape, torch.nan) for name in found.names()}
    for name, column in columns.items():
        column[torch.from_numpy(rows)] = found[name]
    return DataProto.from_dict(columns)


def log_probs_for_update(roles: Roles, config: AlgorithmConfig, data: DataProto, metrics: Metrics) -> DataProto:
    """The columns of `policy_log_probs` and `minibatch_log_probs`."""
    columns = policy_log_probs(roles, config, data, metrics)
    return columns | minibatch_log_probs(roles, config, data | columns, metrics)


def _both_log_probs(roles: Roles, data: DataProto, metrics: Metrics, minibatch: int | None = None) -> DataProto:
    """The columns of `ReferenceWorker.log_probs_with_actor`. The time of the call is shared out as the passes took theirs."""
    start = time.perf_counter()
    columns, seconds = roles.reference.log_probs_with_actor(data, minibatch=minibatch)
    share = (time.perf_counter() - start) / sum(seconds.values())
    for name in seconds:
        metrics[f"timing_s/{name}"] = metrics.get(f"timing_s/{name}", 0.0) + share * seconds[name]
    return columns


def shape_rewards(
    data: DataProto, config: AlgorithmConfig, controller: KLController, max_tokens: int
) -> tuple[DataProto, Metrics]:
    """Subtracts the overlong penalty and the KL penalty from ``token_level_rewards (B, R)``, where they are set.

    The rewards before that become the column ``token_level_scores (B, R)``. Each turn of an episode is a response of its own,
    whose length counts and whose last token gets the penalty. The weight of an adaptive KL penalty follows the KL of these rows.

    Args:
        max_tokens: the longest response, or turn of an episode, in tokens.
    """
    metrics: Metrics = {}
    mask, rewards = data["response_mask"], data["token_level_rewards"]
    buffer = config.overlong_tokens(max_tokens)
    if not buffer and not config.kl_in_reward:
        return data, metrics
    shaped = data[:]
    shaped["token_level_scores"] = rewards
    if buffer:
        penalties = torch.zeros_like(rewards)
        for turn in _turns(data):
            penalty = config.overlong_penalty * overlong_penalty(turn, max_tokens, buffer)
            penalties = penalties + place_on_last_token(penalty, turn)
        rewards = rewards + penalties
        metrics["reward/overlong_penalty"] = float(penalties.sum(1).mean())
    if config.kl_in_reward:
        kl = KL_ESTIMATORS[config.kl](data["old_log_probs"], data["ref_log_prob"])
        metrics["actor/reward_kl_penalty_coeff"] = controller.coef
        rewards, mean = penalised_rewards(rewards, kl, mask, controller.coef)
        metrics["actor/reward_kl_penalty"] = mean
        controller.update(mean, rows=len(data))
    shaped["token_level_rewards"] = rewards
    return shaped, metrics


def _turns(data: DataProto) -> list[Tensor]:
    """The sampled tokens ``(B, R)`` of each turn; all of them in rows that are no episodes."""
    mask = data["response_mask"]
    if "turn" not in data:
        return [mask]
    sampled = mask.bool()
    return [sampled & (data["turn"] == number) for number in data["turn"][sampled].unique().tolist()]


def rows_to_learn(data: DataProto, config: AlgorithmConfig, seed: tuple[int, int]) -> tuple[DataProto, Metrics]:
    """The rows of the update, with all columns that the loss reads, corrected for the engine's log-probs if that is set.

    A rejected token has 0 in ``response_mask``, so no denominator counts it; its advantage still entered the statistics of its
    group. A mini-batch with no token left, or whose episodes all failed, is removed, so the result may have no rows. ``data``
    stays as it is.

    Args:
        seed: of the random choices that a loss makes.
    """
    metrics: Metrics = {}
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
        metrics = correction_metrics(old, engine, mask, weights, kept) | difference_metrics(data, old)
    learned = learned[rows_with_tokens(learned, config.minibatch)]
    add_loss_columns(config, learned, seed)
    return learned, metrics


def rows_with_tokens(data: DataProto, minibatch: int | None) -> np.ndarray:
    """The rows ``(N,)`` int64 without those of mini-batches (of ``minibatch`` prompts each) in which no token is left."""
    rows, names, has_token = np.arange(len(data)), np.asarray(data["uid"]), data["response_mask"].any(1).numpy()
    while len(rows):
        parts = [np.arange(len(rows))] if minibatch is None else cut_minibatches(names[rows], minibatch)
        alive = [part for part in parts if has_token[rows[part]].any()]
        if len(alive) == len(parts):
            break
        rows = rows[np.sort(np.concatenate([*alive, np.zeros(0, dtype=np.int64)]))]
    return rows


def entropy_coefficient(data: DataProto, config: AlgorithmConfig) -> float:
    """Weight of the entropy bonus for a batch of rollouts; with ``entropy_anneal`` it is multiplied by 1 - accuracy."""
    return config.entropy_coef * (1 - accuracy(data) if config.entropy_anneal else 1)


def add_first_log_probs(data: DataProto, learned: DataProto, seen: Tensor) -> None:
    """Completes the column ``old_log_probs`` that `minibatch_log_probs` has begun.

    If both batches have the same rows, ``data`` gets the columns too; else it loses those that have no values for some rows.

    Args:
        seen: ``(B, R)``, the log-probs that the update computed before it changed the policy.
    """
    if "old_log_probs" in learned:
        old: Tensor = learned["old_log_probs"]
        learned["old_log_probs"] = old.where(~old.isnan().all(1, keepdim=True), seen)
    for name in ("old_log_probs", "ref_log_prob"):
        if name in learned and len(learned) == len(data):
            data[name] = learned[name]
        elif name in data and bool(data[name].isnan().all(1).any()):
            data.pop([name])


def before_update(data: DataProto, config: AlgorithmConfig, seen: Tensor) -> tuple[Tensor, np.ndarray]:
    """The actor's log-probs before its update, ``(B, R)``, and the rows in which they hold.

    They are ``old_log_probs``. Without that column, or if it holds the engine's own, they are the ones that the update computed,
    of the rows of its first mini-batch: the later mini-batches met a policy that had already learned.

    Args:
        seen: ``(B, R)``, the log-probs that the update computed before it changed the policy.
    """
    every_row = np.arange(len(data))
    if "old_log_probs" in data:
        old: Tensor = data["old_log_probs"]
        if "rollout_log_probs" not in data or not torch.equal(old, data["rollout_log_probs"]):
            return old, every_row
    return seen, every_row if config.minibatch is None else cut_minibatches(data["uid"], config.minibatch)[0]


def engine_differences(data: DataProto, config: AlgorithmConfig, seen: Tensor) -> Metrics:
    """How far the engine's log-probs are from the actor's before its update; see `difference_metrics`.

    It covers the rows that `before_update` gives. (For a batch that an older policy sampled, the distance includes the updates
    since then.) Empty if `rows_to_learn` has compared all rows already.

    Args:
        seen: ``(B, R)``, the log-probs that the update computed before it changed the policy.
    """
    if config.compares_engine or "rollout_log_probs" not in data:
        return {}
    log_probs, rows = before_update(data, config, seen)
    return difference_metrics(data[rows], log_probs[rows])


def add_actor_log_probs(data: DataProto, learned: DataProto, config: AlgorithmConfig, seen: Tensor) -> None:
    """Adds the column ``actor_log_probs (B, R)`` for reports: `before_update`, NaN in the other rows.

    ``data`` stays as it is where the update left rows out, which only a comparison of ``old_log_probs`` does.

    Args:
        learned: the rows of the update.
        seen: of these rows, the log-probs that the update computed before it changed the policy.
    """
    if len(learned) == len(data):
        log_probs, rows = before_update(learned, config, seen)
        known = torch.full_like(log_probs, torch.nan)
        known[rows] = log_probs[rows]
        data["actor_log_probs"] = known


def accuracy(data: DataProto) -> float:
    """Share of right answers, between 0 and 1: the mean of ``acc`` where the reward function gives one, else of the score."""
    column = data["acc"] if "acc" in data else data["score"]
    values = [float(value) for value in column if value is not None]
    return min(max(sum(values) / len(values), 0.0), 1.0) if values else 0.0


@contextmanager
def whole_update(actor: Any) -> Iterator[None]:
    """The actor keeps nothing of an update in parts that an error ends in here, or that an interrupted step has left."""
    actor.drop_update()
    try:
        yield
    except Exception:
        with suppress(Exception):  # of a group that the error has closed
            actor.drop_update()
        raise
