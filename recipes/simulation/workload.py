"""What is simulated: the rows of a step, and how a cluster computes them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dataproto.vlm import family_of
from recipes.forecast import BatchSizes
from recipes.forecast.batch_sizes import MicroBatchSize
from recipes.forecast.model_size import ModelSize, meta_model, model_size
from recipes.forecast.step_time import Passes, scoring_flops
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout
from workers.training.mini_batches import spread


@dataclass(frozen=True)
class Choice:
    """How a cluster computes a step."""

    layout: Layout
    compute: ModelConfig
    engine_parallel: int = 1  # devices of an engine
    engine_rows: int = 512  # that an engine decodes at a time


@dataclass(frozen=True)
class ModelParts:
    """What of a model parallelism treats apart."""

    size: ModelSize
    experts: int  # parameters of experts that tokens choose from
    tensors: int  # that are handed over to an engine

    @classmethod
    def of(cls, config: Any) -> "ModelParts":
        """Counted on the meta device."""
        weights = list(meta_model(config).named_parameters())
        experts = sum(weight.numel() for name, weight in weights if ".experts." in name)
        return cls(model_size(config, ModelConfig()), experts, len(weights))

    def dense_here(self, layout: Layout) -> float:
        """Parameters beside the experts that the ranks of one FSDP group share: the fullest rank's, of all shards."""
        return self.size.on_rank(layout) * layout.shards - self.experts / layout.tp / layout.pp

    def experts_here(self, layout: Layout) -> float:
        """Parameters of the experts that the ranks with the same ones share."""
        return self.experts / (layout.ep * layout.tp * layout.pp)

    def largest_layer(self, layout: Layout) -> int:
        """Parameters of a decoder layer as one rank computes it, before tensor parallelism divides them."""
        experts = self.experts // max(self.layers, 1)
        return round(self.size.largest_layer - experts + experts / layout.ep)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return max(round(self.size.layers / self.size.largest_layer), 1)


@dataclass(frozen=True)
class Workload:
    """A step of GRPO: responses, old and reference log-probs, and updates."""

    batch: BatchSizes  # all rows of a step
    minibatch: int  # prompts of an optimizer step
    old_log_probs: float = 0.0  # share of the rows whose old log-probs are computed in a pass of their own
    reference: bool = True
    known: dict[tuple[Any, ...], Any] = field(
        default_factory=dict, repr=False, compare=False
    )  # what several choices need

    @property
    def config(self) -> Any:
        return self.batch.config

    @property
    def prompts(self) -> int:
        return len(self.batch.prompts.tokens)

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        return -(-self.prompts // self.minibatch)

    @cached_property
    def parts(self) -> ModelParts:
        return ModelParts.of(self.config)

    @cached_property
    def forward(self) -> Passes:
        """Operations of a pass without gradients over all rows."""
        return scoring_flops(self.batch)

    def share(self, prompts: int, ranks: int) -> BatchSizes:
        """The rows of one of ``ranks`` ranks out of those of ``prompts`` prompts; a prompt's samples may be on several."""
        if ranks <= prompts:
            return self.batch.part(-(-prompts // ranks))
        samples = max(-(-prompts * self.batch.samples // ranks), 1)
        return BatchSizes(self.config, self.batch.prompts.first(1), self.batch.responses[:samples], samples)

    def micro_batches(self, layout: Layout, compute: ModelConfig, learns: bool) -> list[MicroBatchSize]:
        """Those of an optimizer step, or of a pass without gradients, on one dp rank, with the tokens of all its sp ranks."""
        prompts = self.minibatch if learns else self.prompts
        key = ("micro-batches", prompts, layout.dp, compute.budget(learns) * layout.sp)
        if key not in self.known:
            self.known[key] = self.share(prompts, layout.dp).micro_batches(key[-1])
        found: list[MicroBatchSize] = self.known[key]
        return found

    def imbalance(self, ranks: int) -> float:
        """Work of the fullest of ``ranks`` dp ranks in an optimizer step beside the mean, as `spread` shares rows out."""
        key = ("imbalance", ranks)
        if key not in self.known:
            rows = self.batch.part(self.minibatch)
            own, lead = row_flops(rows)
            groups = np.arange(len(own)) // rows.samples
            shares = spread(own, lead, groups.tolist(), ranks)
            firsts = [share[np.unique(groups[share], return_index=True)[1]] for share in shares]
            work = [own[share].sum() + lead[first].sum() for share, first in zip(shares, firsts, strict=True)]
            self.known[key] = max(work) / (sum(work) / ranks)
        return float(self.known[key])


def row_flops(rows: BatchSizes) -> tuple[np.ndarray, np.ndarray]:
    """Operations ``(B,)`` of each row behind its prompt, and of its prompt."""
    family, responses = family_of(rows.config), torch.tensor(rows.responses)
    whole = family.row_flops(rows.config, rows.lengths, None, responses)
    prompts = family.row_flops(rows.config, rows.prompt_tokens, None, torch.zeros_like(responses))
    tower = rows.vision_flops.repeat_interleave(rows.samples)
    return (whole - prompts).double().numpy(), (prompts + tower).double().numpy()
