"""DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): generate until a batch is full of groups that teach something."""

import math
from collections.abc import Callable

import numpy as np

from dataproto import DataProto
from dataproto.columns import require
from dataproto.errors import InvalidColumn
from dataproto.packing import equally_wide
from recipes.algorithms.advantages import informative_rows

More = Callable[[str], DataProto]  # why more prompts are wanted, for whoever watches -> the next ones


def sample_informative_groups(
    sample: Callable[[DataProto], DataProto],
    prompts: DataProto,
    more: More,
    generations: int,
    metric: str | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """Rows of as many groups as there are ``prompts``, the first ones whose samples are not all equally good.

    Groups of equally good samples, in the sense of `verdicts`, are dropped and others are sampled in their place, whole batches
    of prompts at a time; what is left over when the batch is full is dropped too, so that where a run stands is where its loader
    stands. After ``generations`` the first dropped groups fill the batch up (deviation: verl stops the run with an error).

    Args:
        sample: prompts to scored rollout rows, those of a prompt next to each other.
        metric: the column that says how good a sample is.

    Returns:
        The rows, and verl's ``train/num_gen_batches`` beside ``train/filtered_groups``, how many were dropped, and
        ``train/sampled_score/mean`` over all rows that were sampled.
    """
    wanted = len(prompts)
    kept: list[DataProto] = []
    dropped: list[DataProto] = []
    scores: list[float] = []
    for generation in range(1, generations + 1):
        data = sample(prompts)
        informative = informative_rows(verdicts(data, metric), data["uid"])
        kept.append(data[informative])
        dropped.append(data[~informative])
        scores += [float(score) for score in data["score"]]
        found = sum(map(count_groups, kept))
        if found >= wanted or generation == generations:
            break
        prompts = more(
            f"{found} of {wanted} groups teach something: generation {generation + 1} of at most {generations}"
        )
    rows = DataProto.concat(equally_wide([part for part in (*kept, *dropped) if len(part)]))
    chosen = set(list(dict.fromkeys(rows["uid"]))[:wanted])
    return rows[np.array([uid in chosen for uid in rows["uid"]], dtype=bool)], {
        "train/num_gen_batches": generation,
        "train/filtered_groups": sum(map(count_groups, dropped)),
        "train/sampled_score/mean": sum(scores) / len(scores),
    }


def verdicts(data: DataProto, metric: str | None = None) -> list[float]:
    """How good each sample is: the column ``metric``; by default ``acc`` where the reward gives one, else ``score``.

    A score that also counts the format differs within a group of answers that are all wrong, which ``acc`` does not.

    Raises:
        MissingColumn: there is no such column.
        InvalidColumn: it has no finite number in a row; names the row.
    """
    if metric is None:
        right = data["acc"] if "acc" in data else [None] * len(data)
        return [float(score if acc is None else acc) for acc, score in zip(right, data["score"], strict=True)]
    require(data, metric)
    for row, value in enumerate(data[metric]):
        if value is None or not math.isfinite(value):
            raise InvalidColumn(f"{metric!r}, row {row}: {value} is no number to filter groups by; see filter_metric")
    return [float(value) for value in data[metric]]


def count_groups(data: DataProto) -> int:
    return len(set(data["uid"]))
