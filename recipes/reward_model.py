"""A reward model that learns from preferred answers (Bradley-Terry): ``dataproto reward-model``.

The score of an answer is the product of the state at its end and one vector, the critic's value head on the policy's model. Both
answers of a pair share their prompt, which is computed once. The checkpoint, ``global_step_N/actor/huggingface`` of the run, is a
reward as ``--reward classifier:CHECKPOINT``.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from dataproto import DataProto
from recipes.algorithms.preferences import bradley_terry_loss
from recipes.configs.reward_model_config import PRESETS, TINY, RewardModelConfig, parse
from recipes.options import training_command
from recipes.run.metrics import timed
from recipes.run.preferences import on_tokens, pair_metrics, preference_task
from recipes.run.supervised import SupervisedTask, run_supervised, sent
from workers import Roles
from workers.training.checkpoint import latest_checkpoint

__all__ = ["PRESETS", "TINY", "RewardModelConfig", "main", "parse", "ranking_loss", "reward_model_step"]


def reward_model_step(roles: Roles, rows: DataProto) -> tuple[DataProto, dict[str, float]]:
    """One update on the negative log-likelihood of the preferences; returns the rows and the metrics."""
    metrics: dict[str, float] = {}
    with timed(metrics, "update_actor"):
        metrics |= roles.actor.update(sent(rows), ranking_loss, aggregation="seq-mean-token-mean")
    metrics["train/loss"] = metrics.pop("actor/loss")
    return rows, metrics


def ranking_loss(outputs: Any, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each pair, whose rows are neighbours, on each token ``(B, R)``; each answer has one score, at its end."""
    mask = rows["response_mask"]
    scores = (outputs.values * mask).sum(1)
    chosen, rejected = scores[::2], scores[1::2]
    return on_tokens(bradley_terry_loss(chosen, rejected), pair_metrics(chosen, rejected), mask)


def ranking_task(config: RewardModelConfig, model_path: str) -> SupervisedTask:
    """Pairs of answers, the step, and the evaluation: loss, accuracy and margin of held-out pairs."""

    def judge(roles: Roles, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        return ranking_loss(SimpleNamespace(values=roles.actor.values(sent(rows))["values"]), rows)

    return preference_task(config, model_path, "scored", judge, reward_model_step, "scores")


def train(config: RewardModelConfig) -> Path:
    """Trains by the options, names the checkpoint as a reward, and returns the path of the report."""
    report = run_supervised(config, ranking_task)
    if (latest := latest_checkpoint(config.run.output_dir)) is not None:
        print(f"reward: --reward classifier:{latest[1] / 'actor' / 'huggingface'}")
    return report


main = training_command(parse, train)
