"""What a run measures, under verl's metric names.

Dimension letters: B rows, P prompt tokens, R response tokens.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from dataproto import DataProto
from recipes.algorithms.advantages import informative_rows

CORE_METRICS = ("acc", "reward")
PER_RESPONSE_TOKEN = ("gen",)
PER_TOKEN = ("old_log_prob", "ref", "values", "reward", "adv", "update_critic", "update_actor")


@contextmanager
def timed(metrics: MutableMapping[str, float], stage: str) -> Iterator[None]:
    """Adds the seconds that the block takes to ``metrics["timing_s/<stage>"]``; the times of one stage add up.

    >>> metrics = {}
    >>> with timed(metrics, "gen"):
    ...     pass
    >>> list(metrics)
    ['timing_s/gen']
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        name = f"timing_s/{stage}"
        metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start


def rollout_metrics(
    data: DataProto, max_prompt_length: int | None = None, max_response_length: int | None = None
) -> dict[str, float]:
    """Statistics of a scored rollout batch.

    As in verl, scores and rewards are those of the rows with a response; without any row a statistic is NaN.

    Args:
        data: with ``attention_mask`` (B, P + R), ``response_mask`` (B, R), ``token_level_rewards`` (B, R); if present,
            ``token_level_scores`` (B, R; otherwise the rewards are the scores), ``advantages``, ``values`` and ``returns``
            (B, R), ``acc``, ``truncated`` and ``uid`` (B,).
        max_prompt_length: the length that ``prompt_length/clip_ratio`` counts; by default P.
        max_response_length: the length that ``response_length/clip_ratio`` counts; by default R.

    Returns:
        ``critic/{score,rewards,advantages,values,returns}/{mean,max,min}``, ``critic/vf_explained_var`` (1 where values are
        the returns), ``{prompt,response}_length/{mean,max,min,clip_ratio}``, ``response/aborted_ratio`` (share of rows without
        a response), ``response/truncated_ratio`` (share of rows whose response was cut), ``reward/acc`` (share of right answers),
        ``reward/equal_groups_ratio`` (share of groups whose samples have equal scores; of groups with several samples).
    """
    prompt, response = _lengths(data)
    mask, rewards = data["response_mask"] != 0, data["token_level_rewards"]
    scores = data["token_level_scores"] if "token_level_scores" in data else rewards
    answered = response > 0
    metrics = _statistics("critic/score", scores.sum(-1)[answered])
    metrics |= _statistics("critic/rewards", rewards.sum(-1)[answered])
    if "advantages" in data:
        metrics |= _statistics("critic/advantages", data["advantages"][mask])
    if "values" in data and "returns" in data:
        values, returns = data["values"][mask], data["returns"][mask]
        metrics |= _statistics("critic/values", values) | _statistics("critic/returns", returns)
        metrics["critic/vf_explained_var"] = float(1 - (returns - values).var() / (returns.var() + 1e-5))
    if "acc" in data:
        judged = zip(data["acc"], answered.tolist(), strict=True)
        right = [float(value) for value, kept in judged if kept and value is not None]
        metrics["reward/acc"] = math.fsum(right) / len(right) if right else math.nan
    width = mask.shape[1]
    limits = (max_prompt_length or data["attention_mask"].shape[1] - width, max_response_length or width)
    for name, lengths, limit in zip(("prompt_length", "response_length"), (prompt, response), limits, strict=True):
        metrics |= _statistics(name, lengths)
        metrics[f"{name}/clip_ratio"] = _mean(lengths == limit)
    if "uid" in data:
        metrics |= _equal_groups(scores.sum(-1).tolist(), list(data["uid"]))
    if "truncated" in data:
        metrics["response/truncated_ratio"] = _mean(data["truncated"])
    return metrics | {"response/aborted_ratio": _mean(~answered)}


def speed_metrics(data: DataProto, timings: Mapping[str, float], devices: int) -> dict[str, float]:
    """Time per token, and tokens per second, of a step.

    Args:
        data: with ``attention_mask`` (B, P + R) and ``response_mask`` (B, R).
        timings: holds ``timing_s/<stage>`` for some stages, as `timed` writes them; ``timing_s/step`` is the whole step.
        devices: the number of devices of the run, those of the rollout included; the throughput is divided by it.

    Returns:
        ``timing_per_token_ms/<stage>`` (per response token for ``gen``, per token for the stages of `PER_TOKEN`),
        ``perf/total_num_tokens``, and, where ``timing_s/step`` is known, ``perf/time_per_step`` and ``perf/throughput``
        (prompt and response tokens per second and device).
    """
    prompt, response = _lengths(data)
    sampled = int(response.sum())
    total = int(prompt.sum()) + sampled
    metrics: dict[str, float] = {"perf/total_num_tokens": total}
    for name, seconds in timings.items():
        stage = name.removeprefix("timing_s/")
        if stage in PER_RESPONSE_TOKEN + PER_TOKEN:
            tokens = sampled if stage in PER_RESPONSE_TOKEN else total
            metrics[f"timing_per_token_ms/{stage}"] = seconds * 1000 / tokens if tokens else 0.0
    if step := timings.get("timing_s/step"):
        metrics |= {"perf/time_per_step": step, "perf/throughput": total / (step * devices)}
    return metrics


def merge_updates(*updates: Mapping[str, float]) -> dict[str, float]:
    """The metrics of several updates together; of the peaks of a device's memory, the highest.

    >>> merge_updates({"perf/max_memory_allocated_gb": 40.0}, {"perf/max_memory_allocated_gb": 30.0, "actor/loss": 0.5})
    {'perf/max_memory_allocated_gb': 40.0, 'actor/loss': 0.5}
    """
    metrics: dict[str, float] = {}
    for update in updates:
        for name, value in update.items():
            metrics[name] = max(value, metrics.get(name, value)) if name.startswith("perf/max_memory") else value
    return metrics


def validation_metrics(
    data_source: Sequence[str], uid: Sequence[Any], values: Mapping[str, Sequence[float | None]]
) -> dict[str, float]:
    """Means by data source: over the N samples of a prompt, then over prompts.

    Args:
        data_source: B names.
        uid: B hashables, equal for the samples of one prompt.
        values: B numbers for each name; ``None`` where a row has none.

    Returns:
        ``val-core/<source>/{acc,reward}/mean@N``, and ``val-aux/...`` for other names. (verl keeps ``reward`` out of
        ``val-core`` where ``acc`` exists.)

    >>> validation_metrics(["geo", "geo", "geo"], ["a", "a", "b"], {"acc": [1.0, 0.0, None], "format": [1, 1, None]})
    {'val-core/geo/acc/mean@2': 0.5, 'val-aux/geo/format/mean@2': 1.0}
    """
    metrics: dict[str, float] = {}
    for name, column in values.items():
        prompts: dict[tuple[str, Any], list[float]] = defaultdict(list)
        for source, key, value in zip(data_source, uid, column, strict=True):
            if value is not None:
                prompts[source, key].append(float(value))
        means = defaultdict(list)
        section = "val-core" if name in CORE_METRICS else "val-aux"
        for (source, _), samples in prompts.items():
            means[f"{section}/{source}/{name}/mean@{len(samples)}"].append(math.fsum(samples) / len(samples))
        metrics |= {metric: math.fsum(each) / len(each) for metric, each in means.items()}
    return metrics


def _equal_groups(scores: Sequence[float], uid: Sequence[Any]) -> dict[str, float]:
    """``reward/equal_groups_ratio``; empty where every group has one sample.

    >>> _equal_groups([1.0, 1.0, 0.0, 1.0, 0.5], ["a", "a", "b", "b", "c"])
    {'reward/equal_groups_ratio': 0.5}
    """
    several = {name for name, samples in Counter(uid).items() if samples > 1}
    differing = {name for name, informative in zip(uid, informative_rows(scores, uid), strict=True) if informative}
    return {"reward/equal_groups_ratio": 1 - len(differing) / len(several)} if several else {}


def _lengths(data: DataProto) -> tuple[Tensor, Tensor]:
    """Attended prompt and response tokens of each row: (B,) int64 each."""
    attended, width = data["attention_mask"] != 0, data["response_mask"].shape[1]
    split = attended.shape[1] - width
    return attended[:, :split].sum(-1), attended[:, split:].sum(-1)


def _mean(values: Tensor) -> float:
    return values.double().mean().item() if values.numel() else math.nan


def _statistics(name: str, values: Tensor) -> dict[str, float]:
    highest, lowest = (values.max().item(), values.min().item()) if values.numel() else (math.nan, math.nan)
    return {f"{name}/mean": _mean(values), f"{name}/max": highest, f"{name}/min": lowest}
