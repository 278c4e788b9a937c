"""Passes of several adapters and losses as one packed batch."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dataproto.chunks import ModelInput
from dataproto.errors import DataProtoError, InvalidRow, NonFiniteLogits
from recipes.algorithms.datum_losses import DATUM_LOSSES, THRESHOLDS, loss_options
from recipes.serve.backend import Failure, Pass, PassResult
from recipes.serve.engine.base_model import BaseModel
from recipes.serve.engine.datum_inputs import READ_BY_LOSS, DatumInputs, read_inputs
from rollout.adapters import Adapter
from rollout.prompts import TokenSequence
from workers.adapters.adapter_trainer import Gradients, ScoredRow
from workers.adapters.trained_adapter import Trainable

log = logging.getLogger(__name__)
Rows = Mapping[int, Sequence[ScoredRow]]
"""The rows of passes, by the numbers of the passes."""


@dataclass
class OpenPass:
    """A pass whose data have been read, and what has been computed of it."""

    number: int  # among those of the call
    loss: str
    options: Mapping[str, float]
    backward: bool
    adapter: Adapter | None  # None: all weights are trained
    sequences: list[TokenSequence] = field(default_factory=list)
    inputs: list[DatumInputs] = field(default_factory=list)
    log_probs: dict[int, Tensor] = field(default_factory=dict)  # of a row (N, K)
    total: float = 0.0
    error: DataProtoError | None = None

    def clear(self) -> None:
        """Forgets what was computed."""
        self.log_probs, self.total = {}, 0.0

    def result(self) -> PassResult:
        """Log-probs of all targets, 0 for those that have none, and the sum of the loss."""
        outputs = []
        for number, inputs in enumerate(self.inputs):
            values = self.log_probs[number].where(inputs.known, 0.0)
            outputs.append({"logprobs": (values[:, 0] if inputs.flat else values).numpy()})
        return PassResult(outputs, {"loss:sum": self.total})


def open_pass(number: int, given: Pass, base: BaseModel, adapter: Adapter | None, max_targets: int) -> OpenPass:
    """Reads a pass.

    Raises:
        InvalidConfig: the loss or one of its options is unknown.
        InvalidRow: a datum cannot be used; names its number, the chunk or the loss input, and the reason.
    """
    options = loss_options(given.loss, given.loss_config)
    columns = DATUM_LOSSES[given.loss][1]
    opened = OpenPass(number, given.loss, options, not given.forward_only, adapter)
    room = max_targets
    for place, datum in enumerate(given.data):
        try:
            sequence = base.sequence(ModelInput(datum.chunks))
            base.check_context(len(sequence))
            inputs = read_inputs(datum.inputs, given.loss, columns, len(sequence), base.vocabulary, room)
        except DataProtoError as error:
            raise InvalidRow(place, str(error)) from error
        if opened.inputs and inputs.values.keys() != opened.inputs[0].values.keys():
            names, others = sorted(inputs.values), sorted(opened.inputs[0].values)
            raise InvalidRow(place, f"its loss inputs are {names}, those of row 0 {others}")
        opened.sequences.append(sequence)
        opened.inputs.append(inputs)
        room -= inputs.targets.numel()
    return opened


def run_passes(base: BaseModel, passes: Sequence[OpenPass]) -> tuple[Gradients, dict[int, PassResult | Failure]]:
    """Computes passes in one packed batch. A pass that fails adds no gradient and does not fail the others.

    Returns:
        The gradients, and the result of each pass by its number.
    """
    placed = iter(base.renderer.placed([sequence for each in passes for sequence in each.sequences]))
    rows = {
        each.number: [ScoredRow(next(placed), inputs.targets, each.adapter) for inputs in each.inputs]
        for each in passes
    }
    return _run(base, passes, rows)


def _run(base: BaseModel, passes: Sequence[OpenPass], rows: Rows) -> tuple[Gradients, dict[int, PassResult | Failure]]:
    failed: dict[int, PassResult | Failure] = {}
    left = list(passes)
    while left:
        try:
            gradients = _attempt(base, left, rows)
        except Exception as error:  # such as too little memory
            if len(left) > 1:
                return _one_by_one(base, left, rows, failed)
            log.exception("a pass failed")
            failed[left[0].number] = Failure(
                f"the pass could not be computed: {type(error).__name__}: {error}", "server"
            )
            break
        wrong = [each for each in left if each.error is not None]
        if not wrong:
            return gradients, failed | {each.number: each.result() for each in left}
        failed |= {each.number: Failure(str(each.error), "user") for each in wrong}
        left = [each for each in left if each.error is None]
    return {}, failed


def _one_by_one(
    base: BaseModel, passes: Sequence[OpenPass], rows: Rows, results: dict[int, PassResult | Failure]
) -> tuple[Gradients, dict[int, PassResult | Failure]]:
    gradients: dict[Trainable, list[Tensor | None]] = {}
    for each in passes:
        found, result = _run(base, [each], rows)
        for adapter, new in found.items():
            old = gradients.get(adapter, [None] * len(new))
            gradients[adapter] = [b if a is None else a if b is None else a + b for a, b in zip(old, new, strict=True)]
        results |= result
    return gradients, results


def _attempt(base: BaseModel, passes: Sequence[OpenPass], rows: Rows) -> Gradients:
    """Fills in the passes; one that fails gets its ``error``, and then the gradients are of no use."""
    places = [(each, row) for each in passes for row in range(len(rows[each.number]))]
    for each in passes:
        each.clear()

    def loss_of(numbers: Sequence[int], log_probs: Sequence[Tensor]) -> Tensor | None:
        totals = []
        for each in passes:
            mine = [
                (places[n][1], values) for n, values in zip(numbers, log_probs, strict=True) if places[n][0] is each
            ]
            if mine and each.error is None:
                try:
                    total = _loss(each, dict(mine))
                except DataProtoError as error:
                    each.error = error
                    continue
                if each.backward:
                    totals.append(total)
        return torch.stack(totals).sum() if totals else None

    scored = [rows[each.number][row] for each, row in places]
    return base.trainer.run(scored, loss_of, any(each.backward for each in passes))


def _loss(opened: OpenPass, log_probs: Mapping[int, Tensor]) -> Tensor:
    """The sum () of the loss over the tokens of some rows, which is added to the total of the pass.

    Raises:
        NonFiniteLogits: log-probs or the loss are not finite.
        InvalidConfig: an option is out of range.
    """
    opened.log_probs |= {row: values.detach().cpu() for row, values in log_probs.items()}
    device = next(iter(log_probs.values())).device
    inputs = [opened.inputs[row] for row in log_probs]
    formula, columns = DATUM_LOSSES[opened.loss]

    def joined(name: str) -> Tensor:
        return torch.cat([each.values[name].flatten() for each in inputs]).to(device)

    given = {name: joined(name) for name in THRESHOLDS if name in inputs[0].values}
    learned = torch.cat([each.learned.flatten() for each in inputs]).to(device)
    policy = torch.cat([values.flatten() for values in log_probs.values()]).where(learned, 0.0)
    tokens = formula(policy, *(joined(READ_BY_LOSS[column]) for column in columns), **{**opened.options, **given})
    total = tokens.where(learned, 0.0).sum()
    for row, values in opened.log_probs.items():
        if row in log_probs and not bool(values.isfinite().all()):
            raise NonFiniteLogits(f"row {row}: the logits of the model are not finite; load an earlier checkpoint")
    value = float(total.detach())
    if not math.isfinite(value):
        raise NonFiniteLogits(f"the loss of rows {sorted(log_probs)} is not finite; check logprobs and advantages")
    opened.total += value
    return total
