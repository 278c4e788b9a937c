"""The policy that learns."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.batching import cut_minibatches
from dataproto.errors import InvalidColumn, InvalidConfig
from workers.aggregation import token_weights
from workers.checkpoint import load_weights_into
from workers.group import dispatch
from workers.optimizer import Optimizer, OptimizerConfig
from workers.policy import PolicyConfig, PolicyWorker
from workers.step import LossFn, check_rows, forward_rows, micro_batches


@dataclass(frozen=True)
class ActorConfig(PolicyConfig):
    """A policy and how it is updated."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


class ActorWorker(PolicyWorker):
    """Scores responses and updates the policy by a loss function that the recipe hands in."""

    def __init__(self, config: ActorConfig, device: torch.device | None = None) -> None:
        super().__init__(config, device)
        self.optimizer = Optimizer(self.module.parameters(), config.optimizer)

    @dispatch("dp")
    def update(
        self,
        data: DataProto,
        loss_fn: LossFn,
        minibatch: int | None = None,
        epochs: int = 1,
        aggregation: str = "token-mean",
        entropy: bool = False,
    ) -> dict[str, float]:
        """One optimizer step for each mini-batch of ``minibatch`` prompts (all rows if ``None``), ``epochs`` times over.

        The loss does not depend on how rows are split into micro-batches: its denominators are the mini-batch's.

        Args:
            loss_fn: see `LossFn`; its metrics are averaged with the loss's own weights.
            aggregation: how per-token losses become one number, see `workers.aggregation`.
            entropy: compute ``outputs.entropy`` for the loss function.

        Returns:
            The metrics, averaged over the optimizer steps.

        Raises:
            MissingColumn, InvalidColumn: see `check_rows`; also a mini-batch without any response token.
        """
        check_rows(data, self.module.banned_ids)
        if epochs < 1:
            raise InvalidConfig(f"epochs={epochs}: must be at least 1")
        parts = [None] if minibatch is None else cut_minibatches(data["uid"], minibatch)
        steps = [
            self._step(data if part is None else data[part], loss_fn, aggregation, entropy)
            for _ in range(epochs)
            for part in parts
        ]
        return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]} if steps else {}

    def _step(self, data: DataProto, loss_fn: LossFn, aggregation: str, entropy: bool) -> dict[str, float]:
        weights = token_weights(data["response_mask"], aggregation)  # (B, R); the loss is their weighted sum
        if not weights.any():
            raise InvalidColumn(f"none of the {len(data)} rows has a response token to learn from")
        totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.device))
        self.module.train()
        start = 0
        for rows in micro_batches(data, self.config.token_budget):
            share = weights[start : start + len(rows)].to(self.device)
            start += len(rows)
            with self.autocast():
                outputs = forward_rows(self.module, rows, self.device, entropy)
                loss, metrics = loss_fn(outputs, rows.to(self.device))
                total = weighted_sum(loss, share)
            total.backward()
            totals["actor/loss"] += total.detach()
            for name, values in metrics.items():
                totals[name] += weighted_sum(values.detach(), share) / weights.sum().clamp_min(1e-12)
        stepped = self.optimizer.step()
        return {name: float(value) for name, value in totals.items()} | {
            f"actor/{name}": value for name, value in stepped.items()
        }

    @dispatch("all")
    def save(self, directory: Path) -> None:
        """Writes the weights as a Hugging Face checkpoint and the optimizer's state beside it."""
        self.module.model.save_pretrained(directory / "huggingface")
        torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")

    @dispatch("all")
    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, to the last bit."""
        load_weights_into(self.module.model, directory / "huggingface")
        self.optimizer.load_state_dict(
            torch.load(directory / "optimizer.pt", map_location=self.device, weights_only=True)
        )


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values times weights over tokens of weight above 0; what stands elsewhere, NaN even, does not matter."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()
