"""The loss inputs of a datum, read strictly. Letters: N tokens of its input, K targets of each, M targets in all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidColumn
from dataproto_server.backend import Array, SparseRows
from recipes.algorithms.datum_losses import THRESHOLDS, option_names

TARGETS, MASK = "target_tokens", "mask"
READ_BY_LOSS = {"loss_weights": "weights", "rollout_log_probs": "logprobs", "advantages": "advantages"}
"""The columns of `DATUM_LOSSES` as loss inputs."""


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

    @property
    def is_sparse(self) -> bool:
        return len(self.places) > 0 and int(self.columns[-1]) == math.prod(self.shape[1:])

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
        if not self.is_sparse:
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
    keys: Array = rows * (given.shape[1] + 1) + given.col_indices
    return keys


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

    @property
    def size(self) -> int:
        """Numbers of the output."""
        return math.prod(self.layout.shape)

    def output(self, log_probs: Tensor) -> Tensor:
        """Log-probs of the targets ``(M,)`` in the shape of the inputs, 0 where a target has none."""
        return self.layout.spread(log_probs.where(self.known, 0.0))


def read_inputs(
    inputs: Mapping[str, Array | SparseRows],
    loss: str,
    columns: tuple[str, ...],
    tokens: int,
    vocabulary: int,
    room: int | None,
) -> DatumInputs:
    """Checks the loss inputs of a datum of N ``tokens``.

    A token is learned where ``mask`` is not 0 or, without a mask, where one of the inputs that the loss reads is not 0. Sparse
    inputs stay sparse, unless some are dense.

    Args:
        columns: that the loss reads, see `DATUM_LOSSES`.
        room: numbers that the output may have, those of targets that are not listed included; ``None``: any.

    Raises:
        InvalidColumn: there is no room; an input is missing, unknown, of a wrong shape or dtype, or not finite; or a token is
            learned whose target is not in the vocabulary. Names the input and the place.
    """
    wanted = [READ_BY_LOSS[column] for column in columns]
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
    if bool((learned & ~known).any()):
        first = int((learned & ~known).nonzero()[0])
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
    if not isinstance(value, SparseRows):
        return
    starts, columns = (np.asarray(part) for part in (value.crow_indices, value.col_indices))
    if any(part.ndim != 1 or part.dtype.kind not in "iu" for part in (starts, columns)) or value.values.ndim != 1:
        raise InvalidColumn(f"loss_fn_inputs[{name!r}] is no sparse array: its parts are not one-dimensional")
    fits = len(starts) == tokens + 1 and starts[0] == 0 and starts[-1] == len(columns) == len(value.values)
    if not fits or (np.diff(starts) < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
        raise InvalidColumn(
            f"loss_fn_inputs[{name!r}] is no sparse array of shape {shape}: its indices are out of range"
        )


def _whole(array: Array) -> Array:
    if array.dtype.kind not in "iu":
        raise InvalidColumn(f"loss_fn_inputs[{TARGETS!r}] is {array.dtype}, not int64")
    return np.array(array, dtype=np.int64)


def _finite(name: str, array: Array, layout: Layout) -> Array:
    if array.dtype.kind not in "iufb":
        raise InvalidColumn(f"loss_fn_inputs[{name!r}] is {array.dtype}, not float32")
    with np.errstate(over="ignore"):
        found = np.array(array, dtype=np.float32)
    if not np.isfinite(found).all():
        first = int(np.flatnonzero(~np.isfinite(found))[0])
        raise InvalidColumn(f"loss_fn_inputs[{name!r}]{layout.place(first)} is not finite")
    return found
