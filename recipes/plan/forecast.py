"""The forecast of a step: seconds, operations, traffic, the memory of each role in each phase; and options with which it fits."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from recipes.configs.shared.device_preset import CANDIDATES
from recipes.plan import seconds as timing
from recipes.plan.memory import RoleMemory, asleep, awake, held, idle, kv_bytes, own_gradients, scoring, updating
from recipes.plan.setting import GIB, Role, Setting, Traffic
from rollout.engine import slots_for
from workers.model.model_config import UNSHARDED, Unsharded
from workers.parallel.ulysses import check_heads
from workers.ranks.layout import Layout

FULL = 0.92  # share of the memory that weights and gradients stay unsharded in
SLACK = 1.05  # memory that the allocator reserves for what is in use


@dataclass(frozen=True)
class Phase:
    """One phase of a step, named as in ``timing_s/<name>``; ``hand_over`` is a part of a run's ``gen``."""

    name: str
    seconds: float
    flops: float  # on all devices together
    roles: tuple[RoleMemory, ...]  # on the fullest device
    traffic: Traffic = field(default_factory=Traffic)  # that a device receives

    @property
    def memory(self) -> int:
        """Bytes of all roles on that device."""
        return sum(role.device for role in self.roles)

    @property
    def reserved(self) -> int:
        """Bytes with the allocator's slack, which an engine's memory does not need."""
        return round(sum(role.device * (1.0 if role.role == "engine" else SLACK) for role in self.roles))


@dataclass(frozen=True)
class Forecast:
    """What a step takes."""

    setting: Setting
    phases: tuple[Phase, ...]
    problems: tuple[str, ...] = ()  # why it does not fit

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.reserved)

    @property
    def memory(self) -> int:
        """Bytes of the fullest phase on a device, with the allocator's slack and the driver."""
        return self.fullest.reserved + self.setting.device.context

    @property
    def working(self) -> int:
        """Bytes of the fullest phase that is not generation, in which vLLM takes what the other roles leave."""
        phases = (phase.reserved for phase in self.phases if phase.name not in ("hand_over", "gen"))
        return max(phases) + self.setting.device.context

    @property
    def host(self) -> int:
        """Bytes that a process keeps in host memory in the fullest phase."""
        return max(sum(role.host for role in phase.roles) for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Tokens of prompts and responses of all rows, as ``perf/total_num_tokens``."""
        return int(self.setting.batch.lengths.sum())


def forecast(setting: Setting) -> Forecast:
    """The forecast of a setting; `Forecast.problems` says what does not fit.

    With ``unsharded="auto"`` as much stays unsharded between micro-batches as fits. A run measures what fits
    (`workers.training.memory.unsharding`).

    Raises:
        InvalidConfig: the layout does not divide the model's heads.
    """
    text, layout = setting.config.get_text_config(), setting.layout
    check_heads(text, family_of(setting.config).recurrent_mixers is not None, layout.sp, layout.tp)
    kept: list[Unsharded] = [setting.compute.unsharded]
    if setting.compute.unsharded == "auto":
        kept = ["nothing"] if setting.layout.shards == 1 else list(reversed(UNSHARDED))
    for each in kept:
        chosen = replace(setting, compute=replace(setting.compute, unsharded=each))
        found = Forecast(chosen, (*_generation(chosen), *_passes(chosen)))
        if found.working <= FULL * setting.device.memory:
            break
    return replace(found, problems=tuple(_problems(found)))


def _present(setting: Setting) -> dict[str, RoleMemory]:
    """What each role with a model holds while it works, without what the work takes."""
    roles = {"actor": held(setting, "actor")}
    if setting.reference:
        roles["reference"] = RoleMemory("reference") if setting.base_is_reference else held(setting, "reference")
    if setting.critic_epochs:
        roles["critic"] = held(setting, "critic")
    return roles


def resting(setting: Setting) -> dict[str, RoleMemory]:
    """What each role with a model holds while another one works."""
    roles = _present(setting)
    return {name: idle(each) for name, each in roles.items()} if setting.compute.offload_idle else roles


def busy(setting: Setting, role: Role, learns: bool) -> tuple[RoleMemory, ...]:
    """All roles while ``role`` updates, or makes a pass without gradients."""
    present, roles, aside = _present(setting), resting(setting), setting.compute.offload_idle
    if learns:
        own = idle(present[role], moments_only=True) if aside else present[role]
        memory = updating(setting, own, role)
        if aside:  # the moments come for the optimizer step, after the passes
            step = replace(present[role], gradients=own_gradients(setting, role))
            memory = max(memory, step, key=lambda each: each.device)
    else:
        memory = scoring(setting, present[role], role)
        memory = idle(memory, moments_only=True) if aside else memory
    if role == "reference" and setting.base_is_reference and aside:
        roles["actor"] = idle(present["actor"], moments_only=True)  # whose weights the reference uses
    roles[role] = memory
    if setting.engine is not None and not setting.layout.rollout:
        roles["engine"] = asleep(setting)
    return tuple(roles.values())


def _generation(setting: Setting) -> Iterator[Phase]:
    if setting.engine is None:
        return
    roles = () if setting.layout.rollout else tuple(resting(setting).values())
    share = setting.batch.share(setting.prompts, max(setting.layout.engine_processes // setting.engine_parallel, 1))
    default = slots_for(len(share.responses)) if setting.engine == "vllm" else 256
    rows = min(int(setting.engine_options.get("max_num_seqs", default)), len(share.responses))
    memory = awake(setting, share, rows)
    if setting.engine == "vllm":
        key_bytes = max(kv_bytes(setting.config.get_text_config()) // setting.engine_parallel, 1)
        rows = max(min(rows, int(memory.kv_cache / key_bytes / float(share.lengths.double().mean()))), 1)
        seconds, traffic = timing.hand_over_seconds(setting)
        yield Phase("hand_over", seconds, 0.0, (*roles, replace(memory, kv_cache=0, other=2 * GIB)), traffic)
    key = ("generation", setting.engine, setting.engine_parallel, rows, setting.device)
    seconds = share.once(key, lambda: timing.generation_seconds(setting, share, rows))
    yield Phase("gen", seconds, timing.scoring_flops(setting.batch).total, (*roles, memory))


def _passes(setting: Setting) -> Iterator[Phase]:
    """The passes of a step in order."""
    scored: list[tuple[str, Role, float]] = [
        ("old_log_prob", "actor", setting.old_log_probs),
        ("ref", "reference", setting.reference),
        ("values", "critic", float(setting.critic_epochs > 0)),
    ]
    for name, role, share in scored:
        if share:
            seconds, traffic = timing.scoring_seconds(setting, share)
            flops = share * timing.scoring_flops(setting.batch).total
            yield Phase(name, seconds, flops, busy(setting, role, learns=False), traffic)
    learning: list[tuple[Role, int]] = [("critic", setting.critic_epochs), ("actor", setting.epochs)]
    for role, epochs in learning:
        if epochs:
            size = setting.size_of(role)
            seconds, traffic = timing.update_seconds(setting, size)
            flops = epochs * timing.update_flops(setting.batch, size, setting.compute).total
            yield Phase(f"update_{role}", epochs * seconds, flops, busy(setting, role, learns=True), epochs * traffic)


def _problems(found: Forecast) -> Iterator[str]:
    """What does not fit; `way_out` finds options with which it does."""
    setting, memory = found.setting, found.setting.device.memory
    if found.memory > memory:
        needs = f"{found.memory / GIB:.1f} GiB of the {memory / GIB:.1f} GiB of {setting.device.name}"
        yield f"{found.fullest.name} needs {needs}"
    if setting.engine == "vllm" and not setting.layout.rollout:
        engine = next(phase for phase in found.phases if phase.name == "gen").roles[-1]
        key_bytes = max(kv_bytes(setting.config.get_text_config()) // setting.engine_parallel, 1)
        if engine.kv_cache < key_bytes * setting.longest:
            yield (
                f"the engine's share of the device has no place for one row of {setting.longest} tokens next to "
                f"{engine.weights / GIB:.1f} GiB of weights: raise --engine-options memory_share, or tensor_parallel"
            )


ERROR = 0.1  # share of what `way_out` takes that stays free, as a forecast may be wrong by so much (docs/plan.md)
LEAST_SHARE, MOST_SHARE = 0.1, 0.85
DEGREES = (1, 2, 4, 8, 16)


def with_share(setting: Setting) -> Setting:
    """The setting with vLLM's ``memory_share``: what the other roles leave of the device while they rest."""
    if setting.engine != "vllm" or setting.layout.rollout:
        return setting
    others = Phase("", 0.0, 0.0, tuple(resting(setting).values())).reserved + setting.device.context
    share = min(max(math.floor(100 * (1 - others / setting.device.memory)) / 100, LEAST_SHARE), MOST_SHARE)
    return replace(setting, engine_options={**setting.engine_options, "memory_share": share})


def way_out(setting: Setting) -> str:
    """Options with which a setting that does not fit does, with room for the error of a forecast: the first of the presets'
    `CANDIDATES` that fits, in data parallelism over as many devices, then with adapters, then over more.
    """
    devices, compute, device = setting.layout.world_size, setting.compute, setting.device
    small = replace(device, memory=round(device.memory / (1 + ERROR)))
    ways = [("", compute, devices), *(("", compute, more * devices) for more in (2, 4, 8))]
    if not compute.lora_rank and not compute.freeze_language:
        ways.insert(1, ("--lora-rank 32 ", replace(compute, lora_rank=32), devices))
    for (options, each, number), (aside, budget, mode) in product(ways, CANDIDATES):
        if (aside and compute.offload) or number > setting.prompts:
            continue
        chosen = replace(each, offload_idle=aside, token_budget=budget, activation_checkpointing=mode)
        tried = replace(setting, device=small, compute=chosen, layout=Layout(dp=number, rollout=setting.layout.rollout))
        if (fitting := forecast(with_share(tried))).fits:
            found = forecast(replace(fitting.setting, device=device))
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
    tried = [
        forecast(with_share(replace(setting, layout=layout, engine_options={"tensor_parallel": number})))
        for layout in layouts or possible_layouts(setting, devices)
        for number in ([parallel] if parallel else sizes)
    ]
    if not tried:
        raise InvalidConfig(f"no layout of this model has {devices} ranks: choose another number of --devices")
    if fitting := [found for found in tried if found.fits]:
        return min(fitting, key=lambda found: found.seconds)
    nearest = min(tried, key=lambda found: found.memory)
    raise InvalidConfig(
        f"nothing fits {devices} x {setting.device.name}; nearest is {as_options(nearest.setting)}: "
        f"{nearest.problems[0]}: give more --devices, a smaller --token-budget or --activation-checkpointing full"
    )


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
