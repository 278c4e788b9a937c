"""What a forecast depends on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from recipes.plan.devices import Device, Nodes
from recipes.plan.model_size import FREEZING, ModelSize, model_size
from recipes.plan.rows import VARIATION, BatchSizes, MicroBatchSize
from workers.model.model_config import ModelConfig, OptimizerKind
from workers.ranks.layout import Layout

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
    engine_apart: bool = False  # on devices of its own
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
