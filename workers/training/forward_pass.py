"""From a batch of rows to packed forwards: checks, micro-batches, and the forward pass of one of them.

Ranks that share a model do everything in step: FSDP gathers weights layer by layer, so all of them run equally many
micro-batches, and in each the vision tower if one of them has media there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.columns import require
from dataproto.errors import InvalidColumn, MediaMismatch
from dataproto.packing import PackedRows, pack_rows, prompt_sharing, unpack_cells
from dataproto.vlm import MediaSpans, media_spans
from workers.model.packed_model import PackedVLM
from workers.ranks.mesh import Ranks
from workers.training.device_transfer import to_device
from workers.training.micro_batches import as_index, plan_rows

# (outputs, rows) -> per-token loss (B, R) and per-token metrics {name: (B, R)}; masking and averaging are the worker's.
# The outputs are `workers.model.packed_model.Outputs` of a policy, `workers.roles.critic.Values` of a critic.
LossFn = Callable[[Any, DataProto], tuple[Tensor, dict[str, Tensor]]]

LARGEST = "_max"  # how the names of metrics end of which the largest counts, over tokens, ranks and steps
NOTHING = slice(0, 0)
TRAINING_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass, and what other ranks need of it."""

    index: slice | Tensor  # which rows of the batch; none of them is an inert micro-batch's
    rows: DataProto  # at least one, of which an inert micro-batch wants no log-prob
    tower: bool  # some rank has media in its micro-batch of this number, so that all must run the vision tower

    @property
    def inert(self) -> bool:
        """Whether it is there only because other ranks have rows left."""
        return isinstance(self.index, slice) and self.index.start == self.index.stop


def micro_batches(
    data: DataProto, module: PackedVLM, token_budget: int, ranks: Ranks | None = None
) -> list[MicroBatch]:
    """Parts of at most ``token_budget`` packed tokens, a shared prompt counted once, as many on every rank.

    Rows without response tokens (`pad_inert`) are in none of them: nothing is wanted of those. Every rank calls it; a rank
    with fewer rows spreads them over as many parts and, if that is not enough, gets inert ones.
    """
    ranks = ranks or Ranks()
    wanted = data["response_mask"].bool().any(1)
    places = None if bool(wanted.all()) else wanted.nonzero().squeeze(1)
    chosen = data if places is None else data[places]
    plan = _plan(chosen, module, token_budget, ranks)
    if ranks.size("dp") > 1:
        plan = _by_media(chosen, plan)
    parts = [as_index(rows) for rows in plan]
    rows = [inert_rows(module) if part == NOTHING else chosen[part] for part in parts]
    indices = [part if places is None or part == NOTHING else places[part] for part in parts]
    tower = ranks.any_of([has_media(part) for part in rows], "dp")
    return [MicroBatch(*each) for each in zip(indices, rows, tower, strict=True)]


def _plan(data: DataProto, module: PackedVLM, token_budget: int, ranks: Ranks) -> list[np.ndarray]:
    attended, width = data["attention_mask"], data["response_mask"].shape[1]
    saved = torch.where(sharing(data), attended[:, : attended.shape[1] - width].sum(1), 0)
    whole = attended.sum(1)
    stages = ranks.size("pp")  # a pipeline takes as many micro-batches as it has, or a multiple
    if ranks.size("dp") == stages == 1 and int((whole - saved).sum()) <= token_budget:
        return [np.arange(len(data))] if len(data) else []
    costs = module.family.row_costs(module.model.config, whole, media_of(data), saved, data["response_mask"].sum(1))
    return plan_rows(
        whole - saved,
        saved,
        *costs,
        token_budget,
        agree=lambda count: -(-max(ranks.all_gather(count, "dp")) // stages) * stages,
    )


def _by_media(data: DataProto, plan: list[np.ndarray]) -> list[np.ndarray]:
    """The micro-batches with the most media first: ranks wait for each other in tower and decoder alike, each of which should
    be about as much work on all of them.
    """
    shared = sharing(data).tolist()
    sizes = [0 if behind else sum(map(len, row.values())) for behind, row in zip(shared, media_of(data), strict=True)]
    return sorted(plan, key=lambda rows: -sum(sizes[row] for row in rows))


def inert_rows(module: PackedVLM) -> DataProto:
    """One row of two text tokens, of which no log-prob is wanted."""
    ids, mask = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)
    types = ids.to(torch.int8)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": types,
            "position_ids": module.family.position_ids(types, mask, None, None, None, module.model.config),
            "response_mask": ids[:, :1],
        }
    )


def check_rows(data: DataProto, module: PackedVLM) -> None:
    """Refuses batches that the policy cannot have produced, and all that a forward pass would stop at: ranks agree on what this
    raises, before the first collective, and on nothing that a row's content raises later.

    Raises:
        MissingColumn: a column that training reads is absent.
        InvalidColumn: columns whose shapes do not belong together; a token that is none of the model's; a response token that
            the policy can never sample, that is not attended to, or that has no token before it; names row and position.
        MediaMismatch: a row's placeholder tokens and media disagree, as when a row was cut through an image, or its media is
            incomplete or of another shape than the model's; names the row.
    """
    require(data, *TRAINING_COLUMNS)
    check_shapes(data, module)
    check_attended(data)
    check_vocabulary(data, module.model.config.get_text_config().vocab_size)
    check_responses(data, module.banned_ids)
    check_media(data, module)


def check_shapes(data: DataProto, module: PackedVLM) -> None:
    rows, length = data["input_ids"].shape
    tokens, responses = (rows, length), (rows, min(data["response_mask"].shape[-1], length))
    positions = [(rows, 4, length), tokens] if module.family.mrope else [tokens]
    expected = {
        "attention_mask": [tokens],
        "position_ids": positions,
        "response_mask": [responses],
        "targets": [responses],
        "mm_token_type_ids": [tokens],
    }
    for name, shapes in expected.items():
        if name in data and tuple(data[name].shape) not in shapes:
            fitting = " or ".join(map(str, shapes))
            raise InvalidColumn(
                f"column {name!r}: expected {fitting} beside 'input_ids' {tokens}, found {tuple(data[name].shape)}"
            )


def check_attended(data: DataProto) -> None:
    """A log-prob is given the tokens before, so a response token stands behind one, and is attended to itself."""
    attended, wanted = data["attention_mask"].bool(), data["response_mask"].bool()
    behind = attended & (attended.cumsum(1) > 1)
    cells = (wanted & ~behind[:, attended.shape[1] - wanted.shape[1] :]).nonzero()
    if len(cells):
        row, column = cells[0].tolist()
        raise InvalidColumn(
            f"row {row}, response position {column}: response_mask is 1 on a token that is not attended to or has no token "
            "before it; set response_mask to 0 there"
        )


def check_vocabulary(data: DataProto, vocabulary: int) -> None:
    """A split vocabulary would take a token that nobody knows for one without an embedding, in silence."""
    seen = {"input_ids": "attention_mask", "targets": "response_mask"}
    for name, mask in seen.items():
        if name not in data:
            continue
        tokens = data[name]
        cells = (((tokens < 0) | (tokens >= vocabulary)) & data[mask].bool()).nonzero()
        if len(cells):
            row, column = cells[0].tolist()
            raise InvalidColumn(
                f"{name!r}, row {row}, position {column}: token {int(tokens[row, column])} is none of the model's {vocabulary}; "
                f"set {mask!r} to 0 where a token does not count"
            )


def check_responses(data: DataProto, banned_ids: Sequence[int]) -> None:
    width = data["response_mask"].shape[1]
    responses = data["targets"] if "targets" in data else data["input_ids"][:, data["input_ids"].shape[1] - width :]
    banned = torch.isin(responses, torch.tensor(banned_ids, dtype=responses.dtype, device=responses.device))
    cells = (banned & data["response_mask"].bool()).nonzero()
    if len(cells):
        row, column = cells[0].tolist()
        raise InvalidColumn(
            f"row {row}, response position {column}: token {int(responses[row, column])} is banned from sampling, so it has "
            "no log-prob under the policy; set response_mask to 0 there"
        )


def check_media(data: DataProto, module: PackedVLM) -> None:
    types = token_types(module, data) * data["attention_mask"]
    features: dict[tuple[int, ...], tuple[int, int]] = {}  # of media that many rows share, computed once
    expected = []
    for number, row in enumerate(media_of(data)):
        if not isinstance(row, Mapping):
            raise InvalidColumn(f"'multi_modal_inputs', row {number}: expected a dict, found a {type(row).__name__}")
        key = tuple(map(id, row.values()))
        if key not in features:
            features[key] = row_features(number, row, module)
        expected.append(features[key])
    found = torch.stack([(types == kind).sum(1) for kind in (1, 2)], dim=1)
    wrong = (found != torch.tensor(expected, dtype=torch.int64).view(-1, 2)).nonzero()
    if len(wrong):
        row_number, kind = wrong[0].tolist()
        raise MediaMismatch(
            f"row {row_number}: {int(found[row_number, kind])} {('image', 'video')[kind]} placeholder tokens, but its media "
            f"makes {expected[row_number][kind]} features; a prompt that was cut through its media cannot be used: leave "
            "overlong prompts out, as PromptBuilder does"
        )


def row_features(number: int, row: Mapping[str, Any], module: PackedVLM) -> tuple[int, int]:
    """Features of a row's images and of its videos, whose tensors are all there and of the shape that the tower takes."""
    if not row:
        return 0, 0
    layout, config = module.family.media_layout, module.model.config
    tail = next(x.shape[1:] for x in layout.smallest(config).values() if x.is_floating_point())
    for kind in ("image", "video"):
        names = layout.names(kind)
        given = [name for name in names if row.get(name) is not None]
        if not given:
            continue
        if missing := [name for name in names if name not in given]:
            raise MediaMismatch(f"row {number}: {', '.join(given)} without {', '.join(missing)}")
        for name in names:
            if not isinstance(row[name], Tensor):
                raise MediaMismatch(f"row {number}: {name!r} is a {type(row[name]).__name__}, not a tensor")
        pixels = row[names[0]]
        if not pixels.is_floating_point() or pixels.shape[1:] != tail:
            raise MediaMismatch(
                f"row {number}: {names[0]!r} is {pixels.dtype} {tuple(pixels.shape)}, but the model takes floating-point "
                f"numbers of shape (N, {', '.join(map(str, tail))})"
            )
    try:
        return module.family.feature_counts(row, config)
    except MediaMismatch as error:
        raise MediaMismatch(f"row {number}: {error}") from error


def forward_rows(
    module: PackedVLM,
    rows: DataProto,
    device: torch.device,
    entropy: bool = False,
    tower: bool = False,
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Packs the rows, encodes each distinct image once, and returns per-token ``module.outputs`` ``(B, R)`` on ``device``.

    Args:
        tower: run the vision tower even if the rows have no media, on a dummy that changes nothing.
        phase: times the parts ``prepare`` and ``forward``, see `Accounting.phase`.
    """
    with phase("prepare"):
        moved, media, places = to_forward(*prepare_rows(module, rows, tower), device)
    with phase("forward"):
        scores, entropies = module(moved, media, places, entropy)
    shape = tuple(rows["response_mask"].shape)
    return module.outputs(
        unpack_cells(scores, moved.response_cells, shape),
        None if entropies is None else unpack_cells(entropies, moved.response_cells, shape),
    )


def prepare_rows(
    module: PackedVLM, rows: DataProto, tower: bool = False
) -> tuple[PackedRows, dict[str, Tensor], MediaSpans]:
    """The rows packed, their distinct media, and where its features go; see `place_media`."""
    shared = sharing(rows)
    packed = pack(module, rows, shared)
    return packed, *place_media(module, rows, packed, shared, tower)


def pack(module: PackedVLM, rows: DataProto, shared: Tensor) -> PackedRows:
    """The rows packed; those ``shared (B,)`` have the prompt of the row before."""
    ids, mask, positions, responses = (rows[name] for name in TRAINING_COLUMNS)
    packed = pack_rows(ids, mask, positions, responses, token_types(module, rows), shared)
    if "targets" in rows:
        packed = replace(packed, targets=rows["targets"].flatten()[packed.response_cells])
    return packed


def place_media(
    module: PackedVLM, rows: DataProto, packed: PackedRows, shared: Tensor, tower: bool = False
) -> tuple[dict[str, Tensor], MediaSpans]:
    """The rows' distinct media, and where its features go. The media of a shared prompt stand with its first row.

    With ``tower`` rows without media get a dummy, which goes nowhere.
    """
    inputs = [{} if skip else row for row, skip in zip(media_of(rows), shared.tolist(), strict=True)]
    media = module.family.distinct_media(inputs, module.model.config)
    spans = media_spans(packed.token_types, media, packed.cu_seqlens)
    return media.inputs or (module.family.dummy_media(module.model.config) if tower else {}), spans


def to_forward(
    packed: PackedRows, media: dict[str, Tensor], spans: MediaSpans, device: torch.device
) -> tuple[PackedRows, Mapping[str, Tensor], MediaSpans]:
    """What a forward pass is given, where it is given it: tokens and pixels on ``device``."""
    moved = replace(packed, **to_device(vars(packed), device))
    # Grids and spans stay on the host, where bounds of images and windows, and ranks' parts, are told from them.
    pixels = {name: value for name, value in media.items() if value.is_floating_point()}
    # FSDP moves all tensors that lie in a plain dict.
    inputs = MappingProxyType(media | to_device(pixels, device))
    return moved, inputs, spans


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


def has_media(rows: DataProto) -> bool:
    return any(media_of(rows))


def token_types(module: PackedVLM, rows: DataProto) -> Tensor:
    """``(B, L)`` 0 text, 1 image, 2 video."""
    types: Tensor = rows["mm_token_type_ids"] if "mm_token_type_ids" in rows else infer_token_types(module, rows)
    return types


def infer_token_types(module: PackedVLM, rows: DataProto) -> Tensor:
    """Token types ``(B, L)`` from the placeholder ids in the prompt, for batches that come without ``mm_token_type_ids``."""
    ids = rows["input_ids"]
    types = module.family.token_types(ids, module.model.config)
    types[:, ids.shape[1] - rows["response_mask"].shape[1] :] = 0
    return types
