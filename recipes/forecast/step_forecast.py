"""The forecast of a run: memory of each role in each phase, operations and time of a step, disk and time of the whole run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from recipes.forecast.batch_sizes import BatchSizes
from recipes.forecast.devices import GIB, Device
from recipes.forecast.role_memory import (
    ASLEEP,
    ENGINE_RESERVE,
    MUON_KERNELS,
    RoleMemory,
    held,
    idle,
    kv_bytes,
    reading,
    scoring,
    sharded,
    stepping,
    updating,
)
from recipes.forecast.settings import Setting
from recipes.forecast.step_time import (
    Engine,
    engine_of,
    gather_seconds,
    generation_seconds,
    scoring_flops,
    scoring_seconds,
    update_flops,
    update_seconds,
)
from rollout.engine import slots_for
from rollout.hf.hf_engine import TOKEN_BUDGET
from workers.model.model_config import UNSHARDED, Unsharded

FULL = 0.92  # share of the memory that `with_unsharded` uses at most
SLACK = 1.05  # memory that the allocator reserves beside what is in use
DISK = 1e9  # bytes per second


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
    problems: tuple[str, ...] = ()  # why it does not fit
    evaluation: tuple[RoleMemory, ...] = ()
    """All roles while held-out problems are answered, where that is not as in a step."""

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
        """Bytes of the fullest phase on a device, or of an evaluation, with the allocator's slack and what is `beside` roles."""
        evaluation = _reserved(self.evaluation, self.setting.device)
        return max(evaluation, *map(self.reserved, self.phases)) + self.beside

    @property
    def fullest(self) -> Phase:
        """The phase, or the evaluation, that takes the most."""
        return max((*self.phases, Phase("testing", 0.0, 0.0, self.evaluation)), key=self.reserved)

    @property
    def beside(self) -> int:
        """Bytes of the driver, or on a CPU of the process beside its roles, with pictures and the copy for ``save_behind``."""
        setting = self.setting
        if not setting.device.on_cpu:
            return setting.device.context
        copied = setting.saving if setting.save_behind else 0
        kernels = MUON_KERNELS if "muon" in (setting.optimizer, setting.critic_optimizer) else 0
        return setting.device.context + setting.kept_images + setting.pictures + copied + kernels

    def reserved(self, phase: Phase) -> int:
        """Bytes of a phase with the slack, which an engine's memory does not need."""
        return _reserved(phase.roles, self.setting.device)

    @property
    def tokens(self) -> int:
        """Tokens of prompts and responses of all rows, as ``perf/total_num_tokens``."""
        return int(self.setting.batch.lengths.sum())

    @property
    def host(self) -> int:
        """Bytes of host memory of a process: offloaded state, what a checkpoint takes while it is written, and kept images."""
        setting = self.setting
        offloaded = max(sum(role.host for role in phase.roles) for phase in self.phases)
        return offloaded + (0 if setting.device.on_cpu else setting.saving + setting.kept_images)

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint: training states, and the exported weights of the policy."""
        return self.setting.state_bytes + self.setting.export_bytes

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
        answers = self.setting.eval_rows * self.setting.eval_samples
        return generated * answers / max(len(self.setting.batch.responses), 1)

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
    prepared = setting.prompts * setting.device.overheads.preparation
    phases = [Phase("data", prepared, 0.0, tuple(resting.values()))] if prepared else []
    if setting.engine is not None:
        phases.append(_generation(setting, resting))
    phases += _passes(setting, resting)
    found = StepForecast(setting, tuple(phases), evaluation=_evaluation(setting, resting))
    return replace(found, problems=tuple(_problems(found)))


def _passes(setting: Setting, resting: Mapping[str, RoleMemory]) -> Iterator[Phase]:
    """The passes of a step in order. What a tower that is not trained keeps spares it the media of later ones."""
    kept = {"actor": 0.0, "critic": 0.0}  # share of the step's features that each of them has so far
    scored = {"old_log_prob": setting.old_log_probs, "ref": setting.reference, "values": bool(setting.critic_epochs)}
    role_of = {"old_log_prob": "actor", "ref": "reference", "values": "critic"}
    for name, share in scored.items():
        if share:
            owner = "actor" if name == "ref" and not setting.teacher else role_of[name]
            read = 1 - kept.get(owner, 0.0)
            if owner in kept:
                kept[owner] = max(kept[owner], share * setting.kept_share)
            yield _scoring(setting, resting, name, role_of[name], float(share), kept, read)
    for role, epochs in (("critic", setting.critic_epochs), ("actor", setting.epochs)):
        if epochs:
            read = (epochs - kept[role] - (epochs - 1) * setting.kept_share) / epochs
            kept[role] = setting.kept_share
            yield _update(setting, resting, role, epochs, kept, read)
            kept[role] = 0.0


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
    batches = (
        "share",
        "micro_batches",
        "fullest_micro_batches",
        "scoring_micro_batches",
        "fullest_scoring_micro_batches",
    )
    same = (*batches, "size", "critic_size", "reference_size", "feature_bytes", "route_bytes")
    vars(found).update({name: vars(setting)[name] for name in same if name in vars(setting)})
    return found


def working_memory(setting: Setting) -> int:
    """Bytes of the fullest phase that is not generation, with slack and driver."""
    resting, works = _resting(setting), [("actor", True), ("actor", False)]
    works += [("reference", False)] if setting.reference else []
    works += [("critic", True), ("critic", False)] if setting.critic_epochs else []
    kept = dict.fromkeys(("actor", "critic"), setting.kept_share)
    phases = [_busy(setting, resting, role, learns, kept) for role, learns in works]
    return max(_reserved(roles, setting.device) for roles in phases) + setting.device.context


def _reserved(roles: Sequence[RoleMemory], device: Device) -> int:
    """Bytes with the slack, which an engine's memory does not need."""
    slack = 1.0 if device.on_cpu else SLACK
    return round(sum(role.device * (1.0 if role.role == "engine" else slack) for role in roles))


def _resting(setting: Setting) -> dict[str, RoleMemory]:
    """What each role holds while another one works."""
    roles = _present(setting)
    if setting.compute.offload_idle:
        roles = {name: idle(each) for name, each in roles.items()}
    return roles | _asleep(setting)


def _asleep(setting: Setting) -> dict[str, RoleMemory]:
    """What the engine holds while another role works."""
    if setting.engine is None or setting.engine_apart:
        return {}
    weights = setting.size.total * setting.device.bytes_of_number
    asleep = RoleMemory("engine", other=ASLEEP) if setting.engine == "vllm" else RoleMemory("engine", weights)
    return {"engine": asleep}


def _present(setting: Setting) -> dict[str, RoleMemory]:
    """What each role with a model holds while it works, beside what the work takes."""
    place = setting.compute, setting.layout, setting.device
    roles = {"actor": held("actor", setting.size, *place, trains=True, optimizer=setting.optimizer)}
    if setting.reference and setting.base_is_reference:
        roles["reference"] = RoleMemory("reference")
    elif setting.reference:
        roles["reference"] = held("reference", setting.reference_size, *place, trains=False)
    if setting.critic_epochs:
        roles["critic"] = held("critic", setting.critic_size, *place, True, setting.critic_optimizer)
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
        cache = max(whole - weights - ENGINE_RESERVE, 0)
        recorded = cache // engine.kv_bytes * setting.route_bytes  # beside memory_share
        memory = RoleMemory("engine", weights, kv_cache=cache, routes=recorded, other=ENGINE_RESERVE)
        fitting = int(memory.kv_cache / engine.kv_bytes / float(share.lengths.double().mean()))
        engine = replace(engine, rows=max(min(engine.rows, fitting), 1))
    else:
        memory = _answering(setting, share, engine)
    columns = share.packed_tokens * setting.route_bytes
    memory = replace(memory, routes=columns) if setting.device.on_cpu else replace(memory, host=columns)
    roles = {name: role for name, role in resting.items() if name != "engine"}
    flops = scoring_flops(setting.batch).total
    seconds = generation_seconds(share, engine, setting.device)
    return Phase("gen", seconds, flops, (memory,) if setting.engine_apart else (*roles.values(), memory))


def _answering(setting: Setting, share: BatchSizes, engine: Engine) -> RoleMemory:
    """The Hugging Face engine at the height of its work for these rows: it reads their prompts, then it decodes them.

    Samples of a prompt share what is read of it.
    """
    rows = min(engine.rows, len(share.responses))
    cache = int(share.lengths.topk(rows).values.sum()) * engine.kv_bytes
    vocabulary = int(setting.config.get_text_config().vocab_size)
    memory = RoleMemory("engine", setting.size.total * setting.device.bytes_of_number)
    decoding = replace(memory, kv_cache=cache, logits=8 * rows * vocabulary)
    prompts = share.prompts.first(-(-rows // share.samples))
    budget = int(setting.engine_options.get("token_budget", TOKEN_BUDGET))
    decoder, tower = map(round, reading(setting.config, setting.size, prompts, budget, setting.device))
    tower, decoder = (tower, 0) if tower > decoder else (0, decoder)  # the highest of two places
    start = replace(memory, kv_cache=sum(prompts.tokens) * engine.kv_bytes, tower=tower, activations=decoder)
    return max(decoding, start, key=lambda each: each.device)


def _evaluation(setting: Setting, resting: Mapping[str, RoleMemory]) -> tuple[RoleMemory, ...]:
    """All roles while the Hugging Face engine answers held-out prompts, each of which it reads once for all its answers.

    vLLM takes no more memory for them than in a step. On a CPU their pictures are `Setting.pictures`.
    """
    if not setting.answered or setting.engine != "hf" or setting.engine_apart:
        return ()
    engine = engine_of(setting.config, setting.size, "hf", setting.engine_options, setting.device)
    rows = -(-setting.answered // setting.layout.world_size)
    prompts, count = setting.batch.prompts.repeated(rows), rows * setting.eval_samples
    answers = replace(
        setting.batch,
        prompts=replace(prompts, grids=((),) * rows) if setting.device.on_cpu else prompts,
        responses=tuple(islice(cycle(setting.batch.responses), count)),
        samples=setting.eval_samples,
        shown=None if setting.batch.shown is None else setting.batch.shown.repeated(count),
    )
    roles = {name: role for name, role in resting.items() if name != "engine"}
    return (*roles.values(), _answering(setting, answers, engine))


def _scoring(
    setting: Setting,
    resting: Mapping[str, RoleMemory],
    name: str,
    role: str,
    share: float,
    kept: Mapping[str, float],
    tower: float,
) -> Phase:
    """A pass without gradients over a share of the rows; ``tower`` as in `update_flops`."""
    parts, layout, device = setting.scoring_micro_batches, setting.layout, setting.device
    seconds = scoring_seconds(setting.batch, setting.compute, layout, device, parts, tower, share)
    gathers = 1 if setting.compute.leaves_unsharded("scoring") else len(parts)
    seconds += share * gather_seconds(setting.size, layout, device, gathers)
    busy = _busy(setting, resting, role, False, kept)
    return Phase(name, seconds, share * scoring_flops(setting.batch, tower).total, busy)


def _update(
    setting: Setting,
    resting: Mapping[str, RoleMemory],
    role: str,
    epochs: int,
    kept: Mapping[str, float],
    tower: float,
) -> Phase:
    size = setting.critic_size if role == "critic" else setting.size
    flops = epochs * update_flops(setting.batch, size, setting.compute, tower).total
    updates, parts = setting.updates // setting.epochs, setting.micro_batches
    place = setting.compute, setting.layout, setting.device
    once = update_seconds(setting.batch, size, *place, updates, parts, tower)
    return Phase(f"update_{role}", epochs * once, flops, _busy(setting, resting, role, True, kept))


def _busy(
    setting: Setting, resting: Mapping[str, RoleMemory], role: str, learns: bool, kept: Mapping[str, float]
) -> tuple[RoleMemory, ...]:
    """All roles while ``role`` works and has taken in what it keeps: ``kept`` are shares of the step's features."""
    sizes = {"actor": setting.size, "critic": setting.critic_size if setting.critic_epochs else setting.size}
    place, present = (setting.compute, setting.layout, setting.device), _present(setting)
    if learns:
        parts = setting.fullest_micro_batches
        held = idle(present[role], moments_alone=True) if setting.compute.offload_idle else present[role]
        memory = updating(held, sizes[role], setting.config, *place, parts, makes_logits=role != "critic")
        if setting.compute.offload_idle:  # whose moments come for the optimizer step, after the passes
            step = stepping(present[role], sizes[role], setting.compute, setting.layout)
            memory = max(memory, step, key=lambda each: each.device)
    else:
        size, parts = sizes.get(role) or setting.reference_size, setting.fullest_scoring_micro_batches
        memory = scoring(present[role], size, setting.config, *place, parts)
        if setting.compute.offload_idle:
            memory = idle(memory, moments_alone=True)
    if role == "actor":
        memory = replace(memory, routes=setting.route_bytes * max(part.tokens for part in parts))
    roles = dict(resting)
    if role == "reference" and setting.base_is_reference and setting.compute.offload_idle:
        roles["actor"] = idle(present["actor"], moments_alone=True)  # whose weights the reference uses
    features = {name: round(share * setting.feature_bytes) for name, share in kept.items()}
    return tuple(
        replace(memory if name == role else each, features=features.get(name, 0)) for name, each in roles.items()
    )


def _problems(found: StepForecast) -> list[str]:
    """What does not fit; `recipes.forecast.way_out` finds options with which it does."""
    setting, problems = found.setting, []
    memory = setting.device.memory
    if found.memory > memory:
        problems.append(
            f"{found.fullest.name} needs {found.memory / GIB:.1f} GiB of the {memory / GIB:.1f} GiB of {setting.device.name}"
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
