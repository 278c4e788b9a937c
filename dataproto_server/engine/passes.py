"""Passes of several adapters and losses as one packed batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from dataproto.errors import DataProtoError, InvalidColumn, InvalidRow, NonFiniteLogits
from dataproto_server.backend import Array, Failure, Pass, PassResult, SparseRows
from dataproto_server.engine.adapter_trainer import Gradients, ScoredRow, merge
from dataproto_server.engine.base_model import BaseModel
from dataproto_server.engine.datum_losses import DATUM_LOSSES, THRESHOLDS, loss_options, option_names
from dataproto_server.refusals import failure_of
from rollout.adapters import Adapter
from rollout.prompts import TokenSequence

TARGETS, MASK = "target_tokens", "mask"


@dataclass(frozen=True)
class Layout:
    """Where the M targets of a datum stand, in the order of the tokens.

    Dense inputs have all N x K of them. Sparse ones have those that at least one input lists, and at each token one more, of the
    token 0 and with column K: its log-prob is that of all places that no input lists, where the targets are 0.
    """

    shape: tuple[int, ...]  # of the inputs: (N,) or (N, K)
    places: Array  # (M,) int64: the token after which each target is predicted
    columns: Array  # (M,) int64, from 0 to K

    @classmethod
    def of(cls, shape: tuple[int, ...], values: Sequence["Array | SparseRows"]) -> "Layout":
        """The layout of inputs of one shape.

        >>> one = SparseRows(np.array([7]), np.array([0, 0, 1]), np.array([2]), (2, 3))
        >>> Layout.of((2, 3), [one]).places.tolist(), Layout.of((2, 3), [one]).columns.tolist()
        ([0, 1, 1], [3, 2, 3])
        """
        tokens, width = shape[0], math.prod(shape[1:])
        if all(isinstance(value, SparseRows) for value in values):
            listed = [_keys(value) for value in values if isinstance(value, SparseRows)]
            keys = np.unique(np.concatenate([*listed, np.arange(1, tokens + 1) * (width + 1) - 1]))
            return cls(shape, *np.divmod(keys, width + 1))
        return cls(shape, *np.divmod(np.arange(tokens * width), width))

    def values_of(self, given: "Array | SparseRows") -> Array:
        """An input at the targets, ``(M,)``; 0 where it lists none."""
        if not isinstance(given, SparseRows):
            return given.reshape(-1)
        width = math.prod(self.shape[1:])
        found: Array = np.zeros(len(self.places), given.values.dtype)
        found[np.searchsorted(self.places * (width + 1) + self.columns, _keys(given))] = given.values
        return found

    def spread(self, values: Tensor) -> Tensor:
        """Values ``(M,)`` in the shape of the inputs."""
        if not len(self.places) or int(self.columns[-1]) != math.prod(self.shape[1:]):  # no input listed its targets
            return values.view(self.shape)
        listed = torch.from_numpy(self.columns < self.shape[1])
        spread = values[~listed][:, None].repeat(1, self.shape[1])
        spread[torch.from_numpy(self.places)[listed], torch.from_numpy(self.columns)[listed]] = values[listed]
        return spread

    def place(self, number: int) -> list[int]:
        """The indices of a target in the inputs."""
        return [int(self.places[number]), int(self.columns[number])][: len(self.shape)]


def _keys(given: SparseRows) -> Array:
    """The places of the values, counted with one column more."""
    rows = np.repeat(np.arange(given.shape[0]), np.diff(given.crow_indices))
    return rows * (given.shape[1] + 1) + given.col_indices


@dataclass(frozen=True)
class DatumInputs:
    """Loss inputs of the M targets of a datum.

    ``known`` are the targets in the vocabulary: the others have no log-prob, and 0 in ``targets``. ``learned`` are those that the
    loss counts.
    """

    layout: Layout
    targets: Tensor  # (M,) int64
    known: Tensor  # (M,) bool
    learned: Tensor  # (M,) bool
    values: Mapping[str, Tensor]  # (M,) float32, by the names of loss inputs

    @property
    def places(self) -> Tensor:
        """The token after which each target is predicted, ``(M,)`` int64, not decreasing."""
        return torch.from_numpy(self.layout.places)

    def output(self, log_probs: Tensor) -> Tensor:
        """Log-probs of the targets ``(M,)`` in the shape of the inputs, 0 where a target has none."""
        return self.layout.spread(log_probs.where(self.known, 0.0))


def read_inputs(
    inputs: Mapping[str, Array | SparseRows], loss: str, tokens: int, vocabulary: int, room: int | None
) -> DatumInputs:
    """Checks the loss inputs of a datum of N ``tokens``.

    A token is learned where ``mask`` is not 0 or, without a mask, where one of the inputs that the loss reads is not 0. Sparse
    inputs stay sparse, unless some are dense.

    Args:
        room: numbers that the output may have, those of targets that are not listed included; ``None``: any.

    Raises:
        InvalidColumn: there is no room; an input is missing, unknown, of a wrong shape or dtype, or not finite; or a token is
            learned whose target is not in the vocabulary. Names the input and the place.
    """
    wanted = DATUM_LOSSES[loss][1]
    _check_names(inputs, loss, wanted)
    for name, value in inputs.items():
        _check_shape(name, value, tokens, room)
    shape = tuple(map(int, inputs[TARGETS].shape))
    if len(shape) == 2 and loss != "cross_entropy":
        raise InvalidColumn(
            f"loss_fn_inputs[{TARGETS!r}] has shape {shape}: only cross_entropy takes several targets a token"
        )
    for name, value in inputs.items():
        if tuple(value.shape) != shape:
            raise InvalidColumn(f"loss_fn_inputs[{name!r}] has shape {tuple(value.shape)}, but {TARGETS!r} {shape}")
    layout = Layout.of(shape, list(inputs.values()))
    arrays = {name: layout.values_of(value) for name, value in inputs.items()}
    targets = torch.from_numpy(_whole(arrays.pop(TARGETS)))
    values = {name: torch.from_numpy(_finite(name, array, layout)) for name, array in arrays.items()}
    known = (targets >= 0) & (targets < vocabulary)
    chosen = [values[MASK]] if MASK in values else [values[name] for name in wanted]
    learned = torch.stack([value != 0 for value in chosen]).any(0)
    for first in (learned & ~known).nonzero().flatten().tolist():
        raise InvalidColumn(
            f"loss_fn_inputs[{TARGETS!r}]{layout.place(first)} = {int(targets[first])} is no token of the model, which has 0 to "
            f"{vocabulary - 1}: its weight, advantage or mask must be 0"
        )
    return DatumInputs(layout, targets.where(known, 0), known, learned, values)


def _check_names(inputs: Mapping[str, Array | SparseRows], loss: str, wanted: Sequence[str]) -> None:
    needed = (TARGETS, *wanted)
    known = (*needed, MASK, *(name for name in THRESHOLDS if name in option_names(loss)))
    for name in inputs:
        if name not in known:
            raise InvalidColumn(
                f"loss_fn_inputs[{name!r}] is not read by the loss {loss!r}: it reads {', '.join(known)}"
            )
    for name in needed:
        if name not in inputs:
            raise InvalidColumn(f"loss_fn_inputs lack {name!r}, which the loss {loss!r} reads")


def _check_shape(name: str, value: Array | SparseRows, tokens: int, room: int | None) -> None:
    shape = tuple(value.shape)
    if len(shape) not in (1, 2) or shape[0] != tokens or (len(shape) == 2 and shape[1] < 1):
        raise InvalidColumn(f"loss_fn_inputs[{name!r}] has shape {shape}, but its model input has {tokens} tokens")
    if room is not None and math.prod(map(int, shape)) > room:
        raise InvalidColumn(
            f"loss_fn_inputs[{name!r}] has shape {shape}, but the pass has room for {room} more targets (--max-targets)"
        )


def _whole(array: Array) -> Array:
    if array.dtype.kind not in "iu":
        raise InvalidColumn(f"loss_fn_inputs[{TARGETS!r}] is {array.dtype}, not int64")
    return np.array(array, dtype=np.int64)


def _finite(name: str, array: Array, layout: Layout) -> Array:
    with np.errstate(over="ignore"):
        found = np.array(array, dtype=np.float32)
    for first in np.flatnonzero(~np.isfinite(found)).tolist():
        raise InvalidColumn(f"loss_fn_inputs[{name!r}]{layout.place(first)} is not finite")
    return found


Results = dict[int, PassResult | Failure]
"""By the numbers of the passes."""
Between = Callable[[], None]


@dataclass
class OpenPass:
    """A pass whose data have been read, and what has been computed of it."""

    number: int  # among those of the call
    given: Pass
    options: Mapping[str, float]
    adapter: Adapter | None  # None: all weights are trained
    sequences: list[TokenSequence] = field(default_factory=list)
    inputs: list[DatumInputs] = field(default_factory=list)
    log_probs: dict[int, Tensor] = field(default_factory=dict)  # of a row's targets (M,)
    total: float = 0.0
    error: DataProtoError | None = None

    @property
    def backward(self) -> bool:
        return not self.given.forward_only

    def result(self) -> PassResult:
        """Log-probs of all targets, 0 for those that have none, and the sum of the loss."""
        outputs = [{"logprobs": inputs.output(self.log_probs[row]).numpy()} for row, inputs in enumerate(self.inputs)]
        return PassResult(outputs, {"loss:sum": self.total})


def open_pass(number: int, given: Pass, base: BaseModel, adapter: Adapter | None, max_targets: int) -> OpenPass:
    """Reads a pass. No limit applies to one that has been computed before.

    Args:
        max_targets: of its rows.

    Raises:
        InvalidConfig: the loss or one of its options is unknown.
        InvalidRow: a datum cannot be used; names its number, the chunk or the loss input, and the reason.
    """
    opened = OpenPass(number, given, loss_options(given.loss, given.loss_config), adapter)
    room = None if given.replayed else max_targets
    for place, datum in enumerate(given.data):
        try:
            sequence = base.sequence(datum.chunks)
            if not given.replayed:
                base.check_context(len(sequence))
            inputs = read_inputs(datum.inputs, given.loss, len(sequence), base.vocabulary, room)
        except DataProtoError as error:
            raise InvalidRow(place, str(error)) from error
        if opened.inputs and inputs.values.keys() != opened.inputs[0].values.keys():
            names, others = sorted(inputs.values), sorted(opened.inputs[0].values)
            raise InvalidRow(place, f"its loss inputs are {names}, those of row 0 {others}")
        opened.sequences.append(sequence)
        opened.inputs.append(inputs)
        room = None if room is None else room - math.prod(inputs.layout.shape)
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
                one_by_one: Gradients = {}
                for each in left:
                    found, result = run_passes(base, [each], between)
                    merge(one_by_one, found)
                    failed |= result
                return one_by_one, failed
            failed[left[0].number] = failure_of(error)
            break
        wrong = [each for each in left if each.error is not None]
        if not wrong:
            return gradients, failed | {each.number: each.result() for each in left}
        failed |= {each.number: Failure(str(each.error), "user") for each in wrong}
        left = [each for each in left if each.error is None]
    return {}, failed


def _attempt(base: BaseModel, passes: Sequence[OpenPass], between: Between) -> Gradients:
    """Fills in the passes; one that fails gets its ``error``, and then the gradients are of no use."""
    places = [(each, row) for each in passes for row in range(len(each.inputs))]
    for each in passes:
        each.log_probs, each.total = {}, 0.0
    placed = base.renderer.placed([each.sequences[row] for each, row in places])
    scored = [
        ScoredRow(rendered, each.adapter, each.inputs[row].places, each.inputs[row].targets)
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
    overflown = _overflown(base, passes, gradients)
    for each in passes:
        if each.backward and not each.given.replayed and each.adapter in overflown:
            alone = replace(each)
            if _overflown(base, [alone], _attempt(base, [alone], between)):
                each.error = NonFiniteLogits(
                    f"the gradient of rows 0 to {len(each.inputs) - 1} together is not finite, so the pass adds none; check "
                    "logprobs, advantages and weights"
                )


def _overflown(base: BaseModel, passes: Sequence[OpenPass], gradients: Gradients) -> list[Adapter | None]:
    """The adapters whose gradients have a norm that is not finite. Waits for the device once."""
    adapters = dict.fromkeys(each.adapter for each in passes)
    given = {each: [gradients[m] for m in base.trainer.trained(each) if m in gradients] for each in adapters}
    norms = {adapter: get_total_norm(found) for adapter, found in given.items() if found}
    finite = torch.stack(list(norms.values())).isfinite().tolist() if norms else []
    return [adapter for adapter, good in zip(norms, finite, strict=True) if not good]


def _loss(opened: OpenPass, log_probs: Mapping[int, Tensor]) -> Tensor:
    """The sum () of the loss over the tokens of some rows, which is added to the total of the pass.

    Raises:
        NonFiniteLogits: log-probs or the loss are not finite.
        InvalidConfig: an option is out of range.
    """
    opened.log_probs |= {row: values.detach().cpu() for row, values in log_probs.items()}
    device = next(iter(log_probs.values())).device
    inputs = [opened.inputs[row] for row in log_probs]
    formula, wanted = DATUM_LOSSES[opened.given.loss]

    def joined(name: str) -> Tensor:
        return torch.cat([each.values[name] for each in inputs]).to(device)

    given = {name: joined(name) for name in THRESHOLDS if name in inputs[0].values}
    learned = torch.cat([each.learned for each in inputs]).to(device)
    policy = torch.cat(list(log_probs.values())).where(learned, 0.0)
    tokens = formula(policy, *(joined(name) for name in wanted), **{**opened.options, **given})
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
