"""Prompts with videos, or of a family whose images vLLM takes processed (`VLMFamily.rollout_modality`).

vLLM gets tokens, pixels and positions from the training side. So it samples no frames, resizes nothing and expands no
placeholders, and both sides see the same frames at the same times.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataproto.errors import InvalidPrompt, MediaMismatch
from dataproto.vlm import family_of
from dataproto.vlm.family import VLMFamily
from dataproto.vlm.positions import IMAGE, VIDEO
from rollout.continuation import Media, shown_media
from rollout.engine import Request
from rollout.vllm.versions.running_engine import model_of

KINDS = {"image": IMAGE, "video": VIDEO}


class Span(NamedTuple):
    """The tokens of a prompt that belong to a medium: a run of tokens, of which some hold its features."""

    kind: str
    number: int  # among the media of its kind
    start: int
    holds: Tensor  # (length,) bool


def prepared_prompt(llm: Any, family: VLMFamily, request: Request) -> Any:
    """vLLM's form of a prompt whose media are processed already, with the request's own tokens.

    Raises:
        InvalidPrompt: vLLM's model takes no media of this kind or size, or the request has no processed media.
        MediaMismatch: tokens and media do not agree.
    """
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    config, processor = llm.model_config.hf_config, llm.renderer.get_mm_processor()
    media = joined(shown_media(request.multi_modal_inputs))
    spans = sorted(media_spans_of(family, request.token_types, media, config), key=lambda span: span.start)
    room = llm.llm_engine.input_processor.mm_encoder_cache_size
    check_taken(family, spans, processor.info.supported_mm_limits, room)
    dtype = llm.model_config.dtype
    inputs = {
        name: value.to(dtype) if name.startswith("pixel_values") else value
        for name, value in family.rollout_media(media, config).items()
    }
    items = MultiModalKwargsItems.from_hf_inputs(inputs, processor._get_mm_fields_config(inputs, {}))
    kwargs: dict[str, list[Any]] = {kind: list(items[kind]) for kind in items}
    keys = {kind: [item_key(item) for item in items[kind]] for kind in items}
    places: dict[str, list[Any]] = {kind: [] for kind in items}  # kinds as vLLM has them
    cache = llm.renderer.mm_processor_cache
    for own, number, start, holds in spans:  # in vLLM's order, since its two caches evict items by their last use
        kind = family.rollout_modality or own
        places[kind].append(PlaceholderRange(start, len(holds), None if bool(holds.all()) else holds))
        if cache is not None:
            kwargs[kind][number], _ = cache.get_and_update_item((kwargs[kind][number], []), keys[kind][number])
    return mm_input(request.input_ids.tolist(), MultiModalKwargsItems(kwargs), keys, places)


def check_taken(family: VLMFamily, spans: Sequence[Span], taken: Mapping[str, Any], room: int) -> None:
    """Raises `InvalidPrompt` for media that vLLM's model does not take, for one of more than ``room`` features, and for a prompt
    without processed media.
    """
    if not spans:
        raise InvalidPrompt("it has media but no pixels: the vLLM engine needs the column multi_modal_inputs")
    for span in spans:
        if (family.rollout_modality or span.kind) not in taken:
            raise InvalidPrompt(
                f"vLLM takes no {span.kind}s for models of type {family.model_type}: use the hf engine for such rows"
            )
        if (count := int(span.holds.sum())) > room:
            raise InvalidPrompt(
                f"{span.kind} {span.number} has {count} tokens, more than the {room} that vLLM's tower reads at a time: start "
                f"the engine with max_num_batched_tokens={count}"
            )


def joined(parts: Sequence[Media]) -> dict[str, Tensor]:
    """The media of all turns, one after another.

    >>> joined([{"image_grid_thw": torch.tensor([[1, 2, 2]])}, {"image_grid_thw": torch.tensor([[1, 2, 4]])}])
    {'image_grid_thw': tensor([[1, 2, 2],
            [1, 2, 4]])}
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([torch.as_tensor(part[name]) for part in parts if name in part]) for name in names}


def media_spans_of(family: VLMFamily, types: Tensor, media: Media, config: Any) -> Iterator[Span]:
    """The span of each image, then of each video, in a prompt with ``types (P,)``. Raises `MediaMismatch`."""
    for kind, code in KINDS.items():
        counts = family.media_layout.feature_counts(kind, media, config).tolist() if media else []
        places = (types == code).nonzero().squeeze(-1)
        if len(places) != sum(counts):
            raise MediaMismatch(
                f"the prompt has {len(places)} {kind} tokens, but its {len(counts)} {kind}s have {sum(counts)} features"
            )
        for number, own in enumerate(places.split(counts)):
            # vLLM's models look for the tokens that enclose a video's frames behind the start of its span.
            border = int(kind == "video" and family.videos_by_frame)
            start, stop = int(own[0]) - border, int(own[-1]) + 1 + border
            holds = torch.zeros(stop - start, dtype=torch.bool)
            holds[own - start] = True
            yield Span(kind, number, start, holds)


def item_key(item: Mapping[str, Any]) -> str:
    """Identifies a medium in vLLM's caches by all that vLLM gets of it."""
    digest = blake2b(digest_size=16)
    for name in sorted(item):
        value = torch.as_tensor(item[name].data).contiguous()
        digest.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return f"prepared-{digest.hexdigest()}"


def use_training_positions(worker: Any) -> None:
    """Gives prompts with videos the positions of the training side.

    vLLM multiplies a video's seconds in double precision, Hugging Face in single precision, and both round down: at some frame
    rates a time step would be one position earlier.
    """
    model, config = model_of(worker), worker.model_runner.model_config.hf_config
    own: Any = getattr(model, "get_mrope_input_positions", None)
    if own is None:
        return

    def positions(input_tokens: list[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        if all(feature.modality != "video" for feature in mm_features):
            found: tuple[Tensor, int] = own(input_tokens, mm_features)
            return found
        return training_positions(family_of(config), len(input_tokens), mm_features, config)

    model.get_mrope_input_positions = positions  # type: ignore[assignment]


def training_positions(family: VLMFamily, length: int, mm_features: Sequence[Any], config: Any) -> tuple[Tensor, int]:
    """Positions ``(3, P)`` int64 of a prompt with these media of vLLM's, and how far the next token's position is ahead of its
    number.
    """
    types = torch.zeros(1, length, dtype=torch.int8)
    grids: dict[str, list[Tensor]] = {}
    for feature in sorted(mm_features, key=lambda each: each.mm_position.offset):
        place, kind = feature.mm_position, feature.modality
        span = types[0, place.offset : place.offset + place.length]
        span[slice(None) if place.is_embed is None else place.is_embed] = KINDS[kind]
        for name in (f"{kind}_grid_thw", "second_per_grid_ts"):
            if name in feature.data:
                grids.setdefault(name, []).append(torch.as_tensor(feature.data[name].data))
    image, video, seconds = (
        torch.stack(grids[name]) if name in grids else None
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    )
    found = family.position_ids(types, torch.ones(1, length, dtype=torch.int64), image, video, seconds, config)[0, 1:]
    return found, int(found.max()) + 1 - length
