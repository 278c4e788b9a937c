"""Training on preferred answers without a reward (DPO and its relatives, KTO): ``dataproto dpo``.

A batch has the answers of each prompt next to each other, and the prompt is computed once for both. The reference is the model
before training; with adapters (``--lora-rank``) it is their base, without a second model. Its log-probs are computed once for
each answer and kept in the run's directory. Left out of TRL's: divergences other than reverse KL, weights by the policy (WPO).
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dataproto import DataProto
from recipes.algorithms.function_files import in_users_function
from recipes.algorithms.options import check_shape
from recipes.algorithms.preferences import mismatch_kl
from recipes.algorithms.registry import PREFERENCES, arguments_by_name
from recipes.configs.dpo_config import PRESETS, TINY, DPOConfig, PreferenceConfig, parse
from recipes.options import training_command
from recipes.run.metrics import timed
from recipes.run.preferences import REFERENCE, ReferenceLogProbs, on_tokens, pair_metrics, preference_task
from recipes.run.supervised import SupervisedTask, learn_from, run_supervised, sent
from rollout.answers import Grouping
from workers import Roles

__all__ = ["PRESETS", "TINY", "DPOConfig", "PreferenceConfig", "dpo_step", "main", "parse"]

REFERENCE_FILE = "reference_log_probs.bin"
"""Where a run keeps the reference's log-probs."""


def dpo_step(
    roles: Roles, rows: DataProto, config: PreferenceConfig, reference: ReferenceLogProbs
) -> tuple[DataProto, dict[str, float]]:
    """One update on the loss of the preferences; returns the rows with ``actor_log_probs`` before it, and the metrics."""
    metrics: dict[str, float] = {}
    rows, kl = compared(roles, rows, reference, metrics)
    loss = partial(preference_loss, config=config, kl=kl)
    return rows, metrics | learn_from(roles, rows, loss, "seq-mean-token-mean")


def compared(
    roles: Roles, rows: DataProto, reference: ReferenceLogProbs, metrics: dict[str, float]
) -> tuple[DataProto, float]:
    """The rows to learn from with the reference's log-probs and, of answers without a partner, KTO's estimate of the KL."""
    with timed(metrics, "ref"):
        reference.add(roles, rows)
    if "mismatched" not in rows:
        return rows, 0.0
    others = rows[rows["mismatched"].bool()]
    if not len(others):  # of a single held-out row
        return rows, 0.0
    with timed(metrics, "old_log_prob"):
        log_probs = roles.actor.log_probs(sent(others), into="log_probs")["log_probs"].sum(1)
    return rows[~rows["mismatched"].bool()], mismatch_kl(log_probs - others[REFERENCE])


def preference_loss(
    outputs: Any, rows: DataProto, config: PreferenceConfig, kl: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each answer, on each of its tokens ``(B, R)``: of a pair, whose rows are neighbours, that of the pair.

    Metrics have TRL's names: ``rewards/{chosen,rejected,margins,accuracies}``, of answers ``rewards/{ratios,accuracies}``.
    """
    mask = rows["response_mask"]
    log_probs = torch.where(mask.bool(), outputs.log_probs, 0.0).sum(1)
    ratios, lengths = log_probs - rows[REFERENCE], mask.sum(1)
    columns: dict[str, Any] = {"ratios": ratios, "kl": kl, "lengths": lengths}
    if config.unpaired:
        columns["desirable"] = rows["desirable"]
        right = (ratios > kl) == rows["desirable"].bool()
        metrics = {
            "rewards/ratios": config.beta * ratios,
            "rewards/accuracies": right.float(),
            "rewards/kl": kl + 0 * ratios,
        }
    else:
        columns |= {"chosen_ratios": ratios[::2], "rejected_ratios": ratios[1::2]}
        columns |= {"chosen_lengths": lengths[::2], "rejected_lengths": lengths[1::2]}
        metrics = pair_metrics(config.beta * ratios[::2], config.beta * ratios[1::2])
    losses = losses_of(config, columns, like=ratios if config.unpaired else ratios[::2])
    return on_tokens(losses, metrics, mask)


def losses_of(config: PreferenceConfig, columns: dict[str, Any], like: Tensor) -> Tensor:
    """What the loss by its name, or a user's, gives for each pair or answer.

    Raises:
        InvalidColumn: it is not one number for each, as ``like``.
        UserFunctionFailed: a user's function raised.
    """
    name, function = f"algorithm.loss={config.loss}", PREFERENCES.find(config.loss).function
    with in_users_function(name, function):
        losses: Tensor = function(**arguments_by_name(name, function, columns, vars(config)))
    check_shape(name, losses, like, each="answer" if config.unpaired else "pair")
    return losses


def dpo_task(config: DPOConfig, model_path: str) -> SupervisedTask:
    """Preferred answers, the step, and the evaluation: loss, accuracy and margin of held-out answers."""
    reference = ReferenceLogProbs(config.run.output_dir / REFERENCE_FILE)

    def judge(roles: Roles, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        rows, kl = compared(roles, rows, reference, {})
        outputs = SimpleNamespace(log_probs=roles.actor.log_probs(sent(rows), into="log_probs")["log_probs"])
        return preference_loss(outputs, rows, config.algorithm, kl)

    step = partial(dpo_step, config=config.algorithm, reference=reference)
    grouping: Grouping = "answers" if config.algorithm.unpaired else "pairs"
    return preference_task(config, model_path, grouping, judge, step, "preferences")


main = training_command(parse, run_supervised, lambda _: dpo_task)
