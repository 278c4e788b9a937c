"""The simulator beside what was measured on H200: ``python benchmarks/simulated_steps.py``. Needs no GPU.

Measured: the steps, updates and layouts of benchmarks/RESULTS.md, and steps of 7B on two devices (128 prompts x 5 samples of 512
tokens, four mini-batches, prompts of 361 tokens).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

from benchmarks.forecasts import H200, HOST_BEFORE, batch_sizes, reading_seconds  # noqa: E402
from benchmarks.workload import make_batch, model_config, shape_of  # noqa: E402
from recipes.plan.forecast import forecast, with_share  # noqa: E402
from recipes.plan.rows import BatchSizes, PromptSizes, response_lengths  # noqa: E402
from recipes.plan.setting import Setting  # noqa: E402
from workers.model.model_config import ModelConfig, Unsharded  # noqa: E402
from workers.ranks.layout import Layout  # noqa: E402

COMPILED = ModelConfig(token_budget=10_240, activation_checkpointing="selective", compile=True, unsharded="nothing")
EAGER = ModelConfig(token_budget=16_384, activation_checkpointing="full", unsharded="nothing")


@dataclass(frozen=True)
class Step:
    """A whole step that was measured, by phase in seconds; generation with waking and the hand-over of weights."""

    name: str
    devices: int
    prompts: int
    minibatch: int
    prompt: tuple[int, tuple[int, int, int]]  # tokens, and the patches of its image
    seconds: dict[str, float]
    compute: ModelConfig = COMPILED
    size: str = "7b"
    mean: int = 400  # of a response
    old_log_probs: float = (
        1.0  # share of the rows that have a pass of their own; the update computes those of the others
    )

    @property
    def responses(self) -> tuple[int, ...]:
        rows = 5 * self.prompts
        return (512,) * rows if self.mean == 512 else response_lengths(rows, self.mean, 2048)


STEPS = (
    Step(
        "7B, four devices, 512 x 5",
        4,
        512,
        128,
        (361, (1, 30, 30)),
        {"generation": 26.7, "old_log_probs": 11.3, "reference": 10.8, "update": 31.0, "step": 81.1},
    ),
    Step(
        "7B, four devices, prompts of 236 tokens",
        4,
        512,
        128,
        (236, (1, 20, 20)),
        {"generation": 22.0, "old_log_probs": 9.1, "reference": 9.3, "update": 24.5, "step": 65.6},
    ),
    Step(
        "7B, two devices, 128 x 5, eager, full",
        2,
        128,
        32,
        (361, (1, 30, 30)),
        {"generation": 9.6, "old_log_probs": 6.9, "reference": 6.8, "update": 28.0, "step": 52.5},
        EAGER,
        mean=512,
    ),
    Step(
        "7B, two devices, 128 x 5, compiled, selective",
        2,
        128,
        32,
        (361, (1, 30, 30)),
        {"generation": 9.62, "old_log_probs": 3.69, "reference": 4.87, "update": 18.46, "step": 37.4},
        ModelConfig(
            token_budget=6144,
            scoring_token_budget=32_768,
            activation_checkpointing="selective",
            compile=True,
            unsharded="gradients",
        ),
        mean=512,
        old_log_probs=0.75,
    ),
)


@dataclass(frozen=True)
class Update:
    """An update that was measured: compiled, selective checkpointing."""

    name: str
    layout: Layout
    seconds: float
    size: str = "7b"
    budget: int = 8192
    prompts: int = 64
    layers: int | None = None
    checkpointing: str = "selective"
    stages: tuple[int, ...] | None = None  # layers of each; stages were not split by cost then
    unsharded: Unsharded = "nothing"


UPDATES = (
    Update("3B, one device", Layout(), 3.05, "3b", 16_384, 24),
    Update("3B, two devices", Layout(dp=2), 2.87, "3b", 16_384, 40),
    Update("7B, two devices", Layout(dp=2), 4.63, prompts=40),
    Update("7B, two devices, full", Layout(dp=2), 5.30, budget=16_384, prompts=40, checkpointing="full"),
    Update("7B, dp 4", Layout(dp=4), 3.64),
    Update("7B, dp 2, tp 2", Layout(dp=2, tp=2), 5.56),
    Update("7B, sp 2", Layout(sp=2), 6.9, prompts=40, unsharded="weights"),
    Update("7B, dp 2, pp 2", Layout(dp=2, pp=2), 4.55, stages=(14, 14)),
    Update("7B, tp 2, pp 2", Layout(tp=2, pp=2), 6.07, stages=(14, 14)),
    Update("7B, sp 2, pp 2", Layout(sp=2, pp=2), 8.01, budget=4096, stages=(14, 14)),  # of 8,192 for both ranks
    Update("30B-A3B, 16 layers, dp 4", Layout(dp=4), 2.48, "30b-a3b", layers=16),
    Update("30B-A3B, 16 layers, dp 4, ep 4", Layout(dp=4, ep=4), 4.07, "30b-a3b", layers=16),
)


@dataclass(frozen=True)
class Rollout:
    """Tokens per second of 256 responses to prompts of 361 tokens on each device, which the engines have read before."""

    name: str
    size: str
    devices: int
    parallel: int
    tokens: int  # of a response
    rate: float


ROLLOUTS = (
    Rollout("3B, one device", "3b", 1, 1, 512, 28_384),
    Rollout("7B, one device", "7b", 1, 1, 512, 21_698),
    Rollout("7B, two devices, two engines", "7b", 2, 1, 256, 35_450),
    Rollout("7B, two devices, one engine with tp 2", "7b", 2, 2, 256, 31_304),
)

HAND_OVERS = (
    ("3B, one device", "3b", 1, 0.293),
    ("7B, one device", "7b", 1, 0.387),
    ("7B, two devices", "7b", 2, 0.265),
)
"""Seconds of waking, the hand-over and the cache."""

NAMES = {"generation": "gen", "old_log_probs": "old_log_prob", "reference": "ref", "update": "update_actor"}
"""The phases of a forecast by those of the measured steps."""

Row = tuple[str, str, float, float]
"""What, its phase, simulated, measured."""


@cache
def config_of(size: str, layers: int | None = None) -> object:
    return model_config(size, layers)


def step_rows(step: Step) -> Iterator[Row]:
    sizes = PromptSizes((step.prompt[0],), ((step.prompt[1],),)).repeated(step.prompts)
    config = config_of(step.size)
    batch, layout = BatchSizes(config, sizes, step.responses, 5), Layout(dp=step.devices)
    given = {"minibatch": step.minibatch, "old_log_probs": step.old_log_probs, "reference": True}
    found = forecast(with_share(Setting(config, batch, H200, step.compute, layout, "vllm", **given)))
    seconds = {phase.name: phase.seconds for phase in found.phases} | {"step": found.seconds}
    seconds["gen"] += seconds.pop("hand_over")
    for name, measured in step.seconds.items():
        yield step.name, name, seconds[NAMES.get(name, name)], measured


def update_row(update: Update) -> Row:
    """The median of the benchmark's first three counted batches."""
    config = config_of(update.size, update.layers)
    compute = replace(
        COMPILED,
        token_budget=update.budget,
        activation_checkpointing=update.checkpointing,
        unsharded=update.unsharded,
        pipeline_layers=update.stages,
    )
    seconds = []
    for number in (3, 4, 5):
        data = make_batch(config, shape_of(update.size), update.prompts, 1, seed=1000 * number)
        setting = Setting(config, batch_sizes(data, config, 1), H200, compute, update.layout, engine=None)
        seconds.append(forecast(setting).phases[-1].seconds)
    return update.name, "update", sorted(seconds)[1], update.seconds


def rollout_row(rollout: Rollout) -> Row:
    prompts = 256 * rollout.devices
    sizes = PromptSizes((361,), (((1, 30, 30),),)).repeated(prompts)
    batch = BatchSizes(config_of(rollout.size), sizes, (rollout.tokens,) * prompts)
    roomy = replace(H200, host=HOST_BEFORE, memory=2 * H200.memory)  # the benchmark's actor has no moments
    options = {"tensor_parallel": rollout.parallel, "memory_share": 0.5}
    setting = Setting(batch.config, batch, roomy, COMPILED, Layout(dp=rollout.devices), "vllm", options)
    phases = {phase.name: phase.seconds for phase in forecast(setting).phases}
    seconds = phases["gen"] - reading_seconds(setting)
    return rollout.name, "generation, tokens/s", prompts * rollout.tokens / seconds, rollout.rate


def hand_over_row(name: str, size: str, devices: int, measured: float) -> Row:
    sizes = PromptSizes((361,), (((1, 30, 30),),)).repeated(devices)
    config = config_of(size)
    batch = BatchSizes(config, sizes, (64,) * devices)
    found = forecast(Setting(config, batch, H200, COMPILED, Layout(dp=devices), "vllm"))
    return name, "hand-over", found.phases[0].seconds, measured


def rows() -> Iterator[Row]:
    for step in STEPS:
        yield from step_rows(step)
    yield from map(update_row, UPDATES)
    yield from map(rollout_row, ROLLOUTS)
    yield from (hand_over_row(*each) for each in HAND_OVERS)


def lines() -> Iterator[str]:
    """A Markdown table."""
    yield "| | phase | simulated | measured | ratio |"
    yield "| --- | --- | --- | --- | --- |"
    for name, phase, simulated, measured in rows():
        figures = (f"{each:,.0f}" if each >= 1000 else f"{each:.2f}" for each in (simulated, measured))
        yield f"| {name} | {phase} | {' | '.join(figures)} | {simulated / measured:.2f} |"


if __name__ == "__main__":
    print("\n".join(lines()))
