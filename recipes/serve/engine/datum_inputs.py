"""The loss inputs of a datum: read strictly, sparse ones made dense. Letters: N tokens of its input, K targets of each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidColumn
from recipes.algorithms.datum_losses import THRESHOLDS, option_names
from recipes.serve.backend import Array, SparseRows

TARGETS, MASK = "target_tokens", "mask"
READ_BY_LOSS = {"loss_weights": "weights", "rollout_log_probs": "logprobs", "advantages": "advantages"}
"""The columns of `DATUM_LOSSES` as loss inputs."""


@dataclass(frozen=True)
class DatumInputs:
    """Loss inputs of one datum as tensors ``(N, K)``, K = 1 for inputs ``(N,)``.

    ``known`` are the targets in the vocabulary: the others have no log-prob, and 0 in ``targets``. ``learned`` are those that the
    loss counts.
    """

    targets: Tensor  # int64
    known: Tensor  # bool
    learned: Tensor  # bool
    values: Mapping[str, Tensor]  # float32, by the names of loss inputs
    flat: bool  # given as (N,)


def read_inputs(
    inputs: Mapping[str, Array | SparseRows],
    loss: str,
    columns: tuple[str, ...],
    tokens: int,
    vocabulary: int,
    room: int,
) -> DatumInputs:
    """Checks the loss inputs of a datum of N ``tokens``.

    A token is learned where ``mask`` is not 0 or, without a mask, where one of the inputs that the loss reads is not 0.

    Args:
        columns: that the loss reads, see `DATUM_LOSSES`.
        room: targets that it may have, zeros of sparse arrays included; more take no memory before they are refused.

    Raises:
        InvalidColumn: there is no room; an input is missing, unknown, of a wrong shape or dtype, or not finite; or a token is
            learned whose target is not in the vocabulary. Names the input and the place.
    """
    wanted = [READ_BY_LOSS[column] for column in columns]
    _check_names(inputs, loss, wanted)
    arrays = {name: _dense(name, value, tokens, room) for name, value in inputs.items()}
    shape = arrays[TARGETS].shape
    if len(shape) == 2 and loss != "cross_entropy":
        raise InvalidColumn(
            f"loss_fn_inputs[{TARGETS!r}] has shape {shape}: only cross_entropy takes several targets a token"
        )
    for name, array in arrays.items():
        if array.shape != shape:
            raise InvalidColumn(f"loss_fn_inputs[{name!r}] has shape {array.shape}, but {TARGETS!r} {shape}")
    targets = torch.from_numpy(_whole(arrays.pop(TARGETS)))
    values = {name: torch.from_numpy(_finite(name, array)) for name, array in arrays.items()}
    known = (targets >= 0) & (targets < vocabulary)
    chosen = [values[MASK]] if MASK in values else [values[name] for name in wanted]
    learned = torch.stack([value != 0 for value in chosen]).any(0)
    if bool((learned & ~known).any()):
        place = [int(index) for index in (learned & ~known).nonzero()[0]]
        raise InvalidColumn(
            f"loss_fn_inputs[{TARGETS!r}]{place} = {int(targets[tuple(place)])} is no token of the model, which has 0 to "
            f"{vocabulary - 1}: its weight, advantage or mask must be 0"
        )
    return DatumInputs(
        targets.where(known, 0).reshape(tokens, -1),
        known.reshape(tokens, -1),
        learned.reshape(tokens, -1),
        {name: value.reshape(tokens, -1) for name, value in values.items()},
        flat=len(shape) == 1,
    )


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


def _dense(name: str, value: Array | SparseRows, tokens: int, room: int) -> Array:
    shape = tuple(value.shape)
    if len(shape) not in (1, 2) or shape[0] != tokens or (len(shape) == 2 and shape[1] < 1):
        raise InvalidColumn(f"loss_fn_inputs[{name!r}] has shape {shape}, but its model input has {tokens} tokens")
    if math.prod(map(int, shape)) > room:
        raise InvalidColumn(
            f"loss_fn_inputs[{name!r}] has shape {shape}, but the pass has room for {room} more targets (--max-targets)"
        )
    if not isinstance(value, SparseRows):
        return value
    starts, columns = (np.asarray(part) for part in (value.crow_indices, value.col_indices))
    if any(part.ndim != 1 or part.dtype.kind not in "iu" for part in (starts, columns)) or value.values.ndim != 1:
        raise InvalidColumn(f"loss_fn_inputs[{name!r}] is no sparse array: its parts are not one-dimensional")
    counts = np.diff(starts)
    fits = len(starts) == tokens + 1 and starts[0] == 0 and starts[-1] == len(columns) == len(value.values)
    if not fits or (counts < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
        raise InvalidColumn(
            f"loss_fn_inputs[{name!r}] is no sparse array of shape {shape}: its indices are out of range"
        )
    dense = np.zeros(shape, dtype=value.values.dtype)
    dense[np.repeat(np.arange(tokens), counts), columns] = value.values
    return dense


def _whole(array: Array) -> Array:
    if array.dtype.kind not in "iu":
        raise InvalidColumn(f"loss_fn_inputs[{TARGETS!r}] is {array.dtype}, not int64")
    return np.array(array, dtype=np.int64)


def _finite(name: str, array: Array) -> Array:
    if array.dtype.kind not in "iufb":
        raise InvalidColumn(f"loss_fn_inputs[{name!r}] is {array.dtype}, not float32")
    with np.errstate(over="ignore"):
        found = np.array(array, dtype=np.float32)
    if not np.isfinite(found).all():
        place = np.argwhere(~np.isfinite(found))[0].tolist()
        raise InvalidColumn(f"loss_fn_inputs[{name!r}]{place} is not finite")
    return found
