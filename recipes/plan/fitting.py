"""Choosing layout, token budget, checkpointing and the engine's share of memory: the fastest setting that fits."""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Literal

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from recipes.plan.devices import GIB
from recipes.plan.forecast import Forecast, Phase, forecast, resting
from recipes.plan.setting import Setting
from workers.ranks.layout import Layout

BUDGETS = (4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152)
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
LEAST_SHARE, MOST_SHARE = 0.1, 0.85
GROWTH = 0.25  # how much longer than expected responses, or learnt texts, may become
ERROR = 0.1  # share of what `way_out` takes that stays free, as a forecast may be wrong by so much (docs/plan.md)
EQUAL = 0.01  # share of a step's time below which a difference of two forecasts tells nothing
DEGREES = (1, 2, 4, 8, 16)


def fit(setting: Setting, devices: int = 1) -> Forecast:
    """The fastest forecast that fits into ``devices``; of those within `EQUAL` of it, that whose models take the least memory.

    It still fits when responses become longer than expected (`grown`). Data parallelism comes first: tensor and sequence
    parallelism are tried only where it does not fit. All else comes before ``offload_idle``.

    Raises:
        InvalidConfig: nothing fits.
    """
    heads = int(setting.config.get_text_config().num_attention_heads)
    split = [degree for degree in range(2, devices + 1) if devices % degree == 0 and heads % degree == 0]
    layouts = [[Layout(dp=devices)]] if setting.prompts >= devices else []
    layouts.append([Layout(dp=devices // degree, **{axis: degree}) for degree in split for axis in ("tp", "sp")])
    compute = setting.compute
    idle = [compute] if compute.offload or compute.offload_idle else [compute, replace(compute, offload_idle=True)]
    problem = ""
    for each, group in product(idle, layouts):
        tried = [forecast(one) for layout in group for one in _choices(replace(setting, compute=each, layout=layout))]
        fitting = [found for found in tried if found.fits and forecast(grown(found.setting)).fits]
        if fitting:
            fastest = min(found.seconds for found in fitting)
            return min(
                (found for found in fitting if found.seconds <= (1 + EQUAL) * fastest), key=lambda found: found.working
            )
        nearest = min(tried, key=lambda found: found.memory, default=None)
        problem = f": {nearest.problems[0]}" if nearest and nearest.problems else problem
    raise InvalidConfig(f"nothing fits into {devices} x {setting.device.name}{problem}; give more --devices")


def grown(setting: Setting) -> Setting:
    """The setting with responses that are longer by `GROWTH` than expected, as far as rows may be long."""
    batch = setting.batch
    room = (setting.longest - batch.lengths).clamp(min=0).tolist()
    longer = (own + min(math.ceil(GROWTH * own), free) for own, free in zip(batch.responses, room, strict=True))
    responses = tuple(longer)
    return replace(
        setting, batch=batch.once(("grown", responses), lambda: replace(batch, responses=responses, known={}))
    )


def _choices(setting: Setting) -> Iterator[Setting]:
    """The setting with every budget that holds its longest row, every checkpointing mode, and a share for the engine."""
    longest = int(setting.batch.lengths.max())
    most = max(grown(setting).batch.share(setting.prompts, setting.layout.dp).packed_tokens, longest)
    budgets = [each for each in BUDGETS if longest <= each < most] or [longest]
    if most <= BUDGETS[-1]:
        budgets.append(most)  # all rows at once, also when responses become longer
    for mode, budget in product(MODES, budgets):
        compute = replace(setting.compute, token_budget=budget, activation_checkpointing=mode)
        yield with_share(replace(setting, compute=compute))


def with_share(setting: Setting) -> Setting:
    """The setting with vLLM's ``memory_share``: what the other roles leave of the device while they rest."""
    if setting.engine != "vllm" or setting.engine_apart:
        return setting
    others = Phase("", 0.0, 0.0, tuple(resting(setting).values())).reserved + setting.device.context
    share = min(max(math.floor(100 * (1 - others / setting.device.memory)) / 100, LEAST_SHARE), MOST_SHARE)
    return replace(setting, engine_options={**setting.engine_options, "memory_share": share})


def way_out(setting: Setting) -> str:
    """Options with which a setting that does not fit does, with room for the error of a forecast: by `fit` on as many devices,
    then with adapters, then on more.
    """
    devices, compute, device = setting.layout.world_size, setting.compute, setting.device
    setting = replace(setting, device=replace(device, memory=round(device.memory / (1 + ERROR))))
    tries = [("", setting, devices)]
    if not compute.lora_rank and not compute.freeze_language:
        tries.append(("--lora-rank 32 ", replace(setting, compute=replace(compute, lora_rank=32)), devices))
    for options, each, number in [*tries, *(("", setting, more * devices) for more in (2, 4, 8))]:
        with suppress(InvalidConfig):
            found = forecast(replace(fit(each, number).setting, device=device))
            return f"{options}{as_options(found.setting)} takes {found.memory / GIB:.1f} GiB"
    return f"nothing fits into {8 * devices} such devices either: take a smaller model"


def fastest_layout(
    setting: Setting, devices: int, layouts: Iterable[Layout] = (), parallel: int | None = None
) -> Forecast:
    """The fastest step on all ``devices``, whatever its layout, with the budget and the checkpointing of the setting.

    Args:
        layouts: to choose from; by default all that the model allows, with tp within a node and replicas of whole nodes.
        parallel: devices of an engine; by default the best number within a node.

    Raises:
        InvalidConfig: nothing fits; the message says what comes nearest, and what it needs.
    """
    heads, node = int(setting.config.get_text_config().num_attention_heads), setting.nodes.size
    sizes = [each for each in DEGREES if each <= node and heads % each == 0 and devices % each == 0]
    best: Forecast | None = None
    nearest: Forecast | None = None
    for layout, number in product(layouts or possible_layouts(setting, devices), [parallel] if parallel else sizes):
        found = forecast(with_share(replace(setting, layout=layout, engine_options={"tensor_parallel": number})))
        if found.fits and (best is None or found.seconds < best.seconds):
            best = found
        if nearest is None or found.memory < nearest.memory:
            nearest = found
    if nearest is None:
        raise InvalidConfig(f"no layout of this model has {devices} ranks: choose another number of --devices")
    if best is None:
        raise InvalidConfig(
            f"nothing fits {devices} x {setting.device.name}; nearest is {as_options(nearest.setting)}: "
            f"{nearest.problems[0]}: give more --devices, a smaller --token-budget or --activation-checkpointing full"
        )
    return best


def possible_layouts(setting: Setting, devices: int) -> Iterator[Layout]:
    """All layouts of so many devices that the model allows, with tp and sp within a node and replicas of whole nodes."""
    config, node = setting.config, setting.nodes.size
    family, text, mixture = family_of(config), config.get_text_config(), setting.size.experts > 0
    heads, experts = int(text.num_attention_heads), family.expert_count(text) if mixture else 0
    most = int(text.num_hidden_layers) - len(family.undivided_layers(config)[1:])
    within, stages = [each for each in DEGREES if each <= node], [each for each in DEGREES if each <= most]
    for tp, sp, pp in product(within, within, stages):
        dp, left = divmod(devices, tp * sp * pp)
        if heads % (sp * tp) or left or not dp:
            continue
        for replicas in (each for each in range(1, dp + 1) if dp % each == 0):
            if replicas > 1 and dp * sp * tp // replicas % node:
                continue
            for ep in DEGREES if mixture else (1,):
                if (dp * sp // replicas) % ep == 0 and (not mixture or experts % (ep * tp) == 0):
                    yield Layout(dp=dp, tp=tp, pp=pp, sp=sp, ep=ep, replicas=replicas)


def as_options(setting: Setting) -> str:
    """The chosen options as a recipe's command line takes them."""
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
