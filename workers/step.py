"""From a batch of rows to packed forwards: micro-batches, checks, accumulation."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.batching import PackedRows, pack_rows, prompt_sharing, split_by_tokens, unpack_cells
from dataproto.columns import require
from dataproto.errors import InvalidColumn
from dataproto.vlm import MediaSpans, media_spans
from workers.packed import Outputs, PackedVLM

# (outputs, rows) -> per-token loss (B, R) and per-token metrics {name: (B, R)}; masking and averaging are the worker's.
LossFn = Callable[[Outputs, DataProto], tuple[Tensor, dict[str, Tensor]]]

TRAINING_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")


def micro_batches(data: DataProto, token_budget: int) -> Iterator[DataProto]:
    """Contiguous parts of at most ``token_budget`` packed tokens, a shared prompt counted once."""
    if not len(data):
        return
    width = data["response_mask"].shape[1]
    attended = data["attention_mask"]
    prompts = attended[:, : attended.shape[1] - width].sum(1)
    saved = torch.where(sharing(data), prompts, 0)
    for part in split_by_tokens(attended.sum(1) - saved, token_budget, lead=saved):
        yield data[part]


def check_rows(data: DataProto, banned_ids: Sequence[int]) -> None:
    """Refuses batches that the policy cannot have produced.

    Raises:
        MissingColumn: a column that training reads is absent.
        InvalidColumn: a response token is one that the policy can never sample; names row, position and token.
    """
    require(data, *TRAINING_COLUMNS)
    width = data["response_mask"].shape[1]
    responses = data["input_ids"][:, data["input_ids"].shape[1] - width :]
    banned = torch.isin(responses, torch.tensor(banned_ids, dtype=responses.dtype, device=responses.device))
    cells = (banned & data["response_mask"].bool()).nonzero()
    if len(cells):
        row, column = cells[0].tolist()
        raise InvalidColumn(
            f"row {row}, response position {column}: token {int(responses[row, column])} is banned from sampling, so it has "
            "no log-prob under the policy; set response_mask to 0 there"
        )


def forward_rows(module: PackedVLM, rows: DataProto, device: torch.device, entropy: bool = False) -> Outputs:
    """Packs the rows, encodes each distinct image once, and returns per-token outputs ``(B, R)`` on ``device``."""
    packed, media, spans = prepare_rows(module, rows)
    log_probs, entropies = module(
        packed.to(device), {name: value.to(device) for name, value in media.items()}, spans.to(device), entropy
    )
    cells, shape = packed.response_cells.to(device), tuple(rows["response_mask"].shape)
    return Outputs(
        log_probs=unpack_cells(log_probs, cells, shape),
        entropy_or_none=None if entropies is None else unpack_cells(entropies, cells, shape),
    )


def prepare_rows(module: PackedVLM, rows: DataProto) -> tuple[PackedRows, dict[str, Tensor], MediaSpans]:
    """The rows packed, their distinct media, and where its features go. The media of a shared prompt stand with its first
    row.
    """
    shared = sharing(rows)
    types = rows["mm_token_type_ids"] if "mm_token_type_ids" in rows else infer_token_types(module, rows)
    packed = pack_rows(
        rows["input_ids"], rows["attention_mask"], rows["position_ids"], rows["response_mask"], types, shared
    )
    inputs = [{} if skip else row for row, skip in zip(media_of(rows), shared.tolist(), strict=True)]
    media = module.family.distinct_media(inputs, module.model.config)
    return packed, media.inputs, media_spans(packed.token_types, media, packed.cu_seqlens)


def sharing(rows: DataProto) -> Tensor:
    """``(B,)`` bool: rows with the prompt of the row before, see `prompt_sharing`."""
    ids = rows["input_ids"]
    types = rows["mm_token_type_ids"] if "mm_token_type_ids" in rows else torch.zeros_like(ids)
    width = rows["response_mask"].shape[1]
    return prompt_sharing(ids, rows["attention_mask"], rows["position_ids"], types, media_of(rows), width)


def media_of(rows: DataProto) -> Sequence[dict[str, Tensor]]:
    inputs: Sequence[dict[str, Tensor]] = (
        rows["multi_modal_inputs"] if "multi_modal_inputs" in rows else [{} for _ in range(len(rows))]
    )
    return inputs


def infer_token_types(module: PackedVLM, rows: DataProto) -> Tensor:
    """Token types ``(B, L)`` from the placeholder ids in the prompt, for batches that come without ``mm_token_type_ids``."""
    tokens = module.family.media_tokens(module.model.config)
    ids = rows["input_ids"]
    types = (ids == tokens.image).to(torch.int8) + 2 * (ids == tokens.video).to(torch.int8)
    types[:, ids.shape[1] - rows["response_mask"].shape[1] :] = 0
    return types
