"""Checks of a batch before the first forward pass, which refuse rows that the model cannot have produced, of its scores, and of
the arguments of an update.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.columns import COLUMNS, PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS, require
from dataproto.errors import InvalidColumn, InvalidConfig, MediaMismatch, NonFiniteLogits, raised_as
from dataproto.ragged import RaggedTensor
from dataproto.vlm.positions import TOKEN_TYPES
from workers.model.packed_model import PackedVLM
from workers.training.forward_pass import TRAINING_COLUMNS, media_of, token_types
from workers.training.loss_sums import check_mode

READ = (*TRAINING_COLUMNS, "mm_token_type_ids")
"""The dense columns that a forward pass reads."""


def check_rows(data: DataProto, module: PackedVLM, columns: Iterable[str] = READ) -> None:
    """Refuses batches that the policy cannot have produced, and those at which a forward pass would stop.

    Ranks agree on these errors before the first collective; they do not agree on errors that the content of a row causes later.

    Args:
        columns: those whose shape is checked against `COLUMNS`; an update, whose loss may read any, checks all.

    Raises:
        MissingColumn: a column that training reads is absent.
        InvalidColumn: columns whose shapes do not fit, a token outside the model's vocabulary, or a response token that the
            policy can never sample, that is not attended to, or that has no token before it; names row and position.
        MediaMismatch: a row's placeholder tokens and media disagree, as when a row was cut through an image, or its media is
            incomplete or of another shape than the model's; names the row.
    """
    require(data, *TRAINING_COLUMNS)
    check_shapes(data, module, columns)
    check_attended(data)
    check_vocabulary(data, module.model.config.get_text_config().vocab_size)
    check_responses(data, module.banned_ids)
    check_routed_experts(data, module)
    check_media(data, module)


def check_shapes(data: DataProto, module: PackedVLM, columns: Iterable[str]) -> None:
    rows, length = data["input_ids"].shape
    sizes = {"B": rows, "L": length, "R": min(data["response_mask"].shape[-1], length), "4": 4}
    for name in columns:
        if name not in data or name not in COLUMNS or COLUMNS[name].dtype == "object":
            continue
        shapes = [tuple(map(sizes.get, letters)) for letters in COLUMNS[name].shapes if sizes.keys() >= {*letters}]
        if name == "position_ids" and not module.family.mrope:
            shapes = [(rows, length)]
        column = data[name]
        if isinstance(column, np.ndarray) and any(len(shape) > 1 for shape in shapes):
            raise InvalidColumn(f"column {name!r} is a numpy array: give the tensor torch.as_tensor(data[{name!r}])")
        if shapes and isinstance(column, Tensor | np.ndarray) and tuple(column.shape) not in shapes:
            one_a_row = shapes == [(rows, sizes["R"])] and column.shape == (rows,)
            raise InvalidColumn(
                f"column {name!r}: expected {' or '.join(map(str, shapes))} next to 'input_ids' {(rows, length)}, "
                f"found {tuple(column.shape)}"
                + f"; give each token the number of its row: data[{name!r}][:, None] * data['response_mask']"
                * one_a_row
            )


def check_attended(data: DataProto) -> None:
    """A log-prob depends on the tokens before, so a response token follows one, and is itself attended to."""
    attended, wanted = data["attention_mask"].bool(), data["response_mask"].bool()
    later = attended & (attended.cumsum(1) > 1)
    wrong = wanted & ~later[:, attended.shape[1] - wanted.shape[1] :]
    for row, column in wrong.nonzero().tolist():
        raise InvalidColumn(
            f"row {row}, response position {column}: response_mask is 1 on a token that is not attended to or has no token "
            "before it; set response_mask to 0 there"
        )


def check_vocabulary(data: DataProto, vocabulary: int) -> None:
    """A split vocabulary would silently give a token outside of it an embedding of zero."""
    tokens = data["input_ids"]
    wrong = ((tokens < 0) | (tokens >= vocabulary)) & data["attention_mask"].bool()
    for row, column in wrong.nonzero().tolist():
        raise InvalidColumn(
            f"'input_ids', row {row}, position {column}: token {int(tokens[row, column])} is outside the model's vocabulary of "
            f"{vocabulary} tokens; set 'attention_mask' to 0 where a token does not count"
        )


def check_responses(data: DataProto, banned_ids: Sequence[int]) -> None:
    width = data["response_mask"].shape[1]
    responses = data["input_ids"][:, data["input_ids"].shape[1] - width :]
    banned = torch.isin(responses, torch.tensor(banned_ids, dtype=responses.dtype, device=responses.device))
    for row, column in (banned & data["response_mask"].bool()).nonzero().tolist():
        raise InvalidColumn(
            f"row {row}, response position {column}: token {int(responses[row, column])} is banned from sampling, so it has "
            "no log-prob under the policy; set response_mask to 0 there"
        )


def check_routed_experts(data: DataProto, module: PackedVLM) -> None:
    """Each attended token of a model that replays routing has the experts of each layer."""
    if not module.replays_routing or ROUTED_EXPERTS not in data:
        return
    require(data, PROMPT_ROUTED_EXPERTS)
    width = data["response_mask"].shape[1]
    attended = data["attention_mask"]
    experts = module.family.expert_count(module.model.config.get_text_config())
    for name, mask in (
        (PROMPT_ROUTED_EXPERTS, attended[:, : attended.shape[1] - width]),
        (ROUTED_EXPERTS, attended[:, attended.shape[1] - width :]),
    ):
        column: RaggedTensor = data[name]
        if column.tail != module.routing_shape:
            raise InvalidColumn(
                f"{name!r} has {tuple(column.tail)} layers and choices a token, the model {module.routing_shape}: leave the "
                "column out, or take rows of an engine with this model"
            )
        for row in (column.lengths != mask.sum(1)).nonzero().flatten().tolist():
            raise InvalidColumn(
                f"{name!r}, row {row}: {int(column.lengths[row])} tokens, of {int(mask[row].sum())} attended"
            )
        if len(column.storage) and not 0 <= int(column.storage.min()) <= int(column.storage.max()) < experts:
            raise InvalidColumn(f"{name!r} names experts outside of the model's {experts}")


def check_media(data: DataProto, module: PackedVLM) -> None:
    types = token_types(module, data) * data["attention_mask"]
    features: dict[tuple[int, ...], tuple[int, ...]] = {}  # of media that many rows share, computed once
    expected = torch.zeros(len(data), len(TOKEN_TYPES), dtype=torch.int64)
    for number, row in enumerate(media_of(data)):
        for part in row if isinstance(row, tuple | list) else (row,):
            if not isinstance(part, Mapping):
                raise InvalidColumn(
                    f"'multi_modal_inputs', row {number}: expected a dict, found a {type(part).__name__}"
                )
            key = tuple(map(id, part.values()))
            if key not in features:
                with raised_as(MediaMismatch, f"row {number}", MediaMismatch):
                    features[key] = part_features(part, module)
            expected[number] += torch.tensor(features[key])
    found = torch.stack([(types == kind).sum(1) for kind in TOKEN_TYPES.values()], dim=1)
    for row_number, kind in (found != expected).nonzero().tolist():
        raise MediaMismatch(
            f"row {row_number}: {int(found[row_number, kind])} {[*TOKEN_TYPES][kind]} placeholder tokens, but its media "
            f"makes {int(expected[row_number, kind])} features; a prompt that was cut through its media cannot be used: leave "
            "overlong prompts out, as PromptBuilder does"
        )


def part_features(row: Mapping[str, Any], module: PackedVLM) -> tuple[int, ...]:
    """Numbers of features of the media of each kind of a row, or of one of its turns; checks that their tensors are complete and
    fit the towers.
    """
    if not row:
        return (0,) * len(TOKEN_TYPES)
    layout, config = module.family.media_layout, module.model.config
    smallest = layout.smallest(config)
    for kind in layout.kinds:
        if not layout.holds(kind, row):
            continue
        names = layout.names(kind)
        for name in names:
            if not isinstance(row[name], Tensor):
                raise MediaMismatch(f"{name!r} is a {type(row[name]).__name__}, not a tensor")
        pixels = row[names[0]]
        tail = smallest.get(names[0], next(iter(smallest.values()))).shape[1:]
        if not pixels.is_floating_point() or pixels.shape[1:] != tail:
            raise MediaMismatch(
                f"{names[0]!r} is {pixels.dtype} {tuple(pixels.shape)}, but the model takes floating-point "
                f"numbers of shape (N, {', '.join(map(str, tail))})"
            )
    return module.family.feature_counts(row, config)


def check_finite(scores: Tensor, data: DataProto, name: str) -> None:
    """Raises `NonFiniteLogits` where ``scores (B, R)`` of response tokens are NaN or infinite.

    >>> data = DataProto.from_dict({"response_mask": torch.tensor([[1, 0], [1, 1]])}, {"uid": ["a", "b"]})
    >>> check_finite(torch.tensor([[-0.5, 0.0], [-0.1, float("nan")]]), data, "old_log_probs")
    Traceback (most recent call last):
    ...
    dataproto.errors.NonFiniteLogits: row 1 (uid b): old_log_probs of response token 1 is nan: the model's weights, or the row's \
pixels, hold NaN or infinity
    """
    for row, place in (~scores.isfinite() & (data["response_mask"] != 0)).nonzero().tolist():
        uid = f" (uid {data['uid'][row]})" if "uid" in data else ""
        raise NonFiniteLogits(
            f"row {row}{uid}: {name} of response token {place} is {float(scores[row, place])}: the model's weights, or the row's "
            "pixels, hold NaN or infinity"
        )


def check_update(epochs: int, aggregation: str, entropy: bool, module: PackedVLM) -> None:
    """Raises `InvalidConfig` for an update that this model cannot make, whatever the rows."""
    if not isinstance(epochs, int | np.integer) or epochs < 1:
        raise InvalidConfig(f"epochs={epochs!r}: must be a whole number of at least 1")
    check_mode(aggregation)
    if entropy and not module.makes_logits:
        raise InvalidConfig("entropy=True: a critic has no entropy")
