"""Choosing layout, token budget, checkpointing and the engine's share of memory: the fastest setting that fits."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Literal

from dataproto.errors import InvalidConfig
from recipes.forecast.devices import GIB
from recipes.forecast.settings import Setting
from recipes.forecast.step_forecast import SLACK, StepForecast, forecast
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout

BUDGETS = (4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152)
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
LEAST_SHARE, MOST_SHARE = 0.1, 0.85
GROWTH = 0.25  # how much longer than expected responses, or learnt texts, may become
ERROR = 0.1  # share of what `way_out` takes that stays free, as a forecast may be wrong by so much (docs/plan.md)
RANK = 32  # of the adapters that `way_out` tries
EQUAL = 0.01  # share of a step's time below which a difference of two forecasts tells nothing


def fit(setting: Setting, devices: int = 1) -> StepForecast:
    """The fastest forecast that fits into ``devices``; of those within `EQUAL` of it, that whose roles take the least memory.

    It still fits when responses become longer than expected (`grown`), since those of a step vary, and policies learn to think.
    Data parallelism comes first: tensor and sequence parallelism are tried only where it does not fit. All else comes before
    ``offload_idle``.

    Raises:
        InvalidConfig: nothing fits.
    """
    last: StepForecast | None = None
    for compute, layouts in product(_idle_choices(setting), layout_choices(setting, devices)):
        begun = replace(setting, compute=compute)
        tried = [forecast(each) for layout in layouts for each in choices(replace(begun, layout=layout))]
        fitting = [each for each in tried if each.fits and forecast(grown(each.setting)).fits]
        if fitting:
            fastest = min(each.seconds for each in fitting)
            return min((each for each in fitting if each.seconds <= (1 + EQUAL) * fastest), key=busiest_memory)
        last = min(tried, key=lambda each: each.memory, default=last)
    why = f": {last.problems[0]}" if last is not None else ""
    raise InvalidConfig(f"nothing fits into {devices} x {setting.device.name}{why}; give more --devices")


def _idle_choices(setting: Setting) -> list[ModelConfig]:
    """As the options say, and with idle models in host memory."""
    compute = setting.compute
    on_host = setting.device.on_cpu or compute.offload or compute.offload_idle
    return [compute] if on_host else [compute, replace(compute, offload_idle=True)]


def way_out(setting: Setting) -> str:
    """Options with which a setting that does not fit does, with room for the error of a forecast: by `fit` on as many devices,
    then with adapters, then on more.
    """
    devices, compute, device = setting.layout.world_size, setting.compute, setting.device
    setting = replace(setting, device=replace(device, memory=round(device.memory / (1 + ERROR))))
    tries = [("", setting, devices)]
    if not compute.lora_rank and not compute.freeze_language:
        tries.append((f"--lora-rank {RANK} ", replace(setting, compute=replace(compute, lora_rank=RANK)), devices))
    tries += [("", setting, more * devices) for more in (2, 4, 8)]
    for options, each, number in tries:
        with suppress(InvalidConfig):
            found = forecast(replace(fit(each, number).setting, device=device))
            return f"{options}{as_options(found.setting)} takes {found.memory / GIB:.1f} GiB"
    return f"nothing fits into {tries[-1][-1]} such devices either: take a smaller model"


def layout_choices(setting: Setting, devices: int) -> Iterator[list[Layout]]:
    """Layouts on so many devices, the preferred ones first."""
    if setting.prompts >= devices:
        yield [Layout(dp=devices)]
    heads = int(setting.config.get_text_config().num_attention_heads)
    split = [degree for degree in range(2, devices + 1) if devices % degree == 0 and heads % degree == 0]
    if split:
        yield [Layout(dp=devices // degree, **{axis: degree}) for degree in split for axis in ("tp", "sp")]


def busiest_memory(found: StepForecast) -> int:
    """Bytes of the fullest phase that is not generation, in which vLLM takes what the other roles leave."""
    return max((found.reserved(phase) for phase in found.phases if phase.name != "gen"), default=found.memory)


def grown(setting: Setting) -> Setting:
    """The setting with responses that are longer by `GROWTH` than expected, as far as rows may be long."""
    batch = setting.batch
    room = (setting.longest - batch.lengths).clamp(min=0).tolist()
    longer = (min(math.ceil(GROWTH * length), free) for length, free in zip(batch.responses, room, strict=True))
    responses = tuple(length + more for length, more in zip(batch.responses, longer, strict=True))
    return replace(setting, batch=replace(batch, responses=responses))


def choices(setting: Setting) -> Iterator[Setting]:
    """The setting with every budget that holds its longest row, every checkpointing mode, and a share for the engine."""
    longest = int(setting.batch.lengths.max())
    most = max(grown(setting).share.packed_tokens, longest)
    budgets = [each for each in BUDGETS if longest <= each < most] or [longest]
    if most <= BUDGETS[-1]:
        budgets.append(most)  # all rows at once, also when responses become longer
    for mode in MODES:
        for budget in budgets:
            compute = replace(setting.compute, token_budget=budget, activation_checkpointing=mode)
            yield with_share(replace(setting, compute=compute))


def with_share(setting: Setting) -> Setting:
    """vLLM's ``memory_share``: what the other roles leave of the device while they rest."""
    if setting.engine != "vllm" or setting.device.on_cpu or setting.engine_apart:
        return setting
    generating = forecast(setting).phases[0]
    others = sum(role.device for role in generating.roles if role.role != "engine") * SLACK + setting.device.context
    engine = generating.roles[-1]
    recorded = engine.routes / max(engine.kv_cache, 1)  # experts of each token, beside its keys and values
    share = math.floor(100 * (1 - others / setting.device.memory) / (1 + recorded)) / 100
    options = dict(setting.engine_options) | {"memory_share": min(max(share, LEAST_SHARE), MOST_SHARE)}
    return replace(setting, engine_options=options)


def as_options(setting: Setting) -> str:
    """The chosen options as a recipe's command line takes them.

    >>> from types import SimpleNamespace
    >>> from workers.model.model_config import ModelConfig
    >>> as_options(SimpleNamespace(compute=ModelConfig(), layout=Layout(dp=2), engine="hf", engine_options={}))
    '--token-budget 16384 --activation-checkpointing none --on ray --layout.dp 2'
    """
    compute = setting.compute
    parts = [f"--token-budget {compute.token_budget}", f"--activation-checkpointing {compute.activation_checkpointing}"]
    degrees = [f"--layout.{axis} {degree}" for axis, degree in vars(setting.layout).items() if degree > 1]
    parts += ["--offload-idle"] * compute.offload_idle
    parts += ["--on ray", *degrees] if degrees else []
    if compute.unsharded not in ("auto", "nothing"):
        parts.append(f"--unsharded {compute.unsharded}")
    if setting.engine == "vllm":
        options = " ".join(f"{name} {value}" for name, value in setting.engine_options.items())
        parts.append(f"--engine-options {options}")
    return " ".join(parts)
