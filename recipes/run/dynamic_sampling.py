"""DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): generate until a batch is full of informative groups."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from dataproto import DataProto, object_array
from dataproto.columns import require
from dataproto.errors import InvalidColumn
from dataproto.packing import equally_wide
from recipes.algorithms.advantages import informative_rows

More = Callable[[str], DataProto]  # the reason, for the progress display -> further prompts


def sample_informative_groups(
    sample: Callable[[DataProto], DataProto],
    prompts: DataProto,
    more: More,
    generations: int,
    metric: str | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """Samples until there is one informative group for each of the ``prompts``: a group whose samples differ in their score.

    A group whose samples are all equally good (see `verdicts`) is dropped, and a whole further batch of prompts is sampled. When
    the batch is full, groups that are left over are dropped too, so that the loader's position is the whole state of a run.
    After ``generations`` the first dropped groups fill the batch (deviation: verl stops the run with an error).

    Args:
        sample: prompts to scored rollout rows; the rows of a group are next to each other.
        metric: the column that says how good a sample is.

    Returns:
        The rows, and the metrics ``train/num_gen_batches`` (verl's name), ``train/filtered_groups`` (the number of dropped
        groups) and ``train/sampled_score/mean`` (over all sampled rows).
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
            f"{found} of {wanted} groups are informative: generation {generation + 1} of at most {generations}"
        )
    rows = joined_parts(equally_wide([part for part in (*kept, *dropped) if len(part)]))
    chosen = set(list(dict.fromkeys(rows["uid"]))[:wanted])
    return rows[np.array([uid in chosen for uid in rows["uid"]], dtype=bool)], {
        "train/num_gen_batches": generation,
        "train/filtered_groups": sum(map(count_groups, dropped)),
        "train/sampled_score/mean": sum(scores) / len(scores),
    }


def joined_parts(parts: Sequence[DataProto]) -> DataProto:
    """The rows of parts that were scored apart. Arrays that a part lacks, such as metrics of a reward, are ``None`` there.

    >>> one, other = (DataProto.from_dict(non_tensors={"score": [1.0], **found}) for found in ({"acc": [1]}, {}))
    >>> joined_parts([one, other])["acc"].tolist()
    [1, None]
    """
    names = {name for part in parts for name in part.non_tensor_batch}
    filled = [part[:] for part in parts]
    for part in filled:
        for name in sorted(names.difference(part.names())):
            part[name] = object_array([None] * len(part))
    return DataProto.concat(filled)


def verdicts(data: DataProto, metric: str | None = None) -> list[float]:
    """How good each sample is: the column ``metric``; by default ``acc`` where the reward gives one, else ``score``.

    In a group of wrong answers a score that includes the format may differ; ``acc`` does not.

    Raises:
        MissingColumn: the column is missing.
        InvalidColumn: a row has no finite number; the message names the row.
    """
    if metric is None:
        right = data["acc"] if "acc" in data else [None] * len(data)
        return [float(score if acc is None else acc) for acc, score in zip(right, data["score"], strict=True)]
    require(data, metric)
    for row, value in enumerate(data[metric]):
        if value is None or not math.isfinite(value):
            raise InvalidColumn(
                f"{metric!r}, row {row}: {value} is not a finite number to compare samples by; see filter_metric"
            )
    return [float(value) for value in data[metric]]


def count_groups(data: DataProto) -> int:
    return len(set(data["uid"]))
