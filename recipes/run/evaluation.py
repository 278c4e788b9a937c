"""Greedy answers to held-out problems, scored and kept for the report."""

from collections.abc import Callable, Iterable
from pathlib import Path

from dataproto import DataProto
from recipes.data.loader import EvaluationLoader
from recipes.report.samples import rollout_samples, save_rollouts
from recipes.run.metrics import timed, validation_metrics
from rollout.engine import SamplingParams
from workers import Roles

Evaluate = Callable[[Roles, int], dict[str, float]]  # roles, number of the step -> metrics

REPORTED_ROLLOUTS = 24  # of each evaluation


def evaluate_answers(
    roles: Roles, held_out: Iterable[DataProto], max_tokens: int, output_dir: Path, step: int
) -> tuple[dict[str, float], list[DataProto]]:
    """Answers held-out problems greedily, and keeps some answers in ``output_dir/rollouts`` for the report.

    Returns:
        ``val-core/<source>/{acc,reward}/mean@1``, and the scored batches.
    """
    metrics: dict[str, float] = {}
    batches = []
    with timed(metrics, "testing"):
        for prompts in held_out:
            data = roles.rollout.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
            data |= roles.reward.score(data)
            batches.append(data)
    samples = [sample for data in batches for sample in rollout_samples(data, REPORTED_ROLLOUTS)]
    save_rollouts(output_dir, step, samples[:REPORTED_ROLLOUTS])
    columns = {name: [value for data in batches if name in data for value in data[name]] for name in ("acc", "format")}
    columns["reward"] = [value for data in batches for value in data["score"]]
    sources = [source for data in batches for source in data["data_source"]]
    uids = [uid for data in batches for uid in data["uid"]]
    present = {name: values for name, values in columns.items() if len(values) == len(uids)}
    return metrics | validation_metrics(sources, uids, present), batches


def greedy_evaluation(held_out: EvaluationLoader, max_tokens: int, output_dir: Path) -> Evaluate:
    """`evaluate_answers` for `recipes.run.train`; counts the rows that could not be used as ``data/skipped_eval_rows``."""

    def evaluate(roles: Roles, step: int) -> dict[str, float]:
        metrics, _ = evaluate_answers(roles, held_out, max_tokens, output_dir, step)
        return metrics | {"data/skipped_eval_rows": len(held_out.skipped)}

    return evaluate
