"""Forecast beside what benchmarks/RESULTS.md reports of updates on H200: ``python benchmarks/forecasts.py``. Needs no GPU.

The rows are those of benchmarks/train_step.py, whose memory is torch's peak of what is allocated, and of benchmarks/rollout.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

from benchmarks.workload import make_batch, model_config, shape_of  # noqa: E402
from dataproto import DataProto  # noqa: E402
from recipes.forecast import DEVICES, BatchSizes, PromptSizes, Setting, forecast  # noqa: E402
from recipes.forecast.devices import GIB  # noqa: E402
from workers.model.model_config import ModelConfig, Unsharded  # noqa: E402
from workers.ranks.layout import Layout  # noqa: E402


@dataclass(frozen=True)
class Update:
    """An update that was measured."""

    name: str
    size: str
    budget: int
    checkpointing: str
    seconds: float
    gib: float
    prompts: int = 24
    samples: int = 1
    optimizer: bool = True  # whether AdamW had moments
    dp: int = 1
    unsharded: Unsharded = "nothing"


UPDATES = (
    Update("3B, budget 9,472", "3b", 9472, "none", 2.88, 122),
    Update("3B, 8 prompts x 8 samples", "3b", 9472, "none", 2.82, 108, prompts=8, samples=8),
    Update("3B, selective, budget 16,384", "3b", 16_384, "selective", 3.05, 126),
    Update("7B, selective, budget 9,216, no moments", "7b", 9216, "selective", 4.79, 126, optimizer=False),
    Update("7B, two devices", "7b", 8192, "selective", 4.63, 113.7, prompts=40, dp=2),
    Update("7B, two devices, no reshard", "7b", 8192, "selective", 4.33, 126.7, prompts=40, dp=2, unsharded="weights"),
    Update("7B, two devices, full", "7b", 16_384, "full", 5.30, 75.3, prompts=40, dp=2),
    Update("3B, two devices, selective", "3b", 16_384, "selective", 2.87, 96.7, prompts=40, dp=2),
)


@dataclass(frozen=True)
class Generation:
    """256 responses of 512 tokens to prompts of 361 tokens, 225 of them an image's, by vLLM beside the actor."""

    size: str
    tokens_per_second: float
    gib: float  # of the device while the engine is awake


GENERATIONS = (Generation("3b", 28_384, 83.6), Generation("7b", 21_698, 100.7))


def batch_sizes(data: DataProto, config: object, samples: int) -> BatchSizes:
    """The sizes of rows that exist."""
    responses = data["response_mask"].sum(1)
    prompts = (data["attention_mask"].sum(1) - responses)[::samples]
    media = list(data["multi_modal_inputs"])[::samples]
    grids = tuple(tuple(map(tuple, row["image_grid_thw"].tolist())) if row else () for row in media)
    return BatchSizes(config, PromptSizes(tuple(prompts.tolist()), grids), tuple(responses.tolist()), samples)


def update_row(measured: Update) -> tuple[float, float]:
    """Forecast seconds and GiB, the mean over the benchmark's first three counted batches."""
    config = model_config(measured.size)
    compute = ModelConfig(
        token_budget=measured.budget,
        activation_checkpointing=measured.checkpointing,
        compile=True,
        unsharded=measured.unsharded,
    )
    seconds, peaks = [], []
    for step in (3, 4, 5):
        data = make_batch(config, shape_of(measured.size), measured.prompts, measured.samples, seed=1000 * step)
        sizes = batch_sizes(data, config, measured.samples)
        setting = Setting(config, sizes, DEVICES["h200"], compute, Layout(dp=measured.dp), engine=None, variation=0)
        phase = forecast(setting).phases[-1]
        actor = phase.roles[0] if measured.optimizer else replace(phase.roles[0], moments=0)
        seconds.append(phase.seconds)
        peaks.append(actor.device / GIB)
    return sorted(seconds)[1], max(peaks)


def generation_row(measured: Generation) -> tuple[float, float]:
    """Forecast tokens per second, and GiB of the device."""
    config = model_config(measured.size)
    prompts = PromptSizes((361,), (((1, 30, 30),),)).repeated(256)
    sizes = BatchSizes(config, prompts, (512,) * 256)
    phase = forecast(Setting(config, sizes, DEVICES["h200"], engine="vllm")).phases[0]
    weights = sum(role.weights + role.copies for role in phase.roles if role.role == "actor") - phase.roles[0].copies
    engine = phase.roles[-1].device
    return 256 * 512 / phase.seconds, (weights + engine + DEVICES["h200"].context) / GIB


def lines() -> Iterator[str]:
    """A Markdown table."""
    yield "| | forecast s | measured s | ratio | forecast GiB | measured GiB | ratio |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for each in UPDATES:
        seconds, gib = update_row(each)
        yield (
            f"| {each.name} | {seconds:.2f} | {each.seconds:.2f} | {seconds / each.seconds:.2f} "
            f"| {gib:.1f} | {each.gib:.1f} | {gib / each.gib:.2f} |"
        )
    for one in GENERATIONS:
        rate, gib = generation_row(one)
        yield (
            f"| {one.size.upper()}, generation, tokens/s | {rate:,.0f} | {one.tokens_per_second:,.0f} "
            f"| {rate / one.tokens_per_second:.2f} | {gib:.1f} | {one.gib:.1f} | {gib / one.gib:.2f} |"
        )


if __name__ == "__main__":
    print("\n".join(lines()))
