"""Training step by step: passes and optimizer steps, each usable alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataproto import DataProto
from workers.dispatch import split_rows
from workers.group import dispatch
from workers.optimizer import AdamParams
from workers.step import LARGEST, LossFn, check_rows

if TYPE_CHECKING:
    from workers.actor import TrainedWorker
else:
    TrainedWorker = object

LOSS_SUM = "loss:sum"


@dataclass(frozen=True)
class PassOutput:
    """What a pass over rows gives.

    ``metrics`` are sums over tokens of all rows, ``loss:sum`` among them; ``log_probs (B, R)`` float32, 0 where
    ``response_mask`` is 0, are there if asked for.
    """

    metrics: Mapping[str, float]
    log_probs: Tensor | None = None


def join_passes(results: Sequence[PassOutput]) -> PassOutput:
    """The ranks' rows one after the other; every rank has the same metrics."""
    parts = [result.log_probs for result in results if result.log_probs is not None and len(result.log_probs)]
    return PassOutput(results[0].metrics, torch.cat(parts) if parts else results[0].log_probs)


class StepByStep(TrainedWorker):
    """What `TrainedWorker.update` is made of, as calls of their own.

    The loss is the sum over tokens of what the loss function gives, where ``loss_mask`` (without that column:
    ``response_mask``) is not 0. Gradients add up over calls until `optim_step`; a `forward_backward` that raises in its loss
    function clears them.
    """

    @dispatch(split=split_rows, join=join_passes)
    def forward(self, data: DataProto, loss_fn: LossFn, per_token: bool = False) -> PassOutput:
        """The loss, without gradients.

        Args:
            per_token: also return the log-probs of all tokens where ``response_mask`` is not 0.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`.
        """
        return self._pass(data, loss_fn, per_token, backward=False)

    @dispatch(split=split_rows, join=join_passes)
    def forward_backward(self, data: DataProto, loss_fn: LossFn, per_token: bool = False) -> PassOutput:
        """The loss, and its gradients added to those that stand. Arguments and errors as `forward`'s."""
        return self._pass(data, loss_fn, per_token, backward=True)

    @dispatch("all")
    def optim_step(self, params: AdamParams | None = None) -> dict[str, float]:
        """One step on the gradients that stand, which are cleared; ``grad_norm``, ``lr`` and ``skipped_steps``.

        Args:
            params: of this step; without them the configured ones and their schedule.
        """
        return self.step_optimizer(params)

    @dispatch("all")
    def save_state(self, directory: Path) -> None:
        """Writes weights and optimizer, as `save`."""
        self.save(directory)

    @dispatch("all")
    def load_state(self, directory: Path) -> None:
        """Reads what `save_state` wrote, to the last bit; gradients that stand are cleared."""
        self.load(directory)
        self.optimizer.adamw.zero_grad(set_to_none=True)

    def _pass(self, data: DataProto, loss_fn: LossFn, per_token: bool, backward: bool) -> PassOutput:
        with self.ranks.all_or_none():
            check_rows(data, self.module)
        weights = (data["loss_mask"] if "loss_mask" in data else data["response_mask"]).float()
        scores = torch.zeros(weights.shape) if per_token else None
        self.module.train(backward)
        with torch.set_grad_enabled(backward):
            totals, _ = self.accumulate(data, loss_fn, weights, backward=backward, scores=scores)
        if not backward and self.sharded:
            import_module("workers.parallel.fsdp").reshard(self.module)
        return PassOutput(self._sums(totals), scores)

    def _sums(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Sums over the rows of all ranks; of what counts by its largest, the largest."""
        own = {name: float(value) for name, value in totals.items()}
        loss = own.pop(f"{self.role}/loss", 0.0)
        sums = {LOSS_SUM: 0.0}
        for part in self.ranks.gather({LOSS_SUM: loss, **own}, "dp"):
            for name, value in part.items():
                if name.endswith(LARGEST):
                    sums[name] = max(sums.get(name, value), value)
                else:
                    sums[name] = sums.get(name, 0.0) + value
        return sums
