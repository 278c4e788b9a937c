"""Seconds, memory and traffic of the phases of a step on a cluster."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dataproto.vlm import family_of
from recipes.forecast import SLACK, BatchSizes
from recipes.forecast.batch_sizes import MicroBatchSize
from recipes.forecast.devices import GIB
from recipes.forecast.model_size import ModelSize
from recipes.forecast.role_memory import ASLEEP, ENGINE_RESERVE, RoleMemory, held, scoring, updating
from recipes.forecast.step_time import (
    Engine,
    Passes,
    collectives,
    engine_of,
    generation_seconds,
    optimizer_seconds,
    pass_seconds,
    recomputing,
    update_flops,
)
from recipes.simulation.cluster_shape import Cluster, Traffic
from recipes.simulation.measured_paces import (
    EXPERT_LAYER,
    HAND_OVER_LINK,
    WAKING,
    WEIGHT,
)
from recipes.simulation.step_traffic import HALF, WHOLE, LayoutTraffic
from recipes.simulation.workload import Choice, Workload


@dataclass(frozen=True)
class SimulatedPhase:
    """One phase of a step."""

    name: str
    seconds: float
    memory: int  # bytes on the fullest device, the allocator's slack and the driver included
    traffic: Traffic  # that a device receives
    flops: float = 0.0  # on all devices together, that the phase requires


@dataclass(frozen=True)
class SimulatedStep:
    """A step of a choice on a cluster."""

    workload: Workload
    cluster: Cluster
    choice: Choice
    phases: tuple[SimulatedPhase, ...]
    problems: tuple[str, ...] = ()  # why it does not fit

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def memory(self) -> int:
        """Bytes of the fullest phase on a device."""
        return max(phase.memory for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Tokens of prompts and responses of all rows."""
        return int(self.workload.batch.lengths.sum())


def simulate(workload: Workload, cluster: Cluster, choice: Choice) -> SimulatedStep:
    """The step of a layout of all devices of the cluster."""
    step = _Step(workload, cluster, choice)
    phases = (step.hand_over(), step.generation(), *step.scoring(), step.update())
    return SimulatedStep(workload, cluster, choice, phases, tuple(step.problems(phases)))


class _Step:
    def __init__(self, workload: Workload, cluster: Cluster, choice: Choice) -> None:
        self.workload, self.cluster, self.choice = workload, cluster, choice
        self.layout, self.compute, self.device = choice.layout, choice.compute, cluster.device
        self.parts = workload.parts
        self.traffic = LayoutTraffic(cluster, workload.config, self.parts, choice.layout)
        place = self.compute, self.layout, self.device
        self.actor = held("actor", self.parts.size, *place, trains=True)
        frozen = held("reference", self.parts.size, *place, trains=False)
        self.reference = frozen if workload.reference else RoleMemory("reference")

    # Generation

    def hand_over(self) -> SimulatedPhase:
        """Waking the engines and giving them the weights, tensor by tensor."""
        traffic = self.traffic.handed_over()
        seconds = WAKING + self.parts.tensors * WEIGHT
        seconds += traffic.inside / HAND_OVER_LINK + self.cluster.between_seconds(traffic)
        memory = (
            self.actor.device + self.reference.device + self.engine_weights + 2 * GIB
        )  # a bucket, gathered and cast
        return SimulatedPhase("hand_over", seconds, self._reserved(memory), traffic)

    @property
    def engine_weights(self) -> int:
        return HALF * self.parts.size.total // self.choice.engine_parallel

    def generation(self) -> SimulatedPhase:
        """The engine reads the prompts and decodes; its host takes a part of each step."""
        parallel = self.choice.engine_parallel
        share = self.workload.share(self.workload.prompts, self.cluster.devices // parallel)
        engine = engine_of(self.workload.config, self.parts.size, "vllm", {"tensor_parallel": parallel}, self.device)
        resting = self.actor.device + self.reference.device
        cache = self.device.memory - self.device.context - round(SLACK * resting) - self.engine_weights - ENGINE_RESERVE
        row = engine.kv_bytes * float(share.lengths.double().mean())
        rows = min(self.choice.engine_rows, len(share.responses), int(max(cache, 0) / row))
        known, key = self.workload.known, ("generation", self.cluster, parallel, rows)
        if key not in known:
            known[key] = self._generating(share, replace(engine, rows=rows)) if rows else (math.inf, Traffic())
        seconds, sums = known[key]
        memory = self._reserved(resting) + self.engine_weights + ENGINE_RESERVE + round(row * max(rows, 1))
        return SimulatedPhase("generation", seconds, memory, sums, self.workload.forward.total)

    def _generating(self, share: BatchSizes, engine: Engine) -> tuple[float, Traffic]:
        """Seconds, and the traffic of the states that the engine sums, of prompts and of responses."""
        return generation_seconds(share, engine, self.device), Traffic(engine.summed_bytes * share.packed_tokens)

    # Passes

    def scoring(self) -> Iterator[SimulatedPhase]:
        """Passes over the rows whose old log-probs the update does not compute, and by the reference over all rows."""
        shares = {"old_log_probs": self.workload.old_log_probs, "reference": float(self.workload.reference)}
        parts = self.workload.micro_batches(self.layout, self.compute, learns=False)
        passes = self.workload.forward
        computed = self._pass_seconds(passes, parts) + len(parts) * self._expert_seconds / 3
        gathers = 1 if self.compute.leaves_unsharded("scoring") else len(parts)
        weights = gathers * self.traffic.gathered_weights()
        states = self.traffic.activations(self._tokens, learns=False)
        seconds = computed + self.traffic.beyond_pairs(self._tokens, learns=False) + self._exposed(weights, computed)
        for name, share in shares.items():
            if share:
                yield SimulatedPhase(
                    name, share * seconds, self._scoring_memory(parts), share * (weights + states), share * passes.total
                )

    def update(self) -> SimulatedPhase:
        """All optimizer steps of a step."""
        workload, compute, layout, size = self.workload, self.compute, self.layout, self.parts.size
        parts, updates = workload.micro_batches(layout, compute, learns=True), workload.updates
        required = update_flops(workload.batch, size, compute)
        computed = self._pass_seconds(recomputing(required, compute), parts) * workload.imbalance(layout.dp)
        computed += updates * len(parts) * self._expert_seconds
        stepped = updates * optimizer_seconds(size, layout, self.device, len(parts))
        gathers, reductions = collectives(compute, len(parts))
        sums = (
            reductions if layout.pp > 1 else 1
        )  # in a pipeline each pass that reduces gradients sums them over replicas
        weights = updates * (gathers + reductions * WHOLE / HALF) * self.traffic.gathered_weights()
        weights += updates * sums * self.traffic.summed_over_replicas()
        states = self.traffic.activations(self._tokens, learns=True)
        seconds = (
            computed + stepped + self.traffic.beyond_pairs(self._tokens, learns=True) + self._exposed(weights, computed)
        )
        return SimulatedPhase("update", seconds, self._update_memory(parts), weights + states, required.total)

    def _pass_seconds(self, passes: Passes, parts: list[MicroBatchSize]) -> float:
        return pass_seconds(passes, self.compute, self.layout, self.device, self.workload.config, parts)

    @property
    def _expert_seconds(self) -> float:
        """What ep adds to a micro-batch, forward and backward."""
        return EXPERT_LAYER * self.parts.layers / self.layout.pp if self.layout.ep > 1 else 0.0

    @property
    def _tokens(self) -> float:
        """Packed tokens of a step on one dp rank, on average."""
        return self.workload.batch.packed_tokens / self.layout.dp

    def _exposed(self, weights: Traffic, computed: float) -> float:
        """Seconds that FSDP's traffic adds: within nodes as measured, between them what computation is too short to hide."""
        return self.cluster.inside_seconds(weights) + max(self.cluster.between_seconds(weights) - computed, 0.0)

    # Memory

    def _scoring_memory(self, parts: list[MicroBatchSize]) -> int:
        size, compute = self._as_computed, replace(self.compute, unsharded="nothing")
        place = compute, self.layout, self.device
        memory = scoring(self.actor, size, self.workload.config, *place, self._on_rank(parts))
        extra = self._kept_weights if self.compute.leaves_unsharded("scoring") else 0
        return self._reserved(memory.device + self.reference.device + ASLEEP + extra + self._exchanged(parts, 1))

    def _update_memory(self, parts: list[MicroBatchSize]) -> int:
        size, compute = self._as_computed, replace(self.compute, unsharded="nothing")
        place = compute, self.layout, self.device
        memory = updating(self.actor, size, self.workload.config, *place, self._on_rank(parts))
        extra = self._kept_weights if self.compute.leaves_unsharded("weights") else 0
        if self.compute.leaves_unsharded("gradients"):
            here = self.parts.dense_here(self.layout) + self.parts.experts_here(self.layout)
            extra += round(WHOLE * here) - memory.gradients
        layers = 1 if self.compute.activation_checkpointing == "full" else self.parts.layers // self.layout.pp
        return self._reserved(memory.device + self.reference.device + ASLEEP + extra + self._exchanged(parts, layers))

    def _on_rank(self, parts: list[MicroBatchSize]) -> list[MicroBatchSize]:
        """Micro-batches as one sp rank has them."""
        sp = self.layout.sp
        return [
            replace(each, tokens=-(-each.tokens // sp), logits=-(-each.logits // sp), keys=-(-each.keys // sp))
            for each in parts
        ]

    @property
    def _as_computed(self) -> ModelSize:
        return replace(self.parts.size, largest_layer=self.parts.largest_layer(self.layout))

    @property
    def _kept_weights(self) -> int:
        """Bytes of all weights of this rank's part of the model beside what is gathered anyway."""
        layers = self.parts.size.layers - self.parts.experts
        here = layers / self.layout.tp / self.layout.pp + self.parts.experts_here(self.layout)
        return max(round(HALF * (here - 2 * self.parts.largest_layer(self.layout) / self.layout.tp)), 0)

    def _exchanged(self, parts: list[MicroBatchSize], layers: int) -> int:
        """Bytes of the tokens that a rank computes for others with ep, in as many layers as keep them."""
        group, text = self.layout.ep * self.layout.tp, self.workload.config.get_text_config()
        if not self.parts.experts or group == 1:
            return 0
        tokens = max(each.tokens for each in parts) / self.layout.sp / self.layout.tp
        width = int(text.hidden_size) + 3 * int(text.moe_intermediate_size)
        chosen = family_of(self.workload.config).experts_per_token(text)
        return round((group - 1) * tokens * chosen * width * HALF * layers)

    def _reserved(self, memory: int) -> int:
        return round(SLACK * memory) + self.device.context

    def problems(self, phases: tuple[SimulatedPhase, ...]) -> Iterator[str]:
        """Why the choice cannot run."""
        fullest = max(phases, key=lambda phase: phase.memory)
        if fullest.memory > self.device.memory:
            free = f"{fullest.memory / GIB:.0f} GiB of the {self.device.memory / GIB:.0f} GiB of {self.device.name}"
            yield f"{fullest.name} needs {free}"
        if self.layout.world_size != self.cluster.devices:
            yield f"{self.layout} has {self.layout.world_size} ranks on {self.cluster.devices} devices"
