"""From rows of a batch to the forward pass of one micro-batch: packed, with their media, on the device.

Batches go to the device without waiting for it: the host prepares the next micro-batch while the device computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS, RowMedia, media_parts
from dataproto.packing import PackedRows, fill_up, pack_rows, prompt_sharing, unpack_cells
from dataproto.transfer import move
from dataproto.vlm import MediaSpans, media_spans
from workers.model.kept_features import Wanted
from workers.model.packed_model import EncodedMedia, MediaPart, PackedVLM

LossFn = Callable[[Any, DataProto], tuple[Tensor, dict[str, Tensor]]]
"""``loss_fn(outputs, rows)`` to the loss per token ``(B, R)`` and metrics per token ``{name: (B, R)}``.

The worker masks and averages them. A policy's outputs are `workers.model.packed_model.Outputs`, a critic's are
`workers.roles.critic.Values`.
"""

TRAINING_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")


class Inputs(NamedTuple):
    """The arguments of `PackedVLM.forward` for a micro-batch, on its device."""

    rows: PackedRows
    media: MediaPart | EncodedMedia | None
    spans: MediaSpans
    wanted: Wanted | None


def inputs_of(module: PackedVLM, rows: DataProto, device: torch.device, tower: bool = False, length: int = 0) -> Inputs:
    """The rows, packed, with each distinct image once, on ``device``.

    Args:
        tower: run the vision tower even if the rows have no media, on a dummy image without effect.
        length: fill the packed rows up to this number of tokens.
    """
    prepared = PreparedRows(module, rows)
    return Inputs(prepared.tokens(module, device, length), *prepared.media(module, device, tower))


def encoded(module: PackedVLM, inputs: Inputs) -> Inputs:
    """``inputs`` with the features of their media in the place of pixels."""
    media = inputs.media
    return inputs._replace(media=module.encode(media)) if isinstance(media, MediaPart) else inputs


def forward_inputs(module: PackedVLM, rows: DataProto, inputs: Inputs, entropy: bool = False) -> Any:
    """The ``module.outputs`` of ``rows``, whose ``inputs`` these are."""
    found = module(inputs.rows, inputs.media, inputs.spans, entropy, inputs.wanted)
    shape = tuple(rows["response_mask"].shape)
    scores, entropies, ahead = (
        None if each is None else unpack_cells(each, inputs.rows.response_cells, shape) for each in found
    )
    outputs = module.outputs(scores, entropies)  # type: ignore[arg-type]
    return outputs if ahead is None else replace(outputs, head_log_probs=ahead)


class PreparedRows:
    """Rows, packed, with their media."""

    def __init__(self, module: PackedVLM, rows: DataProto) -> None:
        self.rows, self.shared = rows, sharing(module, rows)
        self.packed = pack(module, rows, self.shared)

    def tokens(self, module: PackedVLM, device: torch.device, length: int = 0) -> PackedRows:
        """The packed rows on ``device``, filled up to ``length`` tokens."""
        packed = fill_up(self.packed, length)
        return fill_up(packed, module.tokens.filled(packed.input_ids.shape[-1])).to(device)

    def media(
        self, module: PackedVLM, device: torch.device, tower: bool = False, keeps: bool = True
    ) -> tuple[MediaPart | None, MediaSpans, Wanted | None]:
        """The media that ``module`` encodes, the places of all features, and which features it keeps.

        Args:
            tower: see `forward_rows`.
            keeps: whether to use features that the module has kept, and to keep further ones.
        """
        placed, config = placed_media(module, self.rows, self.shared), module.model.config
        media = module.family.distinct_media(placed, config)
        spans = media_spans(self.packed.token_types, media, self.packed.cu_seqlens)
        inputs, wanted = media.inputs, None
        if module.kept is not None and keeps:
            wanted = module.kept.wanted(placed, inputs)
            inputs = wanted.inputs
        inputs = inputs or (module.family.dummy_media(config) if tower else {})
        return (module.features.share(config, inputs, device) if inputs else None), spans, wanted


def pack(module: PackedVLM, rows: DataProto, shared: Tensor) -> PackedRows:
    """The rows packed; rows where ``shared (B,)`` is true have the prompt of the row before."""
    ids, mask, positions, responses = (rows[name] for name in TRAINING_COLUMNS)
    packed = pack_rows(ids, mask, positions, responses, token_types(module, rows), shared)
    if module.replays_routing and ROUTED_EXPERTS in rows:
        packed = replace(packed, routed_experts=recorded_experts(rows, shared))
    return packed


def recorded_experts(rows: DataProto, shared: Tensor) -> Tensor:
    """The experts ``(T, M, k)`` of the rows' packed tokens; rows where ``shared (B,)`` is true come without their prompt."""
    prompts, responses = rows[PROMPT_ROUTED_EXPERTS], rows[ROUTED_EXPERTS]
    parts = []
    for row, continues in enumerate(shared.tolist()):
        parts += [responses[row]] if continues else [prompts[row], responses[row]]
    return torch.cat(parts)


def placed_media(module: PackedVLM, rows: DataProto, shared: Tensor) -> list[RowMedia]:
    """The media of each packed row: of one that shares its prompt, those after it."""
    inputs = list(media_of(rows))
    if bool(shared.any()):
        for row, split in enumerate(split_at_prompt(module, rows)):
            if split is not None and shared[row]:
                inputs[row] = split[1]
    return inputs


def needs_tower(module: PackedVLM, parts: Sequence[DataProto]) -> list[bool]:
    """Whether each micro-batch of a call has media whose features are not kept from those before it."""
    if module.kept is None:
        return [has_media(part) for part in parts]
    return module.kept.plan([media_of(part) for part in parts])


def media_tokens(module: PackedVLM, rows: DataProto) -> int:
    """How many tokens of media the packed rows have, those of a shared prompt once."""
    media, width = token_types(module, rows) != 0, rows["response_mask"].shape[1]
    return int(media.sum() - media[sharing(module, rows), : media.shape[1] - width].sum())


def sharing(module: PackedVLM, rows: DataProto) -> Tensor:
    """``(B,)`` bool: rows that have the prompt of the row before, see `prompt_sharing`."""
    ids, types, width = rows["input_ids"], token_types(module, rows), rows["response_mask"].shape[1]
    media = [None if split is None else split[0] for split in split_at_prompt(module, rows)]
    return prompt_sharing(ids, rows["attention_mask"], rows["position_ids"], types, media, width)


def shared_tokens(module: PackedVLM, rows: DataProto) -> Tensor:
    """``(B,)`` how many tokens of its prompt each row shares with the row before it."""
    attended, width = rows["attention_mask"], rows["response_mask"].shape[1]
    return torch.where(sharing(module, rows), attended[:, : attended.shape[1] - width].sum(1), 0)


def split_at_prompt(module: PackedVLM, rows: DataProto) -> list[tuple[RowMedia, RowMedia] | None]:
    """For each row the media of its prompt and those after it; ``None`` if a mapping of its media has both."""
    types = token_types(module, rows)
    prompt = types.shape[1] - rows["response_mask"].shape[1]
    later = (types[:, prompt:] != 0).any(1).tolist()
    return [
        module.family.split_media(media, types[row, :prompt], module.model.config) if later[row] else (media, ())
        for row, media in enumerate(media_of(rows))
    ]


def media_of(rows: DataProto) -> Sequence[RowMedia]:
    return rows["multi_modal_inputs"] if "multi_modal_inputs" in rows else [{} for _ in range(len(rows))]


def has_media(rows: DataProto) -> bool:
    return any(part for row in media_of(rows) for part in media_parts(row))


def token_types(module: PackedVLM, rows: DataProto) -> Tensor:
    """``(B, L)`` 0 text, 1 image, 2 video, 3 sound; of a batch without the column by the placeholder ids in the prompts."""
    if "mm_token_type_ids" in rows:
        return rows["mm_token_type_ids"]
    ids = rows["input_ids"]
    types = module.family.token_types(ids, module.model.config)
    types[:, ids.shape[1] - rows["response_mask"].shape[1] :] = 0
    return types


def index_on(index: slice | Tensor, device: torch.device) -> slice | Tensor:
    """An index of rows for tensors on ``device``."""
    return move(index, device) if isinstance(index, Tensor) else index


def rows_to_device(rows: DataProto, device: torch.device) -> DataProto:
    """A batch with its dense columns on ``device``; the others are shared with ``rows``."""
    if device.type == "cpu" or rows.batch is None:
        return rows.to(device)
    moved = rows[:]
    moved.batch = rows.batch.apply(lambda column: move(column, device), device=device)
    return moved
