"""Workers whose model is updated, the policy among them."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dataproto import DataProto
from dataproto._ops.transfer import move
from dataproto.columns import require
from dataproto.errors import InvalidColumn, InvalidConfig
from dataproto.packing import MAX_TOKENS
from dataproto.planning import cut_minibatches
from workers.model.packed_model import PackedVLM
from workers.ranks.dispatch_modes import dispatch
from workers.ranks.mesh import Ranks
from workers.roles.model_worker import ModelWorker, PolicyConfig, PolicyWorker
from workers.roles.step_by_step import StepByStep
from workers.training.accounting import Accounting, required_work, whole_work
from workers.training.aggregation import check_mode, denominator, token_weights
from workers.training.device_transfer import index_on, rows_to_device
from workers.training.forward_pass import LARGEST, LossFn, MicroBatch, check_rows
from workers.training.mini_batches import MINIBATCH, ROW, split_update
from workers.training.optimizer import AdamParams, Optimizer, OptimizerConfig
from workers.training.training_state import Saving, load_training_state

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActorConfig(PolicyConfig):
    """A policy and how it is updated."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True)
class SkippedStep:
    """An optimizer step that was not made because its gradient was not finite."""

    step: int  # of the schedule, from 0
    grad_norm: float
    rows: tuple[str, ...]  # uids of rows, on any rank, whose loss or scores were not finite

    def __str__(self) -> str:
        cause = (
            f"rows with these uids: {', '.join(self.rows)}" if self.rows else "no single row: all losses were finite"
        )
        return f"optimizer step {self.step} skipped, gradient norm {self.grad_norm}; {cause}"


@dataclass(frozen=True)
class Updated:
    """What an update gives.

    ``metrics`` are those of all ranks together, averaged over the optimizer steps. ``scores (B, R)`` float32 are a policy's
    log-probs, or a critic's values, of each row before the first step on its mini-batch, 0 where ``response_mask`` is 0.
    """

    metrics: dict[str, float]
    scores: Tensor
    rows: np.ndarray | None = None  # which rows of the caller's batch they are, where ranks have parts of it


def join_updates(results: Sequence[Updated]) -> Updated:
    """Scores in the order of the caller's rows; every rank has the same metrics."""
    scores = torch.cat([result.scores for result in results])
    order = np.concatenate([result.rows for result in results if result.rows is not None])
    return Updated(results[0].metrics, torch.empty_like(scores).index_copy_(0, torch.from_numpy(order), scores))


class TrainedWorker(ModelWorker):
    """Updates a model by a loss function that the recipe hands in."""

    role = ""  # as metrics name it

    def __init__(self, config: Any, device: torch.device | None = None, ranks: Ranks | None = None) -> None:
        super().__init__(config, device, ranks)
        self.optimizer = Optimizer(self.module.parameters(), config.optimizer, *self._other_stages())
        self.skipped: list[SkippedStep] = []
        self.saving = Saving()
        self.accounting = Accounting(self.device, self.ranks)

    def _other_stages(self) -> tuple[ProcessGroup | None, Sequence[nn.Parameter]]:
        """The pipeline's group, and weights that count on another stage."""
        if self.ranks.size("pp") == 1:
            return None, ()
        return self.ranks.group("pp"), import_module("workers.parallel.pipeline").staged(self.module).repeats

    @dispatch(split=split_update)
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

        The loss does not depend on how rows are split into micro-batches or over ranks: its denominators are those of the
        whole mini-batch. With several data-parallel ranks ``data`` is this rank's share, whose column `MINIBATCH` says which
        rows belong together (see `workers.training.mini_batches.share_out`); without that column all rows are one mini-batch.

        Args:
            loss_fn: see `LossFn`; its metrics are averaged with the loss's own weights; of those that end in ``_max``, which are
                not negative, the largest counts.
            aggregation: how per-token losses become one number, see `workers.training.aggregation`; the constant of
                ``seq-mean-token-sum-norm`` is the ``max_tokens`` in ``meta_info`` that the rows were generated with, else R.
            entropy: compute ``outputs.entropy`` for the loss function.

        Returns:
            The metrics of all ranks together, averaged over the optimizer steps.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`; also a mini-batch without any response token. Nothing
                has been learned then.
            InvalidConfig: impossible arguments.
            RankFailure: another rank's rows were refused.
        """
        return self.update_and_score(data, loss_fn, minibatch, epochs, aggregation, entropy).metrics

    @dispatch(split=split_update, join=join_updates)
    def update_and_score(
        self,
        data: DataProto,
        loss_fn: LossFn,
        minibatch: int | None = None,
        epochs: int = 1,
        aggregation: str = "token-mean",
        entropy: bool = False,
    ) -> Updated:
        """`update`, and what the model said of the rows before it learned from them, which costs no further pass."""
        with self.ranks.fail_together():
            check_update(epochs, aggregation, entropy, self.module)
            check_rows(data, self.module)
            parts = minibatches(data, minibatch, self.ranks)
        with self.ranks.fail_together():
            parts = with_response_tokens(parts, data["response_mask"], self.ranks)
        shape, first, steps = data["response_mask"].shape, [], []
        with self.accounting.recording():
            for epoch in range(epochs):
                for part in parts:
                    chosen = data if part is None else data[part]
                    scores = torch.zeros(len(chosen), shape[1], device=self.device) if epoch == 0 else None
                    steps.append(self._step(chosen, loss_fn, aggregation, entropy, scores))
                    if scores is not None:
                        first.append(scores)
            measured = self.accounting.metrics(self.role)
        found = torch.zeros(shape)
        for part, scores in zip(parts, first, strict=True):
            found[slice(None) if part is None else torch.from_numpy(part)] = scores.cpu()
        rows = np.asarray(data[ROW]) if ROW in data else None
        if not steps:
            return Updated({}, found, rows)
        averages = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        averages |= {name: max(step[name] for step in steps) for name in steps[0] if name.endswith(LARGEST)}
        return Updated(averages | measured, found, rows)

    def _step(
        self, data: DataProto, loss_fn: LossFn, aggregation: str, entropy: bool, scores: Tensor | None
    ) -> dict[str, float]:
        weights = self._token_weights(data, aggregation)  # (B, R); the loss is their weighted sum
        self.accounting.add(whole_work(self.ranks.all_gather(required_work(self.module, data), "pp")))
        self.module.train()
        totals, finite = self.accumulate(data, loss_fn, weights, entropy, scores=scores)
        return self._finish(data, weights, totals, finite)

    def accumulate(
        self,
        data: DataProto,
        loss_fn: LossFn,
        weights: Tensor,
        entropy: bool = False,
        backward: bool = True,
        scores: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Passes over the rows and adds to the gradients; an optimizer step is the caller's.

        Args:
            weights: ``(B, R)``; loss and metrics are weighted sums.
            backward: also backward.
            scores: ``(B, R)`` on the worker's device, to be filled with the outputs' scores.

        Returns:
            Loss and metrics of this rank's rows, and which rows' were finite ``(B,)``.
        """
        totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.device))
        finite = torch.ones(len(data), dtype=torch.bool, device=self.device)

        def conclude(part: MicroBatch, outputs: Any) -> Tensor:
            if part.inert:
                return cast(
                    Tensor, outputs.scores.sum()
                )  # of no token: the backward pass that other ranks need, and zero
            share = move(weights[part.index], self.device)
            loss, metrics = loss_fn(outputs, rows_to_device(part.rows, self.device))
            total = weighted_sum(loss, share)
            totals[f"{self.role}/loss"] += total.detach()
            for name, values in metrics.items():
                if name.endswith(LARGEST):
                    totals[name] = totals[name].maximum(largest(values.detach(), share))
                else:
                    totals[name] += weighted_sum(values.detach(), share)
            finite[index_on(part.index, self.device)] = all_finite(loss, outputs.scores, share)
            if scores is not None:
                scores[index_on(part.index, self.device)] = outputs.scores.detach()
            return total

        with self.compute(), self._nothing_left_by_errors():
            self.passes(data, conclude, entropy, backward, self.accounting.phase)
        if self.ranks.size("pp") == 1:
            return totals, finite
        kept = None if scores is None else scores.cpu()
        found = {name: value.cpu() for name, value in totals.items()}, finite.cpu(), kept
        found = self.ranks.broadcast_from_last(found, "pp")
        if scores is not None and found[2] is not None:
            scores.copy_(found[2])
        return found[:2]

    @contextmanager
    def _nothing_left_by_errors(self) -> Iterator[None]:
        """What raises in here leaves no gradients, which a later step would take for its own, and no gathered weights."""
        try:
            yield
        except BaseException:
            if torch.is_grad_enabled():
                self.optimizer.adamw.zero_grad(set_to_none=True)
            if self.sharded:
                import_module("workers.parallel.fsdp").reshard(self.module)
            raise

    def _token_weights(self, data: DataProto, aggregation: str) -> Tensor:
        """``(B, R)``, with the denominators of all ranks' rows, and the length that a response could have had."""
        mask = data["response_mask"]
        longest = int(data.meta_info.get(MAX_TOKENS, mask.shape[1]))
        everybody = self.ranks.all_gather((int(denominator(mask, aggregation)), longest), "dp")
        total, longest = sum(count for count, _ in everybody), max(longest for _, longest in everybody)
        return token_weights(mask, aggregation, total, max_length=max(longest, 1))

    def step_optimizer(self, params: AdamParams | None = None) -> dict[str, float]:
        """One step on the gradients that stand, on every rank; see `Optimizer.step`."""
        if self.ranks.size("tp") > 1:
            import_module("workers.parallel.tensor").sum_partial_gradients(self.module, self.ranks)
        if self.ranks.size("pp") > 1:
            import_module("workers.parallel.pipeline").sum_tied_gradients(self.module, self.ranks)
        with self.accounting.phase("optimizer"):
            return self.optimizer.step(params)

    def _finish(self, data: DataProto, weights: Tensor, totals: dict[str, Tensor], finite: Tensor) -> dict[str, float]:
        """The optimizer's step, and the metrics of all ranks together."""
        stepped = self.step_optimizer()
        sums = {name: float(value) for name, value in totals.items()}
        everybody = self.ranks.all_gather((float(weights.sum()), sums), "dp")
        weight = max(sum(weight for weight, _ in everybody), 1e-12)
        metrics: dict[str, float] = defaultdict(float)
        for _, part in everybody:
            for name, value in part.items():
                if name.endswith(LARGEST):
                    metrics[name] = max(metrics[name], value)
                else:
                    metrics[name] += value if name == f"{self.role}/loss" else value / weight
        if not math.isfinite(stepped["grad_norm"]):
            self._report_skip(data, stepped["grad_norm"], finite)
        return dict(metrics) | {f"{self.role}/{name}": value for name, value in stepped.items()}

    def _report_skip(self, data: DataProto, grad_norm: float, finite: Tensor) -> None:
        bad = (~finite).nonzero().squeeze(1).tolist()
        mine = [str(data["uid"][row]) if "uid" in data else f"row {row}" for row in bad]
        rows = dict.fromkeys(name for names in self.ranks.all_gather(mine, "dp") for name in names)
        self.skipped.append(SkippedStep(self.optimizer.steps - 1, grad_norm, tuple(rows)))
        if self.ranks.is_first:
            log.warning("%s", self.skipped[-1])

    @dispatch("all")
    def save(self, directory: Path, behind: bool = False) -> None:
        """Writes the weights as a Hugging Face checkpoint, adapters merged, and what training goes on from beside it.

        That leaves training as it is, whenever it is called; gradients that stand are not written. With ``behind`` it returns
        as soon as the state is copied; `finish_save` waits for the rest.

        Raises:
            CheckpointError: a rank could not write.
        """
        self.saving.save_all(directory, self.module, self.optimizer, self.ranks, behind)

    @dispatch("all")
    def finish_save(self) -> None:
        """Waits until what is saved behind the caller's back is on disk; raises what went wrong with it."""
        self.saving.finish()

    @dispatch("all")
    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, to the last bit, and clears the gradients that stand.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another model.
        """
        load_training_state(directory, self.module, self.optimizer, self.ranks)


class ActorWorker(StepByStep, TrainedWorker, PolicyWorker):
    """The policy that learns, by whole updates or step by step."""

    role = "actor"


def check_update(epochs: int, aggregation: str, entropy: bool, module: PackedVLM) -> None:
    """Refuses an update that this model cannot make, whatever the rows."""
    if epochs < 1:
        raise InvalidConfig(f"epochs={epochs}: must be at least 1")
    check_mode(aggregation)
    if entropy and not module.makes_logits:
        raise InvalidConfig("entropy=True: a critic has no entropy")


def minibatches(data: DataProto, prompts: int | None, ranks: Ranks) -> list[np.ndarray | None]:
    """Row indices of this rank's part of each mini-batch; ``None`` stands for all rows."""
    if MINIBATCH in data:
        numbers = np.asarray(data[MINIBATCH])
        return [np.flatnonzero(numbers == number) for number in range(int(numbers.max(initial=-1)) + 1)]
    if prompts is None:
        return [None]
    if ranks.size("dp") > 1:
        raise InvalidConfig(
            f"minibatch={prompts} counts prompts of all ranks: cut the batch by workers.training.mini_batches.share_out before "
            "it is spread"
        )
    require(data, "uid")
    return list(cut_minibatches(data["uid"], prompts))


def with_response_tokens(parts: Sequence[np.ndarray | None], mask: Tensor, ranks: Ranks) -> list[np.ndarray | None]:
    """The mini-batches, as many on every rank: of the last ones a rank may have no rows.

    Raises:
        InvalidColumn: a mini-batch has no response token on any rank; names it.
    """
    masks = (mask if part is None else mask[torch.from_numpy(part)] for part in parts)
    mine = [(len(each), int((each != 0).sum())) for each in masks]
    everybody = ranks.all_gather(mine, "dp")
    count = max(map(len, everybody))
    for number in range(count):
        held = [found[number] for found in everybody if number < len(found)]
        if not any(tokens for _, tokens in held):
            rows = sum(rows for rows, _ in held)
            raise InvalidColumn(f"none of the {rows} rows of mini-batch {number} has a response token to learn from")
    missing = count - len(parts)
    return [*parts, *[np.zeros(0, dtype=np.int64)] * missing]


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values times weights over tokens of weight above 0; what stands elsewhere, NaN even, does not matter."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()


def largest(values: Tensor, weights: Tensor) -> Tensor:
    """The largest value, at least 0, among tokens of weight above 0."""
    return torch.where(weights > 0, values, 0.0).amax().clamp_min(0.0)


def all_finite(loss: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
    """``(B,)`` bool: rows whose loss and scores are finite wherever the weight is above 0."""
    return ((loss.isfinite() & scores.isfinite()) | (weights <= 0)).all(1)
