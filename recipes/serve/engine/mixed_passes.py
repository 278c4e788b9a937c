"""Passes of several adapters and losses as one packed batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dataproto.chunks import ModelInput
from dataproto.errors import DataProtoError, InvalidRow, NonFiniteLogits
from recipes.algorithms.datum_losses import DATUM_LOSSES, THRESHOLDS, loss_options
from recipes.serve.backend import Failure, Pass, PassResult
from recipes.serve.engine.base_model import BaseModel
from recipes.serve.engine.datum_inputs import READ_BY_LOSS, DatumInputs, read_inputs
from recipes.serve.link import failure_of
from rollout.adapters import Adapter
from rollout.prompts import TokenSequence
from workers.adapters.adapter_trainer import Gradients, ScoredRow
from workers.adapters.trained_adapter import Trainable

Results = dict[int, PassResult | Failure]
"""By the numbers of the passes."""
Between = Callable[[], None]


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
    log_probs: dict[int, Tensor] = field(default_factory=dict)  # of a row's targets (M,)
    total: float = 0.0
    error: DataProtoError | None = None

    def clear(self) -> None:
        """Forgets what was computed."""
        self.log_probs, self.total = {}, 0.0

    def result(self) -> PassResult:
        """Log-probs of all targets, 0 for those that have none, and the sum of the loss."""
        outputs = [{"logprobs": inputs.output(self.log_probs[row]).numpy()} for row, inputs in enumerate(self.inputs)]
        return PassResult(outputs, {"loss:sum": self.total})


def open_pass(number: int, given: Pass, base: BaseModel, adapter: Adapter | None, max_targets: int | None) -> OpenPass:
    """Reads a pass.

    Args:
        max_targets: of its rows; ``None``: a pass that has been computed before, to which no limit applies.

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
            if max_targets is not None:
                base.check_context(len(sequence))
            inputs = read_inputs(datum.inputs, given.loss, columns, len(sequence), base.vocabulary, room)
        except DataProtoError as error:
            raise InvalidRow(place, str(error)) from error
        if opened.inputs and inputs.values.keys() != opened.inputs[0].values.keys():
            names, others = sorted(inputs.values), sorted(opened.inputs[0].values)
            raise InvalidRow(place, f"its loss inputs are {names}, those of row 0 {others}")
        opened.sequences.append(sequence)
        opened.inputs.append(inputs)
        room = None if room is None else room - inputs.size
    return opened


def run_passes(base: BaseModel, passes: Sequence[OpenPass], between: Between) -> tuple[Gradients, Results]:
    """Computes passes in one packed batch. A pass that fails adds no gradient and does not fail the others.

    Args:
        between: is called between the parts of the batch.

    Returns:
        The gradients, and the result of each pass by its number.
    """
    left, failed = list(passes), Results()
    while left:
        try:
            gradients = _attempt(base, left, between)
        except Exception as error:  # such as too little memory
            if len(left) > 1:
                return _one_by_one(base, left, between, failed)
            failed[left[0].number] = failure_of(error)
            break
        wrong = [each for each in left if each.error is not None]
        if not wrong:
            return gradients, failed | {each.number: each.result() for each in left}
        failed |= {each.number: Failure(str(each.error), "user") for each in wrong}
        left = [each for each in left if each.error is None]
    return {}, failed


def _one_by_one(
    base: BaseModel, passes: Sequence[OpenPass], between: Between, results: Results
) -> tuple[Gradients, Results]:
    gradients: dict[Trainable, list[Tensor | None]] = {}
    for each in passes:
        found, result = run_passes(base, [each], between)
        for adapter, new in found.items():
            old = gradients.get(adapter, [None] * len(new))
            gradients[adapter] = [b if a is None else a if b is None else a + b for a, b in zip(old, new, strict=True)]
        results |= result
    return gradients, results


def _attempt(base: BaseModel, passes: Sequence[OpenPass], between: Between) -> Gradients:
    """Fills in the passes; one that fails gets its ``error``, and then the gradients are of no use."""
    places = [(each, row) for each in passes for row in range(len(each.inputs))]
    for each in passes:
        each.clear()
    placed = base.renderer.placed([each.sequences[row] for each, row in places])
    scored = [
        ScoredRow(rendered, each.inputs[row].places, each.inputs[row].targets, each.adapter)
        for rendered, (each, row) in zip(placed, places, strict=True)
    ]

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

    return base.trainer.run(scored, loss_of, any(each.backward for each in passes), between)


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
        return torch.cat([each.values[name] for each in inputs]).to(device)

    given = {name: joined(name) for name in THRESHOLDS if name in inputs[0].values}
    learned = torch.cat([each.learned for each in inputs]).to(device)
    policy = torch.cat(list(log_probs.values())).where(learned, 0.0)
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
