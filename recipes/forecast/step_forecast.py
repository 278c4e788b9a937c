"""The forecast of a run: memory of each role in each phase, operations and time of a step, disk and time of the whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from recipes.forecast.batch_sizes import BatchSizes, MicroBatchSize
from recipes.forecast.devices import GIB, Device
from recipes.forecast.model_size import ModelSize, model_size
from recipes.forecast.role_memory import (
    ASLEEP,
    ENGINE_RESERVE,
    RoleMemory,
    held,
    kv_bytes,
    scoring,
    sharded,
    updating,
)
from recipes.forecast.step_time import (
    engine_of,
    gather_seconds,
    generation_seconds,
    scoring_flops,
    scoring_seconds,
    update_flops,
    update_seconds,
)
from rollout.engine import slots_for
from workers.model.model_config import UNSHARDED, ModelConfig, Unsharded
from workers.ranks.layout import Layout

FULL = 0.92  # share of the memory that `with_unsharded` uses at most
SLACK = 1.05  # memory that the allocator reserves beside what is in use
DISK = 1e9  # bytes per second


@dataclass(frozen=True)
class Setting:
    """Everything that a forecast depends on."""

    config: Any  # the checkpoint's
    batch: BatchSizes  # all rows of a step
    device: Device
    compute: ModelConfig = field(default_factory=ModelConfig)
    layout: Layout = field(default_factory=Layout)
    engine: str | None = "hf"  # None: nothing is generated in a step
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    engine_apart: bool = False  # on devices of its own
    longest: int = 4096  # tokens of a prompt and its response together
    minibatch: int | None = None  # prompts of an optimizer step
    epochs: int = 1
    old_log_probs: float = 0.0  # share of the rows whose old log-probs are computed in a pass of their own
    reference: bool = False
    teacher: bool = False  # the reference is another model than the policy
    critic_epochs: int = 0  # 0: no critic
    steps: int = 1
    data_seconds: float = 0.0  # to read and prepare the prompts of a step, if no other process does
    eval_every: int = 0
    eval_rows: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return len(self.batch.prompts.tokens)

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        return self.epochs * -(-self.prompts // (self.minibatch or self.prompts))

    @cached_property
    def share(self) -> BatchSizes:
        """The rows of one data-parallel rank."""
        return self.batch.part(-(-self.prompts // self.layout.dp))

    @cached_property
    def micro_batches(self) -> list[MicroBatchSize]:
        """Those of an optimizer step on one rank."""
        prompts = -(-(self.minibatch or self.prompts) // self.layout.dp)
        return self.batch.part(prompts).micro_batches(self.compute.token_budget * self.layout.sp)

    @cached_property
    def scoring_micro_batches(self) -> list[MicroBatchSize]:
        """Those of a pass without gradients on one rank."""
        return self.share.micro_batches(self.compute.budget(backward=False) * self.layout.sp)

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the actor's model with its adapters off."""
        return self.compute.lora_rank > 0 and not self.teacher

    @cached_property
    def size(self) -> ModelSize:
        """The policy's."""
        return model_size(self.config, self.compute)

    @cached_property
    def critic_size(self) -> ModelSize:
        return model_size(self.config, self.compute, makes_logits=False)

    @cached_property
    def reference_size(self) -> ModelSize:
        return model_size(self.config, _frozen(self.compute), trains=False)


def _frozen(compute: ModelConfig) -> ModelConfig:
    return replace(compute, lora_rank=0, lora_vision=False, activation_checkpointing="none")


@dataclass(frozen=True)
class Phase:
    """One phase of a step, named as in ``timing_s/<name>``."""

    name: str
    seconds: float
    flops: float  # on all devices together
    roles: tuple[RoleMemory, ...]  # on the fullest device

    @property
    def memory(self) -> int:
        """Bytes of all roles on that device."""
        return sum(role.device for role in self.roles)


@dataclass(frozen=True)
class StepForecast:
    """What a step and the whole run take."""

    setting: Setting
    phases: tuple[Phase, ...]
    problems: tuple[str, ...] = ()  # why it does not fit, and what to change

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def flops(self) -> float:
        return sum(phase.flops for phase in self.phases)

    @property
    def memory(self) -> int:
        """Bytes of the fullest phase on a device, the allocator's slack and the driver included."""
        return max(map(self.reserved, self.phases)) + self.setting.device.context

    def reserved(self, phase: Phase) -> int:
        """Bytes of a phase with the slack, which an engine's memory does not need."""
        return _reserved(phase.roles, self.setting.device)

    @property
    def tokens(self) -> int:
        """Tokens of prompts and responses of all rows, as ``perf/total_num_tokens``."""
        return int(self.setting.batch.lengths.sum())

    @property
    def host(self) -> int:
        """Bytes of host memory of a process: offloaded state, or the checkpoint while the first rank reads it."""
        setting = self.setting
        offloaded = max(sum(role.host for role in phase.roles) for phase in self.phases)
        reads = 0 if setting.device.on_cpu else 4 * setting.size.total
        return offloaded + reads

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint: training state and the exported weights, in float32."""
        found = 8 * self.setting.size.total + 8 * self.setting.size.trained
        if self.setting.critic_epochs:
            found += 8 * self.setting.critic_size.total + 8 * self.setting.critic_size.trained
        return found

    @property
    def disk(self) -> int:
        """Bytes of the checkpoints that are kept, and of the one that is being written."""
        setting = self.setting
        saves = -(-setting.steps // setting.save_every) if setting.save_every else 1
        kept = min(saves, setting.keep_checkpoints)
        return self.checkpoint * (kept + (saves > kept))

    @property
    def evaluation_seconds(self) -> float:
        """Of one evaluation: greedy answers to the held-out problems."""
        generated = next((phase.seconds for phase in self.phases if phase.name == "gen"), 0.0)
        return generated * self.setting.eval_rows / max(len(self.setting.batch.responses), 1)

    @property
    def run_seconds(self) -> float:
        """Steps, evaluations and checkpoints; not the start of the roles."""
        setting = self.setting
        evaluations = 2 if not setting.eval_every else 1 + -(-setting.steps // setting.eval_every)
        saves = 1 if not setting.save_every else -(-setting.steps // setting.save_every)
        written = self.checkpoint / setting.layout.world_size / DISK
        return setting.steps * self.seconds + evaluations * self.evaluation_seconds + saves * written


def forecast(setting: Setting) -> StepForecast:
    """The forecast of a setting, `with_unsharded`; `StepForecast.problems` says what does not fit."""
    setting = with_unsharded(setting)
    resting = _resting(setting)
    phases = [Phase("data", setting.data_seconds, 0.0, tuple(resting.values()))] if setting.data_seconds else []
    if setting.engine is not None:
        phases.append(_generation(setting, resting))
    passes = scoring_flops(setting.batch)
    place = setting.compute, setting.layout, setting.device
    gathers = 1 if setting.compute.leaves_unsharded("scoring") else len(setting.scoring_micro_batches)
    seconds = scoring_seconds(setting.batch, *place, len(setting.scoring_micro_batches))
    seconds += gather_seconds(setting.size, setting.layout, setting.device, gathers)
    scored = {"old_log_prob": setting.old_log_probs, "ref": setting.reference, "values": bool(setting.critic_epochs)}
    role_of = {"old_log_prob": "actor", "ref": "reference", "values": "critic"}
    for name, share in scored.items():
        if share:
            busy = _busy(setting, resting, role_of[name], learns=False)
            phases.append(Phase(name, share * seconds, share * passes.total, busy))
    for role, epochs in (("critic", setting.critic_epochs), ("actor", setting.epochs)):
        if epochs:
            phases.append(_update(setting, resting, role, epochs))
    found = StepForecast(setting, tuple(phases))
    return replace(found, problems=tuple(_problems(found)))


def with_unsharded(setting: Setting) -> Setting:
    """The setting with the most unsharded between micro-batches that fits, where the options leave that open.

    A CPU keeps nothing unsharded, and neither does a layout without FSDP.
    """
    if setting.compute.unsharded != "auto":
        return setting
    if setting.device.on_cpu or sharded(setting.layout) == 1:
        return _keeping(setting, "nothing")
    working_memory(setting)  # plans the micro-batches, which all choices share
    *some, least = (_keeping(setting, each) for each in reversed(UNSHARDED))
    return next((each for each in some if working_memory(each) <= FULL * setting.device.memory), least)


def _keeping(setting: Setting, kept: Unsharded) -> Setting:
    """The setting with ``kept`` unsharded; it has the same micro-batches and sizes."""
    found = replace(setting, compute=replace(setting.compute, unsharded=kept))
    same = ("share", "micro_batches", "scoring_micro_batches", "size", "critic_size", "reference_size")
    vars(found).update({name: vars(setting)[name] for name in same if name in vars(setting)})
    return found


def working_memory(setting: Setting) -> int:
    """Bytes of the fullest phase that is not generation, with slack and driver."""
    resting, works = _resting(setting), [("actor", True), ("actor", False)]
    works += [("reference", False)] if setting.reference else []
    works += [("critic", True), ("critic", False)] if setting.critic_epochs else []
    phases = [_busy(setting, resting, role, learns) for role, learns in works]
    return max(_reserved(roles, setting.device) for roles in phases) + setting.device.context


def _reserved(roles: Sequence[RoleMemory], device: Device) -> int:
    """Bytes with the slack, which an engine's memory does not need."""
    slack = 1.0 if device.on_cpu else SLACK
    return round(sum(role.device * (1.0 if role.role == "engine" else slack) for role in roles))


def _resting(setting: Setting) -> dict[str, RoleMemory]:
    """What each role holds while another one works."""
    place = setting.compute, setting.layout, setting.device
    roles = {"actor": held("actor", setting.size, *place, trains=True)}
    if setting.reference and setting.base_is_reference:
        roles["reference"] = RoleMemory("reference")
    elif setting.reference:
        roles["reference"] = held("reference", setting.reference_size, *place, trains=False)
    if setting.critic_epochs:
        roles["critic"] = held("critic", setting.critic_size, *place, trains=True)
    if setting.engine is not None and not setting.engine_apart:
        weights = setting.size.total * setting.device.bytes_of_number
        asleep = RoleMemory("engine", other=ASLEEP) if setting.engine == "vllm" else RoleMemory("engine", weights)
        roles["engine"] = asleep
    return roles


def _generation(setting: Setting, resting: Mapping[str, RoleMemory]) -> Phase:
    parallel = int(setting.engine_options.get("tensor_parallel", 1))
    engines = max(setting.layout.world_size // parallel, 1)
    share = setting.batch.part(-(-setting.prompts // engines))
    slots = {"max_num_seqs": slots_for(len(share.responses))} if setting.engine == "vllm" else {}
    options = slots | dict(setting.engine_options)
    engine = engine_of(setting.config, setting.size, setting.engine or "hf", options, setting.device)
    number = setting.device.bytes_of_number
    weights = setting.size.total * number // parallel
    if setting.engine == "vllm" and not setting.device.on_cpu:
        whole = round(float(setting.engine_options.get("memory_share", 0.5)) * setting.device.memory)
        memory = RoleMemory("engine", weights, kv_cache=max(whole - weights - ENGINE_RESERVE, 0), other=ENGINE_RESERVE)
        fitting = int(memory.kv_cache / engine.kv_bytes / float(share.lengths.double().mean()))
        engine = replace(engine, rows=max(min(engine.rows, fitting), 1))
    else:
        rows = min(engine.rows, len(share.responses))
        cache = int(share.lengths.topk(rows).values.sum()) * engine.kv_bytes
        vocabulary = int(setting.config.get_text_config().vocab_size)
        memory = RoleMemory("engine", weights, kv_cache=cache, logits=8 * rows * vocabulary)
    roles = {name: role for name, role in resting.items() if name != "engine"}
    flops = scoring_flops(setting.batch).total
    seconds = generation_seconds(share, engine, setting.layout, setting.device)
    return Phase("gen", seconds, flops, (memory,) if setting.engine_apart else (*roles.values(), memory))


def _update(setting: Setting, resting: Mapping[str, RoleMemory], role: str, epochs: int) -> Phase:
    size = setting.critic_size if role == "critic" else setting.size
    flops = epochs * update_flops(setting.batch, size, setting.compute).total
    updates = setting.updates // setting.epochs
    once = update_seconds(
        setting.batch, size, setting.compute, setting.layout, setting.device, updates, len(setting.micro_batches)
    )
    return Phase(f"update_{role}", epochs * once, flops, _busy(setting, resting, role, learns=True))


def _busy(setting: Setting, resting: Mapping[str, RoleMemory], role: str, learns: bool) -> tuple[RoleMemory, ...]:
    """All roles while ``role`` works."""
    sizes = {"actor": setting.size, "critic": setting.critic_size if setting.critic_epochs else setting.size}
    place = setting.compute, setting.layout, setting.device
    if learns:
        parts = setting.micro_batches
        memory = updating(resting[role], sizes[role], setting.config, *place, parts, makes_logits=role != "critic")
    else:
        size = sizes.get(role) or setting.reference_size
        memory = scoring(resting[role], size, setting.config, *place, setting.scoring_micro_batches)
    return tuple(memory if name == role else each for name, each in resting.items())


def _problems(found: StepForecast) -> list[str]:
    """What does not fit, with the way out."""
    setting, problems = found.setting, []
    memory = setting.device.memory
    fullest = max(found.phases, key=found.reserved)
    if found.memory > memory:
        problems.append(
            f"{fullest.name} needs {found.memory / GIB:.1f} GiB of the {memory / GIB:.1f} GiB of {setting.device.name}: "
            f"{_way_out(setting, fullest)}"
        )
    if setting.engine == "vllm" and not setting.device.on_cpu and not setting.engine_apart:
        engine = found.phases[0].roles[-1]
        parallel = int(setting.engine_options.get("tensor_parallel", 1))
        rows = engine.kv_cache // max(kv_bytes(setting.config.get_text_config(), 2) // parallel, 1) // setting.longest
        if rows < 1:
            problems.append(
                f"the engine's share of the device has no place for one row of {setting.longest} tokens beside "
                f"{engine.weights / GIB:.1f} GiB of weights: raise --engine-options memory_share, or tensor_parallel"
            )
    return problems


def _way_out(setting: Setting, phase: Phase) -> str:
    compute, layout = setting.compute, setting.layout
    if phase.name == "gen":
        return (
            "lower --engine-options memory_share"
            if setting.engine == "vllm"
            else "lower --engine-options max_num_seqs, or take --engine vllm, whose weights sleep"
        )
    working = max(phase.roles, key=lambda role: role.activations + role.tower + role.logits)
    if working.activations + working.tower > 0.2 * phase.memory:
        longest = int(setting.batch.lengths.max())
        mode = {"none": "--activation-checkpointing selective", "selective": "--activation-checkpointing full"}
        if compute.activation_checkpointing in mode:
            return f"{mode[compute.activation_checkpointing]}, or a --token-budget below {compute.token_budget}"
        if compute.token_budget > longest:
            return f"lower --token-budget (now {compute.token_budget}; the longest row has {longest} tokens)"
    return (
        f"spread the model over more devices: --on ray --layout.dp {2 * layout.dp}, or train adapters: --lora-rank 32"
    )
