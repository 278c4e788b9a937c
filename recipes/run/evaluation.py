"""Answers to held-out problems, greedy or several samples, scored and kept for the report."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.configs.shared.run_config import Measured
from recipes.data.loader import EvaluationLoader
from recipes.rewards.geometry3k import boxed_answer
from recipes.run.metrics import last_rows, timed, validation_metrics
from recipes.watch.rollout_files import RolloutSample, reward_parts, rollout_samples, save_rollouts
from rollout.engine import SamplingParams
from workers import Roles

Evaluate = Callable[[Roles, int], dict[str, float]]  # roles, number of the step -> metrics

REPORTED_ROLLOUTS = 24  # of each evaluation


def evaluate_samples(
    roles: Roles,
    held_out: Iterable[DataProto] | Mapping[str, Iterable[DataProto]],
    sampling: SamplingParams,
    output_dir: Path,
    step: int,
) -> tuple[dict[str, float], list[DataProto]]:
    r"""Answers held-out problems with ``sampling.n`` samples each; keeps some in ``output_dir/rollouts`` for the report.

    Args:
        held_out: of several sets, each by its name, which then is the source in the metrics of all its rows; a set named ""
            keeps their own.

    Returns:
        The metrics of `recipes.run.metrics.validation_metrics`, and the scored batches. Majority votes count what is in the last
        ``\boxed{}`` of a response.
    """
    metrics: dict[str, float] = {}
    batches: list[DataProto] = []
    sources: list[str] = []
    reported: list[RolloutSample] = []
    sets = held_out if isinstance(held_out, Mapping) else {"": held_out}
    with timed(metrics, "testing"):
        for number, (name, rows) in enumerate(sets.items(), 1):
            most = REPORTED_ROLLOUTS * number // len(sets)
            for prompts in rows:
                data = roles.rollout.generate(prompts, sampling)
                data |= roles.reward.score(data)
                batches.append(last_rows(data))
                sources += [name or source for source in batches[-1]["data_source"]]
                samples = rollout_samples(batches[-1][:: sampling.n], most - len(reported))  # the first of each problem
                reported += [
                    replace(each, key=f"{name} {each.key}".strip(), source=name or each.source) for each in samples
                ]
    save_rollouts(output_dir, step, reported)
    parts = [reward_parts(data) for data in batches]
    columns = {
        name: [value for data, part in zip(batches, parts, strict=True) for value in part.get(name, [None] * len(data))]
        for name in dict.fromkeys(name for part in parts for name in part)
    }
    columns["reward"] = [value for data in batches for value in data["score"]]
    uids = [uid for data in batches for uid in data["uid"]]
    answers = [boxed_answer(text) for data in batches for text in data["response_text"]] if sampling.n > 1 else []
    voted = answers if any(answer is not None for answer in answers) else None
    return metrics | validation_metrics(sources, uids, columns, voted), batches


class BestStep:
    """The step with the best held-out accuracy or loss so far; of equal ones the first."""

    def __init__(self, measure: Measured | None = None) -> None:
        """Without a ``measure`` no step is the best."""
        self.measure = measure
        self.step: int | None = None
        self.value = math.nan

    def improved(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the evaluation of ``step`` is better than all before it.

        Raises:
            InvalidConfig: the evaluation does not measure what `measure` names.
        """
        if self.measure is None:
            return False
        value = held_out_value(metrics, self.measure)
        better = value < self.value if self.measure == "loss" else value > self.value
        if better or (self.step is None and math.isfinite(value)):
            self.step, self.value = step, value
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"measure": self.measure, "step": self.step, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state; one of another measure does not count."""
        if state.get("measure") == self.measure and self.measure is not None:
            self.step, self.value = state["step"], state["value"]


def held_out_value(metrics: Mapping[str, float], measure: Measured) -> float:
    """The held-out loss, or the accuracy as a mean over data sources; of a reward without ``acc``, the mean reward.

    Raises:
        InvalidConfig: the metrics have none.

    >>> held_out_value({"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 1.0, "val/loss": 2.0}, "accuracy")
    0.75
    """
    if measure == "loss":
        found = [metrics["val/loss"]] if "val/loss" in metrics else []
    else:
        by_name = [
            [value for name, value in metrics.items() if re.fullmatch(rf"val-core/.*/{kind}/mean@\d+", name)]
            for kind in ("acc", "reward")
        ]
        found = by_name[0] or by_name[1]
    if not found:
        raise InvalidConfig(f"keep_best={measure}, but the evaluation gives no held-out {measure}")
    return math.fsum(found) / len(found)


def held_out_means(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The mean of each number of the reward, by the held-out set.

    >>> held_out_means({"val-core/easy/acc/mean@1": 0.5, "val-aux/easy/letters/mean@1": 3.0, "timing_s/testing": 1.0})
    {'easy': {'acc': 0.5, 'letters': 3.0}}
    """
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if match := re.fullmatch(r"val-(?:core|aux)/(.+)/([^/]+)/mean@\d+", name):
            found.setdefault(match[1], {})[match[2]] = value
    return found


HeldOut = EvaluationLoader | Mapping[str, EvaluationLoader]
"""A held-out set, or several by their names."""


def held_out_evaluation(held_out: HeldOut, sampling: SamplingParams, output_dir: Path) -> Evaluate:
    """`evaluate_samples` for `recipes.run.train`; counts the rows that could not be used as ``data/skipped_eval_rows``."""
    sets = held_out if isinstance(held_out, Mapping) else {"": held_out}

    def evaluate(roles: Roles, step: int) -> dict[str, float]:
        metrics, _ = evaluate_samples(roles, sets, sampling, output_dir, step)
        return metrics | {"data/skipped_eval_rows": sum(len(each.skipped) for each in sets.values())}

    return evaluate


def greedy_evaluation(held_out: HeldOut, max_tokens: int, output_dir: Path) -> Evaluate:
    """`held_out_evaluation` with the greedy answer to each problem."""
    return held_out_evaluation(held_out, SamplingParams(temperature=0, max_tokens=max_tokens), output_dir)
