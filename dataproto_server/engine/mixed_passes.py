"""Passes of several adapters and losses as one packed batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from dataproto.chunks import ModelInput
from dataproto.errors import DataProtoError, InvalidRow, NonFiniteLogits
from dataproto_server.backend import Failure, Pass, PassResult
from dataproto_server.engine.base_model import BaseModel
from dataproto_server.engine.datum_inputs import READ_BY_LOSS, DatumInputs, read_inputs
from dataproto_server.incidents import failure_of
from recipes.algorithms.datum_losses import DATUM_LOSSES, THRESHOLDS, loss_options
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
    replayed: bool = False  # it was computed before, and its gradient was finite
    sequences: list[TokenSequence] = field(default_factory=list)
    inputs: list[DatumInputs] = field(default_factory=list)
    log_probs: dict[int, Tensor] = field(default_factory=dict)  # of a row's targets (M,)
    total: float = 0.0
    error: DataProtoError | None = None

    def clear(self) -> None:
        """Forgets what was computed."""
        self.log_probs, self.total = {}, 0.0

    def part(self, rows: Sequence[int]) -> "OpenPass":
        """A pass of some of its rows, of which nothing has been computed."""
        sequences, inputs = [self.sequences[row] for row in rows], [self.inputs[row] for row in rows]
        return replace(self, sequences=sequences, inputs=inputs, log_probs={}, total=0.0)

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
    opened = OpenPass(number, given.loss, options, not given.forward_only, adapter, given.replayed)
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
            if all(each.error is None for each in left):
                _check_gradients(base, left, gradients, between)
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


def _check_gradients(base: BaseModel, passes: Sequence[OpenPass], gradients: Gradients, between: Between) -> None:
    """Gives an ``error`` to each pass whose own gradient has a norm that is not finite: no update could be made with it.

    Passes that are computed again are left alone: their gradients were finite.
    """
    overflown = _overflown(gradients)
    for each in passes:
        if each.backward and not each.replayed and (each.adapter or base.trainer.weights) in overflown:
            each.error = _gradient_error(base, each, between)


def _overflown(gradients: Gradients) -> list[Trainable]:
    """Whose gradients have a norm that is not finite. Waits for the device once."""
    given = {source: [each for each in found if each is not None] for source, found in gradients.items()}
    norms = {source: get_total_norm(found) for source, found in given.items() if found}
    finite = torch.stack(list(norms.values())).isfinite().tolist() if norms else []
    return [source for source, good in zip(norms, finite, strict=True) if not good]


def _gradient_error(base: BaseModel, opened: OpenPass, between: Between) -> NonFiniteLogits | None:
    """Names a row whose gradient is not finite, found by halves, or all rows together; ``None`` if that of the pass is."""

    def overflows(rows: Sequence[int]) -> bool:
        return bool(_overflown(_attempt(base, [opened.part(rows)], between)))

    def guilty(rows: Sequence[int]) -> int | None:
        if len(rows) == 1:
            return rows[0]
        middle = len(rows) // 2
        halves = [half for half in (rows[:middle], rows[middle:]) if overflows(half)]
        return next((row for half in halves if (row := guilty(half)) is not None), None)

    rows = range(len(opened.inputs))
    if not overflows(rows):
        return None
    row = guilty(rows)
    named = f"the gradient of rows 0 to {rows[-1]} together" if row is None else f"row {row}: its gradient"
    return NonFiniteLogits(f"{named} is not finite, so the pass adds none; check logprobs, advantages and weights")


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
    tokens = tokens.where(learned, 0.0)
    total = tokens.sum()
    for row, values in opened.log_probs.items():
        if row in log_probs and not bool(values.isfinite().all()):
            raise NonFiniteLogits(f"row {row}: the logits of the model are not finite; load an earlier checkpoint")
    value = float(total.detach())
    if not math.isfinite(value):
        parts = zip(log_probs, tokens.split([len(values) for values in log_probs.values()]), strict=True)
        wrong = [row for row, part in parts if not bool(part.sum().isfinite())] or list(log_probs)
        raise NonFiniteLogits(f"the loss of rows {sorted(wrong)} is not finite; check logprobs, advantages and weights")
    opened.total += value
    return total
