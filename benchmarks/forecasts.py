"""Forecast beside what benchmarks/RESULTS.md reports of updates on H200: ``python benchmarks/forecasts.py``. Needs no GPU.

The rows are those of benchmarks/train_step.py, whose memory is torch's peak of what is allocated, and of benchmarks/rollout.py.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

from benchmarks.workload import make_batch, model_config, shape_of  # noqa: E402
from dataproto import DataProto  # noqa: E402
from recipes.plan.forecast import forecast  # noqa: E402
from recipes.plan.rows import BatchSizes, PromptSizes  # noqa: E402
from recipes.plan.seconds import prefill_seconds  # noqa: E402
from recipes.plan.setting import (  # noqa: E402
    DEVICES,
    GIB,
    Setting,
)
from workers.model.model_config import ModelConfig, Unsharded  # noqa: E402
from workers.ranks.layout import Layout  # noqa: E402

H200 = DEVICES["h200"]
HOST_BEFORE = 0.7
"""Seconds of the hosts of 2026-11-21 for Python, as a multiple of those of the reference host; not measured."""
HOST = 0.8
"""The same of the hosts of 2026-11-23, which were timed at 0.75 to 0.83."""


@dataclass(frozen=True)
class Update:
    """An update that was measured."""

    name: str
    size: str
    budget: int
    checkpointing: str
    seconds: float
    gib: float | None
    prompts: int = 24
    samples: int = 1
    optimizer: bool = True  # whether AdamW had moments
    dp: int = 1
    sp: int = 1
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
    Update("7B, sp 2, no reshard", "7b", 8192, "selective", 6.9, None, prompts=40, sp=2, unsharded="weights"),
)


@dataclass(frozen=True)
class OnOneDevice:
    """Log-probs and an update of the same rows on one device, each in seconds and GiB."""

    size: str
    budget: int
    checkpointing: str
    prompts: int
    samples: int
    scoring: tuple[float, float]
    update: tuple[float, float]

    @property
    def name(self) -> str:
        return f"{self.size.upper()}, {self.checkpointing}, budget {self.budget:,}, {self.prompts} prompts x {self.samples}"


ON_ONE_DEVICE = (
    OnOneDevice("3b", 12_288, "selective", 12, 4, (0.73, 50.2), (2.20, 102.3)),
    OnOneDevice("3b", 8192, "none", 16, 2, (0.79, 50.2), (2.33, 105.5)),
    OnOneDevice("3b", 9472, "none", 24, 1, (0.97, 50.2), (2.89, 116.2)),
    OnOneDevice("7b", 16_384, "full", 24, 1, (1.51, 48.4), (5.58, 89.5)),  # without moments
    OnOneDevice("7b", 8192, "selective", 12, 4, (1.30, 47.7), (3.93, 111.1)),  # without moments
)


@dataclass(frozen=True)
class Generation:
    """256 responses to prompts with an image on each device, by vLLM beside the actor, whose optimizer has no moments."""

    size: str
    tokens_per_second: float
    gib: float | None = None  # of a device while the engine is awake
    asleep: float | None = None
    prompt: tuple[int, int] = (361, 30)  # tokens, and patches along a side of the image
    tokens: int = 512  # of a response
    devices: int = 1
    parallel: int = 1
    memory_share: float = 0.5

    @property
    def name(self) -> str:
        place = f"{self.devices} devices, tp {self.parallel}, " if self.devices > 1 else ""
        return f"{self.size.upper()}, {place}prompts of {self.prompt[0]}"


GENERATIONS = (
    Generation("3b", 28_384, 83.6, 15.7),
    Generation("7b", 21_698, 100.7, 33.6),
    Generation("3b", 33_320, prompt=(236, 20)),
    Generation("7b", 23_420, prompt=(236, 20)),
    Generation("7b", 35_450, 71.8, 18.0, tokens=256, devices=2, memory_share=0.4),
    Generation("7b", 31_304, 73.3, 19.3, tokens=256, devices=2, parallel=2, memory_share=0.4),
)


@dataclass(frozen=True)
class WholeStep:
    """A GRPO step of `recipes.grpo`: 128 prompts x 5 samples, four updates or one, a reference; compiled.

    Memory is what torch allocated, without the engine's.
    """

    name: str
    size: str
    tokens: int  # of a response
    prompt: tuple[int, int]  # tokens, and patches along a side of the image
    host: float  # see `recipes.plan.setting.Device`
    gen: float  # seconds, with waking the engine and the hand-over of weights
    ref: float
    update_actor: float
    updating_gib: float
    scoring_gib: float
    old_log_prob: float | None = None  # None: the update scores the rows itself
    devices: int = 1
    minibatch: int = 128
    compute: ModelConfig = field(
        default_factory=partial(ModelConfig, token_budget=8192, activation_checkpointing="selective", compile=True)
    )
    engine: Mapping[str, float] = field(default_factory=lambda: {"memory_share": 0.3})


WHOLE_STEPS = (
    WholeStep(
        "7B, two devices",
        *("7b", 512, (361, 30), HOST),
        *(9.62, 4.87, 18.46, 128.5, 77.0, 3.69),
        devices=2,
        minibatch=32,  # the first mini-batch scores itself
        compute=ModelConfig(
            token_budget=6144,
            scoring_token_budget=32_768,
            activation_checkpointing="selective",
            compile=True,
            unsharded="gradients",
        ),
        engine={"memory_share": 0.4, "max_num_seqs": 320},
    ),
    WholeStep(
        "3B, one device, responses of 512",
        *("3b", 512, (361, 30), 0.79),
        *(14.44, 4.74, 17.28, 95.9, 59.1, 3.60),
        minibatch=32,
        compute=ModelConfig(
            token_budget=10_240,
            scoring_token_budget=32_768,
            activation_checkpointing="selective",
            compile=True,
            unsharded="gradients",
        ),
        engine={"memory_share": 0.5, "max_num_seqs": 640},
    ),
    WholeStep(
        "3B, one device, responses of 512, none, budget 6,144",
        *("3b", 512, (361, 30), 0.79),  # timed at 1.78 in a slow stretch; its calm steps take as long as those of 0.79
        *(13.70, 4.77, 19.40, 95.4, 59.1, 3.59),
        minibatch=32,
        compute=ModelConfig(token_budget=6144, scoring_token_budget=32_768, compile=True, unsharded="gradients"),
        engine={"memory_share": 0.5, "max_num_seqs": 640},
    ),
    WholeStep("3B, one device", "3b", 2041, (312, 28), 0.75, 45.84, 16.61, 66.46, 89.7, 58.2),
)


def whole_step_rows(step: WholeStep) -> dict[str, tuple[float, float]]:
    """Forecast seconds of each phase, and GiB of all roles but the engine in it."""
    config, (tokens, side) = model_config(step.size), step.prompt
    prompts = PromptSizes((tokens,), (((1, side, side),),)).repeated(128)
    sizes = BatchSizes(config, prompts, (step.tokens,) * 640, 5)
    setting = Setting(
        *(config, sizes, replace(H200, host=step.host), step.compute, Layout(dp=step.devices)),
        engine="vllm",
        engine_options=step.engine,
        minibatch=step.minibatch,
        old_log_probs=0.0 if step.old_log_prob is None else 0.75,
        reference=True,
        variation=0,
    )
    found = {
        phase.name: (phase.seconds, sum(role.device for role in phase.roles[:-1]) / GIB)
        for phase in forecast(setting).phases
    }
    handed, (generating, gib) = found.pop("hand_over"), found["gen"]
    return found | {"gen": (handed[0] + generating, gib)}


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
        layout = Layout(dp=measured.dp, sp=measured.sp)
        setting = Setting(config, sizes, H200, compute, layout, engine=None, variation=0)
        phase = forecast(setting).phases[-1]
        actor = phase.roles[0] if measured.optimizer else replace(phase.roles[0], moments=0)
        seconds.append(phase.seconds)
        peaks.append(actor.device / GIB)
    return sorted(seconds)[1], max(peaks)


def one_device_rows(measured: OnOneDevice) -> tuple[tuple[float, float], tuple[float, float]]:
    """Forecast seconds and GiB of log-probs and of the update."""
    config = model_config(measured.size)
    compute = ModelConfig(token_budget=measured.budget, activation_checkpointing=measured.checkpointing, compile=True)
    data = make_batch(config, shape_of(measured.size), measured.prompts, measured.samples, seed=3000)
    sizes, found = batch_sizes(data, config, measured.samples), []
    setting = Setting(config, sizes, H200, compute, engine=None, old_log_probs=1.0, variation=0)
    for phase in forecast(setting).phases:
        actor = phase.roles[0] if measured.size == "3b" else replace(phase.roles[0], moments=0)
        found.append((phase.seconds, actor.device / GIB))
    scored, updated = found
    return scored, updated


def generation_row(measured: Generation) -> tuple[float, float, float]:
    """Forecast tokens per second, and GiB of a device with the engine awake and asleep.

    The benchmark generates for the same prompts again, whose keys the engine still has: it reads them once, before it counts.
    """
    config, (tokens, side), count = model_config(measured.size), measured.prompt, 256 * measured.devices
    prompts = PromptSizes((tokens,), (((1, side, side),),)).repeated(count)
    sizes = BatchSizes(config, prompts, (measured.tokens,) * count)
    options = {"memory_share": measured.memory_share, "tensor_parallel": measured.parallel}
    layout = Layout(dp=measured.devices)
    device = replace(H200, host=HOST_BEFORE)
    setting = Setting(config, sizes, device, layout=layout, engine="vllm", engine_options=options)
    phases = {phase.name: phase for phase in forecast(setting).phases}
    generating, updating = phases["gen"], phases["update_actor"]
    weights = generating.roles[0].weights  # copies and moments come with the first update
    awake, asleep = (
        (weights + engine.device + H200.context) / GIB
        for engine in (phase.roles[-1] for phase in (generating, updating))
    )
    seconds = generating.seconds - reading_seconds(setting)
    return count * measured.tokens / seconds, awake, asleep


def reading_seconds(setting: Setting) -> float:
    """Forecast seconds in which the engines read their prompts; the engine had them and its host took no further requests."""
    share = setting.batch.share(setting.prompts, setting.layout.world_size // setting.engine_parallel)
    return prefill_seconds(replace(setting, device=replace(setting.device, host=0.0)), share, len(share.responses))


def lines() -> Iterator[str]:
    """A Markdown table."""
    yield "| | forecast s | measured s | ratio | forecast GiB | measured GiB | ratio |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for each in UPDATES:
        yield line(f"{each.name}, update", *update_row(each), each.seconds, each.gib)
    for alone in ON_ONE_DEVICE:
        scored, updated = one_device_rows(alone)
        yield line(f"{alone.name}, log-probs", *scored, *alone.scoring)
        yield line(f"{alone.name}, update", *updated, *alone.update)
    for one in GENERATIONS:
        rate, awake, asleep = generation_row(one)
        yield line(f"{one.name}, generation, tokens/s", rate, awake, one.tokens_per_second, one.gib)
        if one.asleep is not None:
            yield line(f"{one.name}, engine asleep", None, asleep, None, one.asleep)
    for step in WHOLE_STEPS:
        yield from whole_step_lines(step)


def names() -> Iterator[str]:
    """What the rows of the table are named, without computing them."""
    yield from (f"{each.name}, update" for each in UPDATES)
    yield from (f"{each.name}, {work}" for each in ON_ONE_DEVICE for work in ("log-probs", "update"))
    yield from (f"{each.name}, generation, tokens/s" for each in GENERATIONS)
    yield from (f"{each.name}, engine asleep" for each in GENERATIONS if each.asleep is not None)
    for step in WHOLE_STEPS:
        phases = (
            "gen",
            *(["old_log_prob"] if step.old_log_prob is not None else []),
            "ref",
            "update_actor",
            "all of these",
        )
        yield from (f"{step.name}, whole step: {phase}" for phase in phases)


def whole_step_lines(step: WholeStep) -> Iterator[str]:
    """The rows of a whole step."""
    found = whole_step_rows(step)
    memory = dict.fromkeys(("old_log_prob", "ref"), step.scoring_gib) | {"update_actor": step.updating_gib}
    for phase, forecast_of in found.items():
        yield line(f"{step.name}, whole step: {phase}", *forecast_of, getattr(step, phase), memory.get(phase))
    phases = sum(seconds for seconds, _ in found.values())
    measured = sum(getattr(step, phase) for phase in found)
    yield line(f"{step.name}, whole step: all of these", phases, None, measured, None)


def line(
    name: str, pace: float | None, gib: float | None, measured_pace: float | None, measured_gib: float | None
) -> str:
    """A row of the table; what was not measured is left out."""
    cells: list[str] = []
    for expected, fact, digits in ((pace, measured_pace, 2), (gib, measured_gib, 1)):
        if expected is None or fact is None:
            cells += ["", "", ""]
        else:
            written = (f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}f}" for value in (expected, fact))
            cells += [*written, f"{expected / fact:.2f}"]
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(lines()))
