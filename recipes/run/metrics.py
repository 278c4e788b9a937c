"""What a run measures, under verl's metric names.

Dimension letters: B rows, P prompt tokens, R response tokens.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from statistics import mode
from typing import Any

import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.packing import MAX_TOKENS
from recipes.algorithms.advantages import informative_rows
from recipes.watch.rollout_files import reward_parts

PER_RESPONSE_TOKEN = ("gen",)
PER_TOKEN = ("old_log_prob", "ref", "values", "reward", "adv", "update_critic", "update_actor")

Measure = Callable[[DataProto, Mapping[str, float], int], dict[str, float]]
"""The rows that a step returned, its metrics, and the number of devices of the run -> further metrics."""


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


def last_rows(data: DataProto) -> DataProto:
    """The last row of each trajectory, which knows how its episode ended; all rows of a batch without trajectories."""
    if "trajectory" not in data:
        return data
    return data[sorted({name: row for row, name in enumerate(data["trajectory"])}.values())]


def _of_responses(values: Tensor, data: DataProto, ends: DataProto) -> Tensor:
    """The sum over the rows of each response, in order of their last rows ``ends``: (B,) to (E,)."""
    if "trajectory" not in data:
        return values
    places = {name: place for place, name in enumerate(ends["trajectory"])}
    index = torch.tensor([places[name] for name in data["trajectory"]], dtype=torch.int64, device=values.device)
    return values.new_zeros(len(places)).index_add(0, index, values)


def rollout_metrics(
    data: DataProto, max_prompt_length: int | None = None, max_response_length: int | None = None
) -> dict[str, float]:
    """Statistics of a scored rollout batch.

    As in verl, scores and rewards are those of the rows with a response; without any row a statistic is NaN. The rows of an
    episode are one response in all but the lengths.

    Args:
        data: with ``attention_mask`` (B, P + R), ``response_mask`` (B, R), ``token_level_rewards`` (B, R); if present,
            ``token_level_scores`` (B, R; otherwise the rewards are the scores), ``advantages``, ``values`` and ``returns``
            (B, R), ``acc``, ``truncated`` and ``uid`` (B,).
        max_prompt_length: the length that ``prompt_length/clip_ratio`` counts; by default P.
        max_response_length: the length that ``response_length/clip_ratio`` counts; by default R.

    Returns:
        ``critic/{score,rewards,advantages,values,returns}/{mean,max,min}``, ``critic/vf_explained_var`` (1 where values are
        the returns), ``{prompt,response}_length/{mean,max,min,clip_ratio}``, ``response/aborted_ratio`` (share of rows without
        a response), ``response/truncated_ratio`` (share of rows whose response was cut), ``response/commonest_ratio`` (share of
        the commonest text among the responses to several prompts), ``reward/<name>`` (the mean of a number that the reward
        function, or an environment, gave in addition to the score; ``reward/acc`` is the share of right answers),
        ``reward/equal_groups_ratio`` (share of groups whose samples have equal scores; of groups with several samples).
        With drafts ``speculation/accepted_per_pass`` (accepted tokens in a forward pass over a row) and
        ``speculation/accepted_ratio`` (share of drafted tokens that were accepted). Of
        episodes also ``episode/turns/{mean,max,min}``, and ``episode/ended/<reason>``, the share that ended so. Of
        agents also ``agent/new_rows/<reason>``, the number of rows that did not continue another one of their episode.
    """
    prompt, response = _lengths(data)
    mask, rewards = data["response_mask"] != 0, data["token_level_rewards"]
    scores = data["token_level_scores"] if "token_level_scores" in data else rewards
    ends = last_rows(data)
    totals, answered = _of_responses(scores.sum(-1), data, ends), _of_responses(response, data, ends) > 0
    metrics = _statistics("critic/score", totals[answered])
    metrics |= _statistics("critic/rewards", _of_responses(rewards.sum(-1), data, ends)[answered])
    if "advantages" in data:
        metrics |= _statistics("critic/advantages", data["advantages"][mask])
    if "values" in data and "returns" in data:
        values, returns = data["values"][mask], data["returns"][mask]
        metrics |= _statistics("critic/values", values) | _statistics("critic/returns", returns)
        metrics["critic/vf_explained_var"] = float(1 - (returns - values).var() / (returns.var() + 1e-5))
    for name, column in reward_parts(ends).items():
        given = [
            float(value) for value, kept in zip(column, answered.tolist(), strict=True) if kept and value is not None
        ]
        metrics[f"reward/{name}"] = math.fsum(given) / len(given) if given else math.nan
    width = mask.shape[1]
    limits = (max_prompt_length or data["attention_mask"].shape[1] - width, max_response_length or width)
    for name, lengths, limit in zip(("prompt_length", "response_length"), (prompt, response), limits, strict=True):
        metrics |= _statistics(name, lengths)
        metrics[f"{name}/clip_ratio"] = _mean(lengths == limit)
    if "uid" in data:
        metrics |= _equal_groups(totals.tolist(), ends["uid"].tolist())
    if "response_text" in data and "uid" in data and len(set(ends["uid"].tolist())) > 1:
        metrics["response/commonest_ratio"] = max(Counter(ends["response_text"]).values()) / len(ends)
    if "truncated" in data:
        metrics["response/truncated_ratio"] = _mean(ends["truncated"])
    if "drafted_tokens" in data:
        metrics |= _speculation(int(response.sum()), data["drafted_tokens"], data["accepted_tokens"])
    return metrics | _episode_metrics(data, ends) | {"response/aborted_ratio": _mean(~answered)}


def _episode_metrics(data: DataProto, ends: DataProto) -> dict[str, float]:
    """``episode/*`` and ``agent/new_rows/*``; ``ends`` are the last rows of the episodes. Empty for other rows."""
    metrics: dict[str, float] = {}
    if "turns" in data and "end_reason" in data:
        metrics |= _statistics("episode/turns", ends["turns"])
        reasons = Counter(ends["end_reason"].tolist())
        metrics |= {f"episode/ended/{reason}": count / len(ends) for reason, count in sorted(reasons.items())}
    if "new_row" in data:
        reasons = Counter(reason for reason in data["new_row"] if reason)
        metrics |= {f"agent/new_rows/{reason}": float(count) for reason, count in sorted(reasons.items())}
    return metrics


def measure_rollouts(data: DataProto, metrics: Mapping[str, float], devices: int) -> dict[str, float]:
    """`rollout_metrics` of a scored batch, and `speed_metrics`."""
    longest = data.meta_info.get(MAX_TOKENS)
    return rollout_metrics(data, max_response_length=longest) | speed_metrics(data, metrics, devices)


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
    data_source: Sequence[str],
    uid: Sequence[Any],
    values: Mapping[str, Sequence[float | None]],
    answers: Sequence[str | None] | None = None,
) -> dict[str, float]:
    """Statistics of the N samples of each prompt, as means over the prompts of a data source.

    Args:
        data_source: B names.
        uid: B hashables, equal for the samples of one prompt.
        values: B numbers for each name; ``None`` where a row has none.
        answers: what each sample answers, for majority votes; ``None`` where it answers nothing.

    Returns:
        ``val-core/<source>/{acc,reward}/mean@N``, and ``val-aux/...`` for other names. (verl keeps ``reward`` out of
        ``val-core`` where ``acc`` exists.) With N above 1 also ``best@k/mean`` (see `best_at_k`; verl estimates the same by
        drawing with replacement) for k = 2, 4, 8, ... and N; where all values of ``acc`` are 0 or 1, ``acc/pass@k``, which
        is the same number; with ``answers`` ``acc/maj@N/mean``, the accuracy of the most frequent answer. As in verl, those of
        k below N are in ``val-aux``.

    >>> validation_metrics(["geo", "geo", "geo"], ["a", "a", "b"], {"acc": [1.0, 0.0, None], "format": [0.5, 0.5, None]})
    ... # doctest: +NORMALIZE_WHITESPACE
    {'val-core/geo/acc/mean@2': 0.5, 'val-core/geo/acc/best@2/mean': 1.0, 'val-core/geo/acc/pass@2': 1.0,
     'val-aux/geo/format/mean@2': 0.5, 'val-aux/geo/format/best@2/mean': 0.5}
    """
    metrics: dict[str, float] = {}
    for name, column in values.items():
        prompts: dict[tuple[str, Any], list[tuple[float, str | None]]] = defaultdict(list)
        for source, key, value, answer in zip(data_source, uid, column, answers or [None] * len(uid), strict=True):
            if value is not None:
                prompts[source, key].append((float(value), answer))
        binary = name == "acc" and all(value in (0.0, 1.0) for samples in prompts.values() for value, _ in samples)
        found = defaultdict(list)
        for (source, _), samples in prompts.items():
            numbers = [value for value, _ in samples]
            for statistic, value in _sample_statistics(numbers, binary).items():
                found[source, statistic, len(samples)].append(value)
            if name == "acc" and len(samples) > 1 and answers is not None:
                vote = majority_value([answer for _, answer in samples], numbers)
                found[source, f"maj@{len(samples)}/mean", len(samples)].append(vote)
        for (source, statistic, count), each in found.items():
            of_all = statistic.removesuffix("/mean").endswith(f"@{count}")
            section = "val-core" if name in ("acc", "reward") and of_all else "val-aux"
            metrics[f"{section}/{source}/{name}/{statistic}"] = math.fsum(each) / len(each)
    return metrics


def _sample_statistics(values: Sequence[float], binary: bool) -> dict[str, float]:
    """The statistics of one prompt's N samples, by the last part of their names."""
    count = len(values)
    found = {f"mean@{count}": math.fsum(values) / count}
    for k in [*(2**power for power in range(1, count.bit_length()) if 2**power < count), count]:
        if k > 1:
            found[f"best@{k}/mean"] = best_at_k(values, k)
        if k > 1 and binary:
            found[f"pass@{k}"] = pass_at_k(count, round(math.fsum(values)), k)
    return found


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of ``k`` samples is right, of which ``correct`` of ``samples`` are.

    The unbiased estimator of "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374, equation 1):
    ``1 - C(n - c, k) / C(n, k)``, for ``1 <= k <= n``.

    >>> pass_at_k(samples=4, correct=1, k=2)
    0.5
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def best_at_k(values: Sequence[float], k: int) -> float:
    """The mean of the largest of ``k`` values, over all choices of ``k`` of them; for values 0 and 1 this is `pass_at_k`.

    With values in ascending order ``x_1, ..., x_n``: the sum over ``i`` of ``x_i C(i - 1, k - 1) / C(n, k)``.

    >>> best_at_k([0.0, 0.0, 1.0, 0.5], k=2)  # 1 in three of the six pairs, 0.5 in two, 0 in one
    0.6666666666666666
    """
    choices = math.comb(len(values), k)
    return math.fsum(value * (math.comb(rank, k - 1) / choices) for rank, value in enumerate(sorted(values)))


def majority_value(answers: Sequence[str | None], values: Sequence[float]) -> float:
    """The value of the most frequent answer, of equally frequent ones the first; 0 if nobody answers.

    >>> majority_value(["7", None, "8", "8"], [1.0, 0.0, 0.0, 0.0])
    0.0
    """
    given = [answer for answer in answers if answer is not None]
    return values[answers.index(mode(given))] if given else 0.0


def _equal_groups(scores: Sequence[float], uid: Sequence[Any]) -> dict[str, float]:
    """``reward/equal_groups_ratio``; empty where every group has one sample.

    >>> _equal_groups([1.0, 1.0, 0.0, 1.0, 0.5], ["a", "a", "b", "b", "c"])
    {'reward/equal_groups_ratio': 0.5}
    """
    several = {name for name, samples in Counter(uid).items() if samples > 1}
    differing = {name for name, informative in zip(uid, informative_rows(scores, uid), strict=True) if informative}
    return {"reward/equal_groups_ratio": 1 - len(differing) / len(several)} if several else {}


def _speculation(tokens: int, drafted: Tensor, accepted: Tensor) -> dict[str, float]:
    """What drafts were worth, of responses with so many ``tokens`` in all.

    >>> _speculation(10, torch.tensor([4, 6]), torch.tensor([2, 3]))
    {'speculation/accepted_per_pass': 1.0, 'speculation/accepted_ratio': 0.5}
    """
    kept, asked = int(accepted.sum()), int(drafted.sum())
    passes = max(tokens - kept, 1)
    ratio = kept / asked if asked else 0.0
    return {"speculation/accepted_per_pass": kept / passes, "speculation/accepted_ratio": ratio}


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
