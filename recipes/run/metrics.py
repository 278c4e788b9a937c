"""What a run measures, under verl's metric names, and where it is written down.

Dimension letters: B rows, P prompt tokens, R response tokens.
"""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dataproto.errors import FileFormatError, InvalidConfig

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from dataproto import DataProto

METRICS_FILE = "metrics.jsonl"
CORE_METRICS = ("acc", "reward")
PER_RESPONSE_TOKEN = ("gen",)
PER_TOKEN = ("old_log_prob", "ref", "values", "reward", "adv", "update_critic", "update_actor")


@contextmanager
def timed(metrics: MutableMapping[str, float], stage: str) -> Iterator[None]:
    """Adds the seconds that the block takes to ``metrics["timing_s/<stage>"]``; blocks of one stage add up.

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
    data: "DataProto", max_prompt_length: int | None = None, max_response_length: int | None = None
) -> dict[str, float]:
    """Statistics of a scored rollout batch.

    As in verl, scores and rewards are those of the rows with a response, and statistics of no row at all are NaN.

    Args:
        data: with ``attention_mask`` (B, P + R), ``response_mask`` (B, R), ``token_level_rewards`` (B, R); if present,
            ``token_level_scores`` (B, R; otherwise the rewards are the scores), ``advantages``, ``values`` and ``returns``
            (B, R), ``acc`` and ``truncated`` (B,).
        max_prompt_length: what ``prompt_length/clip_ratio`` counts; by default P.
        max_response_length: what ``response_length/clip_ratio`` counts; by default R.

    Returns:
        ``critic/{score,rewards,advantages,values,returns}/{mean,max,min}``, ``critic/vf_explained_var`` (1 where values are
        the returns), ``{prompt,response}_length/{mean,max,min,clip_ratio}``, ``response/aborted_ratio`` (share of rows without
        a response), ``response/truncated_ratio`` (share of rows whose response was cut), ``reward/acc`` (share of right answers).
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
    if "truncated" in data:
        metrics["response/truncated_ratio"] = _mean(data["truncated"])
    return metrics | {"response/aborted_ratio": _mean(~answered)}


def speed_metrics(data: "DataProto", timings: Mapping[str, float], devices: int) -> dict[str, float]:
    """Time per token, and tokens per second, of a step.

    Args:
        data: with ``attention_mask`` (B, P + R) and ``response_mask`` (B, R).
        timings: holds ``timing_s/<stage>`` for some stages, as `timed` writes them; ``timing_s/step`` is the whole step.
        devices: how many the throughput is divided by: all that the run has, those of the rollout too.

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


def add_update(metrics: MutableMapping[str, float], found: Mapping[str, float]) -> None:
    """Adds the metrics of an update; of the peaks of a device's memory that several roles have seen, the highest stays.

    >>> metrics = {"perf/max_memory_allocated_gb": 40.0}
    >>> add_update(metrics, {"perf/max_memory_allocated_gb": 30.0, "actor/loss": 0.5})
    >>> metrics
    {'perf/max_memory_allocated_gb': 40.0, 'actor/loss': 0.5}
    """
    for name, value in found.items():
        metrics[name] = max(value, metrics.get(name, value)) if name.startswith("perf/max_memory") else value


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


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl``, null as NaN; none if there is no file.

    A last line that a killed process left half-written is passed over.

    Raises:
        FileFormatError: another line is not a JSON object with an integer ``step``; names the line.
    """
    lines = Path(path).read_bytes().split(b"\n") if Path(path).exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
            if row is not None:
                int(row["step"])
        except (ValueError, TypeError, KeyError, IndexError) as error:
            if number == len(lines):  # every whole line ends with a newline, so this one is not whole
                break
            raise FileFormatError(f"{path}, line {number}: not a JSON object with a step: {line[:80]!r}") from error
        if row is not None:
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def truncate_after(path: str | Path, step: int) -> None:
    """Drops the rows of later steps, and a half-written last line, from a ``metrics.jsonl``; all or nothing."""
    path = Path(path)
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    replacement = path.with_name(path.name + ".tmp")
    with replacement.open("wb") as file:
        file.writelines(_line(row) for row in kept)
        file.flush()
        os.fsync(file.fileno())
    replacement.replace(path)


class MetricsLog:
    """A run's metrics: one JSON object a step in ``metrics.jsonl``, and TensorBoard events beside it.

    A row reaches the file in one write, so a process that is killed leaves whole lines (at worst half of the last one, which
    readers pass over). Steps only rise, so no step stands there twice.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with MetricsLog(folder, tensorboard=False) as log:
    ...         log.write(0, {"reward": 0.25})
    ...         log.write(1, {"reward": float("nan")})
    ...     with MetricsLog(folder, resume_after=0, tensorboard=False) as log:
    ...         log.write(1, {"reward": 0.5})
    ...     (Path(folder) / "metrics.jsonl").read_text()
    '{"step": 0, "reward": 0.25}\\n{"step": 1, "reward": 0.5}\\n'
    """

    def __init__(self, directory: str | Path, resume_after: int | None = None, tensorboard: bool = True) -> None:
        """Opens the log of a run.

        Args:
            directory: the run's; made if absent.
            resume_after: the last step to keep from an earlier process, -1 to keep none; by default this is a new run.
            tensorboard: write events to ``<directory>/tensorboard`` too.

        Raises:
            InvalidConfig: this is to be a new run, but the directory holds the metrics of another.
        """
        self.path = Path(directory) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_after is not None:
            truncate_after(self.path, resume_after)
        elif self.path.exists() and self.path.stat().st_size:
            raise InvalidConfig(
                f"{directory} holds the metrics of an earlier run: resume it, or choose another directory"
            )
        rows = read_metrics(self.path)
        self._last = int(rows[-1]["step"]) if rows else -1
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        purge = None if resume_after is None else resume_after + 1
        self._events = _event_writer(self.path.parent / "tensorboard", purge) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Appends a step's row; NaN and infinity become null.

        Raises:
            InvalidConfig: the step is not above the last one written.
        """
        if step <= self._last:
            raise InvalidConfig(f"metrics of step {step} after those of step {self._last}: each step is written once")
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        os.write(self._file, _line({"step": step, **numbers}))
        self._last = step
        if self._events is not None:
            for name, number in numbers.items():
                if math.isfinite(number):
                    self._events.add_scalar(name, number, step)
            self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._file >= 0:
            os.close(self._file)
        self._file, self._events = -1, None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _event_writer(directory: Path, purge_step: int | None) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter  # takes over a second to import

    return SummaryWriter(str(directory), purge_step=purge_step)


def _line(row: Mapping[str, float]) -> bytes:
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return (json.dumps(finite, allow_nan=False) + "\n").encode()


def _lengths(data: "DataProto") -> tuple[Tensor, Tensor]:
    """Attended prompt and response tokens of each row: (B,) int64 each."""
    attended, width = data["attention_mask"] != 0, data["response_mask"].shape[1]
    split = attended.shape[1] - width
    return attended[:, :split].sum(-1), attended[:, split:].sum(-1)


def _mean(values: Tensor) -> float:
    return values.double().mean().item() if values.numel() else math.nan


def _statistics(name: str, values: Tensor) -> dict[str, float]:
    highest, lowest = (values.max().item(), values.min().item()) if values.numel() else (math.nan, math.nan)
    return {f"{name}/mean": _mean(values), f"{name}/max": highest, f"{name}/min": lowest}
