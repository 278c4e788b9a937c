"""What a forecast depends on: a step of a run, devices by what their data sheets say, and how nodes of them are connected."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from recipes.configs.shared.device_preset import DEVICE_MEMORY, GIB, check_device
from recipes.plan.model_size import FREEZING, ModelSize, model_size
from recipes.plan.rows import VARIATION, BatchSizes, MicroBatchSize
from workers.model.model_config import ModelConfig, OptimizerKind
from workers.ranks.layout import Layout

NETWORK = 0.8  # of a network card's data sheet, that NCCL's large collectives reach; assumed, not measured here


@dataclass(frozen=True)
class Device:
    """A GPU. Operations per second are its peak, dense, in bfloat16."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes per second, of its memory
    peak: float  # operations per second
    link: float  # bytes per second between devices of a node, of those that computation does not hide
    host: float = 1.0  # seconds of its host for Python, as a multiple of those of the reference host
    context: int = GIB  # bytes that the driver and its libraries take


DEVICES = {
    "h200": Device("h200", DEVICE_MEMORY["h200"], 4.8e12, 989e12, 250e9),
    "h100": Device("h100", DEVICE_MEMORY["h100"], 3.35e12, 989e12, 250e9),
    "a100-80g": Device("a100-80g", DEVICE_MEMORY["a100-80g"], 2.04e12, 312e12, 170e9),
}


def device_named(name: str | None) -> Device:
    """The device of the table; without a name the machine's GPU, and without one an H200.

    A GPU that the table does not have counts as an H100 with its own memory.

    Raises:
        InvalidConfig: the table does not have the name.
    """
    if name is None and torch.cuda.is_available():
        title = torch.cuda.get_device_name().lower()
        known = next((each for each in DEVICES if each.split("-")[0] in title), "h100")
        return replace(DEVICES[known], name=title, memory=torch.cuda.get_device_properties(0).total_memory)
    check_device(name)
    return DEVICES[name or "h200"]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device receives: from devices of its node, and through its network card."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.inside + other.inside, self.between + other.between)

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(self.inside * times, self.between * times)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Nodes:
    """How devices are connected. Ranks are numbered by node: tp varies fastest, then sp, dp and pp."""

    size: int = 8  # devices of a node
    network: float = 50e9  # bytes per second of each device's network card, by its data sheet: 400 Gbit/s

    def members(self, ranks: int, stride: int) -> int:
        """Ranks of a group that share a node: a group has ``ranks`` ranks, ``stride`` apart from each other.

        >>> Nodes().members(16, stride=1), Nodes().members(16, stride=4), Nodes().members(2, stride=8)
        (8, 2, 1)
        """
        return min(ranks, max(self.size // stride, 1))

    def gather(self, size: float, ranks: int, stride: int = 1) -> Traffic:
        """What a device receives when ``ranks`` ranks gather ``size`` bytes of which each has an equal part.

        Scattering sums of that size is the same backwards. Between nodes each part passes once into each node, and the ranks of a
        node share that work, each with its own card.

        >>> Nodes().gather(800, ranks=8), Nodes().gather(1600, ranks=16), Nodes().gather(200, ranks=2, stride=8)
        (Traffic(inside=700.0, between=0.0), Traffic(inside=1500.0, between=100.0), Traffic(inside=0.0, between=100.0))
        """
        if ranks == 1:
            return Traffic()
        here = self.members(ranks, stride)
        nodes = -(-ranks // here)
        return Traffic(size * (ranks - 1) / ranks if here > 1 else 0.0, size * (nodes - 1) / nodes / here)

    def exchange(self, size: float, ranks: int, stride: int = 1) -> Traffic:
        """What a device receives when each of ``ranks`` ranks spreads ``size`` bytes evenly over all of them."""
        here = self.members(ranks, stride)
        return Traffic(size * (here - 1) / ranks, size * (ranks - here) / ranks)

    def send(self, size: float, ranks: int, stride: int) -> Traffic:
        """What a device receives on average when each of ``ranks`` ranks but the last sends ``size`` bytes to the next one."""
        crossing = -(-ranks // self.members(ranks, stride)) - 1
        return Traffic(size * (ranks - 1 - crossing) / ranks, size * crossing / ranks)

    def between_seconds(self, traffic: Traffic) -> float:
        """Seconds of the traffic between nodes."""
        return traffic.between / (NETWORK * self.network)


Role = Literal["actor", "reference", "critic"]


@dataclass(frozen=True)
class Setting:
    """A step of a run: its rows, its models and how devices compute them."""

    config: Any  # the checkpoint's
    batch: BatchSizes  # all rows of a step
    device: Device
    compute: ModelConfig = field(default_factory=ModelConfig)
    layout: Layout = field(default_factory=Layout)
    engine: str | None = "hf"  # None: nothing is generated in a step
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    longest: int = 4096  # tokens of a prompt and its response together
    minibatch: int | None = None  # prompts of an optimizer step
    epochs: int = 1
    old_log_probs: float = 0.0  # share of the rows whose old log-probs are computed in a pass of their own
    reference: float = 0.0  # share of the rows of a step that it scores, on average: it scores an answer of dpo once
    teacher: bool = False  # the reference is another model than the policy
    critic_epochs: int = 0  # 0: no critic
    optimizer: OptimizerKind = "adamw"
    critic_optimizer: OptimizerKind = "adamw"
    variation: float = VARIATION  # memory is that of a step with a share of so many tokens more or fewer
    nodes: Nodes = field(default_factory=Nodes)
    steps: int = 1

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return len(self.batch.prompts.tokens)

    @property
    def updated_prompts(self) -> int:
        """Prompts of an optimizer step."""
        return min(self.minibatch or self.prompts, self.prompts)

    @property
    def updates(self) -> int:
        """Optimizer steps of an epoch of a step."""
        return -(-self.prompts // self.updated_prompts)

    @property
    def engine_parallel(self) -> int:
        """Devices of an engine."""
        return int(self.engine_options.get("tensor_parallel", 1))

    def micro_batches(self, learns: bool, fullest: bool = False) -> list[MicroBatchSize]:
        """Those of an optimizer step, or of a pass without gradients, on one dp rank, with the tokens of all its sp ranks.

        ``fullest``: those that take the most memory, see `BatchSizes.fullest_micro_batches`.
        """
        rows = self.batch.share(self.updated_prompts if learns else self.prompts, self.layout.dp)
        budget = self.compute.budget(learns) * self.layout.sp
        return rows.fullest_micro_batches(budget, self.variation) if fullest else rows.micro_batches(budget)

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the actor's model with its adapters off."""
        return self.compute.lora_rank > 0 and not self.teacher

    @property
    def half(self) -> bool:
        """Whether passes compute in bfloat16."""
        return self.compute.dtype != "float32"

    @property
    def size(self) -> ModelSize:
        """The policy's."""
        return self.size_of("actor")

    def size_of(self, role: Role) -> ModelSize:
        """Of the model of a role."""
        compute, trains = self.compute, role != "reference"
        if not trains:
            compute = replace(compute, lora_rank=0, lora_vision=False, load_in_4bit=False)
        key = ("size", role, *(getattr(compute, name) for name in FREEZING))
        return self.batch.once(key, lambda: model_size(self.config, compute, trains, makes_logits=role != "critic"))
