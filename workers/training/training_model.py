"""One model in its layout: built, run over rows, updated, saved and loaded. The roles hold one each."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.errors import InvalidConfig, ending, undoing
from dataproto.packing import MAX_TOKENS
from workers.model.model_config import UNSHARDED, Unsharded
from workers.model.named_weights import all_adapter_weights, all_named_weights, float32_weights
from workers.model.precision import Precision
from workers.parallel.fsdp import FullySharded, GatheredBytes, gathered_bytes
from workers.parallel.pipeline import PipelineParallel
from workers.parallel.transform import repeated_layers
from workers.ranks.mesh import AXES, Ranks
from workers.training.accounting import Accounting, required_work, whole_work
from workers.training.checkpoint import Saving, load_model_weights, load_training_state
from workers.training.forward_pass import Inputs, LossFn, encoded, forward_inputs, index_on, inputs_of, rows_to_device
from workers.training.loading import Wrap, load_packed
from workers.training.loss_sums import LossSums, Updated, averages, denominator, pair_of, token_weights
from workers.training.memory import PHASES, SCORES, DeviceMemory, expandable_segments
from workers.training.micro_batches import Conclude, MicroBatch, MicroBatchFeed, micro_batches
from workers.training.mini_batches import ROW, cut_minibatches_of_rank, pad_minibatches
from workers.training.optimizer import AdamParams, Optimizer, OptimizerConfig
from workers.training.residence import Residence
from workers.training.row_checks import check_finite, check_rows, check_update

ROOM = 0.06
"""The share of a device that stays free: micro-batches of later steps may be fuller, and torch holds some memory in pieces."""

DECIDING_CALL = {True: 2, False: 4}
"""Of updates, and of passes without gradients. The optimizer's state does not exist before the end of the first update, and a
step scores up to three times before that: as the actor, as the reference, and its first mini-batch as the reference.
"""


def device_share(device: torch.device) -> float:
    """The share of a CUDA device that was in use at the peak of what this process allocated since the peak was reset.

    What torch counts without holding it (the memory of an engine that sleeps) and what others hold of the device is the same now
    and at the peak.
    """
    now = DeviceMemory.of(device)
    return (torch.cuda.max_memory_allocated(device) + now.used - now.reserved) / now.total


def most_that_fits(share: float, total: int, extra: GatheredBytes, learns: bool) -> Unsharded:
    """The most that can stay unsharded in calls that took ``share`` of a device of ``total`` bytes with nothing unsharded.

    Args:
        learns: whether the calls were updates; else passes without gradients, where only weights can be kept.

    >>> extra = GatheredBytes(weights=16, gradients=30)
    >>> [most_that_fits(share, 100, extra, learns=True) for share in (0.45, 0.5, 0.8)]
    ['gradients', 'weights', 'nothing']
    >>> most_that_fits(0.5, 100, extra, learns=False)
    'scoring'
    """
    room = (1 - ROOM - share) * total
    if room < extra.weights:
        return "nothing"
    if not learns:
        return "scoring"
    return "gradients" if room >= extra.weights + extra.gradients else "weights"


class Unsharding:
    """Chooses once for updates and once for passes without gradients, and takes back what slows later steps down.

    >>> choice = Unsharding(torch.device("cpu"), GatheredBytes(16, 30))
    >>> choice.is_due(learns=True), choice.is_due(learns=True), choice.is_due(learns=True)
    (False, True, False)
    >>> [choice.is_due(learns=False) for _ in range(5)]
    [False, False, False, True, False]
    """

    def __init__(self, device: torch.device, extra: GatheredBytes) -> None:
        self.device, self.extra = device, extra
        self.kept: Unsharded = "nothing"
        self._calls: Counter[bool] = Counter()

    def is_due(self, learns: bool) -> bool:
        """Counts a call that ends; whether it is the one after which the choice is made."""
        self._calls[learns] += 1
        return self._calls[learns] == DECIDING_CALL[learns]

    def fitting(self, share: float, learns: bool) -> Unsharded:
        """What fits on this rank after a call that took ``share`` of its device; ranks with uneven shards can differ."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        return most_that_fits(share, total, self.extra, learns)

    def choose(self, fitting: Sequence[Unsharded]) -> Unsharded:
        """The choice after a call, the same on all ranks, since they reduce together: the least of what is `fitting` on each."""
        self.kept = max(self.kept, min(fitting, key=UNSHARDED.index), key=UNSHARDED.index)
        return self.kept

    def after_update(self, metrics: Mapping[str, float]) -> Unsharded:
        """One thing less, if a device ran out of memory in a step with gradients or weights unsharded."""
        if metrics.get("perf/allocator_retries") and self.kept in ("weights", "gradients"):
            self.kept = UNSHARDED[UNSHARDED.index(self.kept) - 1]
        return self.kept


log = logging.getLogger(__name__)


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


def names_of_rows(data: DataProto, chosen: Tensor, first: int = 0) -> list[str]:
    """The uids of the rows that ``chosen (B,)`` bool marks; without uids their numbers, counted from ``first``."""
    rows = chosen.nonzero().squeeze(1).tolist()
    return [str(data["uid"][row]) if "uid" in data else f"row {first + row}" for row in rows]


class TrainingModel:
    """A packed model, or this rank's part of it, with its transforms, precision, optimizer and checkpoints.

    Ranks along dp have rows of their own; ranks along pp, sp and tp get the same rows. Every rank calls every method.
    """

    def __init__(
        self,
        config: Any,
        wrap: Wrap,
        device: torch.device | None = None,
        ranks: Ranks | None = None,
        optimizer: OptimizerConfig | None = None,
        role: str = "model",
    ) -> None:
        """Loads the model and spreads it over ``ranks``.

        Args:
            config: a `ModelConfig` with a ``model_path``.
            wrap: the packed model around a loaded one.
            device: the first CUDA device, or the CPU, if ``None``.
            ranks: from `workers.ranks.mesh.init_ranks`; ``None``: the process is alone.
            optimizer: ``None``: the model is frozen.
            role: the model's name in metrics.
        """
        self.config, self.role = config, role
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.ranks = ranks or Ranks()
        self.module, self.transforms = load_packed(config, self.device, self.ranks, optimizer is not None, wrap)
        self.pipeline = next((each for each in self.transforms if isinstance(each, PipelineParallel)), None)
        exact = float32_weights(self.module.model, self.module.family)
        self.precision = Precision(self.module.model, self.ranks, config, self.device.type, exact)
        self.accounting = Accounting(self.device, self.ranks)
        self.saving = Saving()
        self.skipped: list[SkippedStep] = []
        self.has_passes = False  # whether single passes have added gradients since the last step
        self._optimizer = None if optimizer is None else self._new_optimizer(optimizer)
        half = self.precision.half_weights
        drop = (lambda: None) if half is None else half.drop
        self.residence = Residence(self.module, self._moments, self.device, config.offload_idle, drop)
        is_open = config.unsharded == "auto" and self.device.type == "cuda"
        sharded = any(isinstance(each, FullySharded) for each in self.transforms)
        self._unsharding = Unsharding(self.device, gathered_bytes(self.module)) if is_open and sharded else None
        if self._unsharding is not None:
            self._leave_unsharded("nothing")

    def _choose_unsharded(self, learns: bool) -> None:
        """At the end of a call: chooses what stays unsharded in the next ones, where the options leave that open."""
        if self._unsharding is not None and self._unsharding.is_due(learns):
            mine = self._unsharding.fitting(device_share(self.device), learns)
            self._leave_unsharded(self._unsharding.choose(self.ranks.all_gather(mine, *AXES)))

    def _leave_unsharded(self, kept: Unsharded) -> None:
        if self.config.unsharded not in (kept, "auto"):
            log.info("%s: FSDP leaves unsharded between micro-batches: %s", self.role, kept)
        self.config = replace(self.config, unsharded=kept)
        for transform in self.transforms:
            transform.take_options(self.config)

    def _moments(self) -> Iterator[Tensor]:
        """The optimizer's state, except numbers of steps."""
        for state in () if self._optimizer is None else self._optimizer.moments.values():
            yield from (value for value in state.values() if value.ndim)

    def _new_optimizer(self, config: OptimizerConfig) -> Optimizer:
        groups = (transform.norm_group() for transform in self.transforms)
        group = next((group for group in groups if group is not None), None)
        repeated = [weight for each in self.transforms for weight in each.repeated_parameters(self.module)]
        matrices = [
            weight for layer in repeated_layers(self.module) for weight in layer.parameters() if weight.ndim == 2
        ]
        return Optimizer(self.module.parameters(), config, group, repeated, matrices)

    @property
    def optimizer(self) -> Optimizer:
        """Raises `InvalidConfig` if the model is frozen."""
        if self._optimizer is None:
            raise InvalidConfig(f"the {self.role} is frozen: it has no optimizer")
        return self._optimizer

    # Passes

    def score(self, data: DataProto, into: str, entropy: bool = False) -> DataProto:
        """Scores of response tokens as column ``into`` ``(B, R)`` float32, and ``entropys`` likewise if asked for.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`.
            NonFiniteLogits: a score is NaN or infinite; names the row and the token.
            RankFailure: another rank raised one of these.
        """
        with self.ranks.fail_together():
            check_rows(data, self.module)
        names = (into, "entropys")[: 1 + entropy]
        found = torch.zeros(len(names), *data["response_mask"].shape, device=self.device)
        self.module.eval()

        def keep(part: MicroBatch, outputs: Any) -> None:
            if not part.inert:
                rows = index_on(part.index, self.device)
                found[0, rows] = outputs.scores
                if entropy:
                    found[1, rows] = outputs.entropy

        with PHASES.phase(SCORES.get(into, into)), self._passes(backward=False):
            parts = self.micro_batches(data, backward=False)
            if self.pipeline is not None:
                self._run_pipeline(self.pipeline, parts, keep, entropy)
                parts = []
            for part, outputs in self._forward(parts, entropy):
                keep(part, outputs)
            self._choose_unsharded(learns=False)
        on_host = found.cpu()  # once a call: the host prepares micro-batches while the device computes
        columns = self.ranks.broadcast_from_last(dict(zip(names, on_host, strict=True)), "pp")
        with self.ranks.fail_together():
            check_finite(columns[into], data, into)
        return DataProto.from_dict(columns)

    def run(
        self, data: DataProto, loss_fn: LossFn, sums: LossSums, entropy: bool = False, backward: bool = True
    ) -> LossSums:
        """Forward passes over the rows and, with ``backward``, backward passes that add to the gradients.

        An error clears the gradients, which a later step would take for its own.

        Args:
            sums: takes the loss, metrics and scores of this rank's rows; its weights ``(B, R)`` are those of the tokens.

        Raises:
            Exception: that of the loss function, or of its backward pass.
            RankFailure: it failed on the last stage of a pipeline, and this rank has another one.
        """
        self.module.train(backward)
        failed: list[Exception] = []

        def conclude(part: MicroBatch, outputs: Any) -> None:
            """In a pipeline: after an error the last stage still passes over what the other stages send, which wait for it."""
            if not part.inert and not failed:
                try:
                    loss, metrics = pair_of(loss_fn(outputs, rows_to_device(part.rows, self.device)))
                    total = sums.add(part.index, outputs.scores, loss, metrics)
                    if backward:
                        total.backward()
                except Exception as error:
                    failed.append(error)

        with self._passes(backward):
            parts = self.micro_batches(data, backward)
            if self.pipeline is not None:
                self._run_pipeline(self.pipeline, parts, conclude, entropy, backward)
                with self.ranks.fail_together():
                    if failed:
                        raise failed.pop()
                parts = []
            # As `conclude`, with one frame less between a caller and the loss function.
            for number, (part, outputs) in enumerate(self._forward(parts, entropy)):
                with self.accounting.phase("forward"):
                    if part.inert:
                        total = outputs.scores.sum()  # of no token: zero, for the backward pass that other ranks need
                    else:
                        loss, metrics = pair_of(loss_fn(outputs, rows_to_device(part.rows, self.device)))
                        if (ahead := getattr(outputs, "head_log_probs", None)) is not None:
                            loss, metrics = loss - self.config.mtp_coef * ahead, metrics | {"actor/mtp_loss": -ahead}
                        total = sums.add(part.index, outputs.scores, loss, metrics)
                if backward:
                    for transform in self.transforms:
                        transform.before_backward(self.module, last=number == len(parts) - 1)
                    with self.accounting.phase("backward"):
                        total.backward()
        sums.take_from_last_stage(self.ranks)
        return sums

    def micro_batches(self, data: DataProto, backward: bool = True) -> list[MicroBatch]:
        """Parts of which each rank has at most `ModelConfig.budget` tokens: ranks along sp share the tokens of one part.

        Where only the tower is trained, each part runs it: without media nothing would have a gradient. Where the last part
        reduces the gradients of all, or sums them over replicas, it runs the tower if another does: FSDP does so for what it
        has used.
        """
        config = self.config
        parts = micro_batches(data, self.module, config.budget(backward) * self.ranks.size("sp"), self.ranks)
        if config.freeze_language:
            return [replace(part, tower=True) for part in parts]
        waits = config.leaves_unsharded("gradients") or self.ranks.layout.replicas > 1
        if backward and waits and self.pipeline is None and any(part.tower for part in parts):
            parts[-1] = replace(parts[-1], tower=True)
        return parts

    def _forward(self, parts: Sequence[MicroBatch], entropy: bool) -> Iterator[tuple[MicroBatch, Any]]:
        """Each micro-batch with its outputs. Before they are given the next one is prepared, and encoded if marked early."""
        ready: Inputs | None = None
        for part, following in zip_longest(parts, parts[1:]):
            inputs = ready or self._inputs(part)
            with self.accounting.phase("forward"):
                outputs = forward_inputs(self.module, part.rows, inputs, entropy)
            del inputs  # which would keep pixels during the backward pass
            ready = None if following is None else self._inputs(following, following.early)
            yield part, outputs

    def _inputs(self, part: MicroBatch, early: bool = False) -> Inputs:
        with self.accounting.phase("prepare"):
            inputs = inputs_of(self.module, part.rows, self.device, part.tower, part.length)
        if not early:
            return inputs
        with self.accounting.phase("forward"):
            return encoded(self.module, inputs)

    def _run_pipeline(
        self,
        pipeline: PipelineParallel,
        parts: Sequence[MicroBatch],
        conclude: Conclude,
        entropy: bool,
        backward: bool = False,
    ) -> None:
        for transform in self.transforms if backward else ():  # the last pass of a stage is the schedule's to choose
            transform.before_backward(self.module, last=False)
        with self.accounting.phase("pipeline"):
            feed = MicroBatchFeed(self.module, parts, self.device, conclude)
            # The dtype of states between layers: under autocast their sums stay in float32.
            dtype = torch.float32 if self.precision.autocasts else self.precision.dtype
            pipeline.run(feed, self.device, dtype, entropy, backward)
        for transform in self.transforms if backward and parts else ():
            transform.reduce_gradients(self.module)

    @contextmanager
    def _passes(self, backward: bool) -> Iterator[None]:
        """What passes run in. At the end it frees weights that no backward pass has freed; an error drops the gradients."""
        at_the_end = undoing(self.drop_gradients, self._reshard) if backward else ending(self._reshard)
        with (
            torch.set_grad_enabled(backward),
            expandable_segments(self.device),
            self.residence.using(),
            self.precision.compute(),
            at_the_end,
            ExitStack() as stack,
        ):
            for transform in self.transforms:
                stack.enter_context(transform.keep_gathered(self.module, backward))
            yield

    def _reshard(self) -> None:
        for transform in self.transforms:
            transform.reshard(self.module)

    def note_pass(self) -> None:
        """Notes that a single pass has added gradients, which wait for a step."""
        self.has_passes = True

    def drop_gradients(self) -> None:
        """Drops the gradients that have added up since the last step, those that ranks have not reduced yet too."""
        self.has_passes = False
        self.optimizer.clear_gradients()
        for transform in self.transforms:
            transform.drop_gradients(self.module)

    def reported_step(
        self, not_finite: Callable[[], Sequence[str]], params: AdamParams | None = None
    ) -> dict[str, float]:
        """A `step`, and its `report`."""
        return self.report(self.step(params), self.optimizer.steps - 1, not_finite)

    def report(
        self, stepped: Mapping[str, Tensor | float], number: int, not_finite: Callable[[], Sequence[str]]
    ) -> dict[str, float]:
        """The metrics of a step, the schedule's ``number``, under the role's name. A skipped one is recorded and logged with the
        rows ``not_finite``: those of this rank with values that are not finite.
        """
        metrics = {name: float(value) for name, value in stepped.items()}
        if not math.isfinite(metrics["grad_norm"]):
            every = dict.fromkeys(name for names in self.ranks.all_gather(list(not_finite()), "dp") for name in names)
            self.skipped.append(SkippedStep(number, metrics["grad_norm"], tuple(every)))
            if self.ranks.is_first:
                log.warning("%s", self.skipped[-1])
        return {f"{self.role}/{name}": value for name, value in metrics.items()}

    # Updates

    def token_weights(self, rows: DataProto, aggregation: str) -> Tensor:
        """``(B, R)``, with the denominators of all ranks' rows and the largest possible response length."""
        mask = rows["response_mask"]
        longest = int(rows.meta_info.get(MAX_TOKENS, mask.shape[1]))
        every_rank = self.ranks.all_gather((int(denominator(mask, aggregation)), longest), "dp")
        total, longest = sum(count for count, _ in every_rank), max(longest for _, longest in every_rank)
        return token_weights(mask, aggregation, total, max_length=max(longest, 1))

    @contextmanager
    def updating(
        self,
        data: DataProto,
        minibatch: int | None = None,
        epochs: int = 1,
        aggregation: str = "token-mean",
        entropy: bool = False,
    ) -> Iterator["Update"]:
        """An update of the model: one optimizer step for each mini-batch, ``epochs`` times::

            with model.updating(data, minibatch=64) as update:
                for rows, sums in update.minibatches():
                    model.run(rows, loss_fn, sums)
            update.result.metrics

        The caller runs each mini-batch itself, which keeps the call stack to its loss function short. For the arguments
        and errors see `workers.roles.model_worker.TrainedWorker.update`.
        """
        with self.ranks.fail_together():
            check_update(epochs, aggregation, entropy, self.module)
            check_rows(data, self.module, data.names())
            parts = cut_minibatches_of_rank(data, minibatch, self.ranks)
        with self.ranks.fail_together():
            parts = pad_minibatches(parts, data["response_mask"], self.ranks)
        update = Update(self, data, parts, epochs, aggregation)
        with (
            PHASES.phase(f"update_{self.role}"),
            self.accounting.recording(),
            expandable_segments(self.device),
            self.residence.using(changes=True),
        ):
            with undoing(update.log_skipped):
                yield update
            self._choose_unsharded(learns=True)
            update.finish()

    def measured(self) -> dict[str, float]:
        """What the accounting has recorded of an update; every rank calls it."""
        metrics = self.accounting.metrics(self.role)
        if self._unsharding is not None:
            self._leave_unsharded(self._unsharding.after_update(metrics))
            metrics[f"perf/unsharded/{self.role}"] = float(UNSHARDED.index(self.config.unsharded))
        return metrics

    def step(self, params: AdamParams | None = None) -> dict[str, Tensor | float]:
        """One optimizer step with the gradients of all ranks; see `Optimizer.step`."""
        self.has_passes = False
        with expandable_segments(self.device), self.residence.using(moments=True, changes=True):
            for transform in self.transforms:
                transform.sum_gradients(self.module)
            self.residence.wait_for_moments()
            with self.accounting.phase("optimizer"):
                return self.optimizer.step(params)

    # Weights and checkpoints

    def named_weights(self, dtype: torch.dtype | None = None, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face parameter name, full tensor), one after the other, adapters merged or left out; all ranks take part.

        ``dtype`` is that of the tensors, by default their own; `VLMFamily.float32_weights` keep theirs.
        """
        model, exact = self.module.model, self.module.family.in_float32
        with self.residence.using():
            for name, weight in all_named_weights(model, self.ranks, dtype, exact, merged):
                yield name, self.residence.outlasting(weight)

    def adapter_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The matrices of the adapters, B with the scale, as an engine takes them; all ranks take part."""
        with self.residence.using(frozen=False):
            for name, weight in all_adapter_weights(self.module.model, self.ranks, dtype):
                yield name, self.residence.outlasting(weight)

    def save(self, directory: Path | str, in_background: bool = False, export: bool = True) -> None:
        """Writes the training state and, with ``export``, a Hugging Face checkpoint next to it; see `Saving`.

        The checkpoint has the dtype that the model computes in, the training state float32.

        Raises:
            CheckpointError: a rank could not write.
        """
        with self.residence.using(moments=True):
            self.residence.wait_for_moments()
            if export:
                self.saving.save_all(
                    Path(directory), self.module, self.optimizer, self.ranks, in_background, self.precision.dtype
                )
            else:
                self.saving.save_training(Path(directory), self.module, self.optimizer, in_background)

    def load(self, directory: Path | str) -> None:
        """Reads what `save` wrote, in this layout or another, and clears the gradients; a frozen model reads only weights.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another model.
            RankFailure: another rank cannot read it.
        """
        self.has_passes = False
        with self.residence.using(moments=True, changes=True, loads=True):
            self.residence.wait_for_moments()
            if self._optimizer is None:
                load_model_weights(Path(directory), self.module, self.ranks)
            else:
                load_training_state(Path(directory), self.module, self._optimizer, self.ranks)


@dataclass(eq=False, repr=False)
class Update:
    """The mini-batches of an update in order, and what it found; see `TrainingModel.updating`."""

    model: TrainingModel
    data: DataProto
    parts: Sequence[np.ndarray | None]  # the rows of each mini-batch; None: all rows
    epochs: int
    aggregation: str
    result: Updated = field(init=False)  # of an update that has ended
    _steps: list["MadeStep"] = field(init=False, default_factory=list)

    def minibatches(self) -> Iterator[tuple[DataProto, LossSums]]:
        """Rows, and the sums that `TrainingModel.run` adds to; the optimizer steps when the next ones are asked for."""
        model = self.model
        for _ in range(self.epochs):
            for part in self.parts:
                rows = self.data if part is None else self.data[part]
                sums = LossSums(f"{model.role}/loss", model.token_weights(rows, self.aggregation), model.device)
                model.accounting.add(whole_work(model.ranks.all_gather(required_work(model.module, rows), "pp")))
                yield rows, sums
                self._steps.append(MadeStep(part, sums, model.step(), model.optimizer.steps - 1))

    def log_skipped(self) -> None:
        """After an error: tells of steps that were skipped before it, without the rows, which ranks cannot gather any more."""
        for made in self._steps:
            if not math.isfinite(norm := float(made.stepped["grad_norm"])):
                log.warning("optimizer step %d skipped, gradient norm %s; the update failed later", made.number, norm)

    def finish(self) -> None:
        """Makes the result, with the times and operations that the model has recorded. Here the host waits for the device."""
        scores = torch.zeros(self.data["response_mask"].shape)
        for part, first in zip(self.parts, self._steps, strict=False):  # of the first epoch
            scores[slice(None) if part is None else torch.from_numpy(part)] = first.sums.scores.cpu()
        metrics = averages([made.metrics(self.model, self.data) for made in self._steps])
        measured = self.model.measured() if self._steps else {}
        rows_of_caller = np.asarray(self.data[ROW]) if ROW in self.data else None
        self.result = Updated(metrics | measured, scores, rows_of_caller)


@dataclass(frozen=True)
class MadeStep:
    """An optimizer step whose numbers the device may still be computing."""

    part: np.ndarray | None  # the rows; not their copies, which would add up over an update
    sums: LossSums
    stepped: Mapping[str, Tensor | float]
    number: int  # in the schedule

    def metrics(self, model: TrainingModel, data: DataProto) -> dict[str, float]:
        """The metrics of all ranks together; ``data`` are the rows of the update."""
        rows = slice(None) if self.part is None else self.part
        stepped = model.report(self.stepped, self.number, lambda: names_of_rows(data[rows], ~self.sums.finite))
        return self.sums.means(model.ranks) | stepped
