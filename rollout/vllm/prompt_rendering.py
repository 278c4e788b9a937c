"""Requests to vLLM's form of prompts, checked before anything is generated.

Of prompts with videos or sounds, or of a family whose images vLLM takes processed (`VLMFamily.rollout_modality`), vLLM gets
tokens, pixels and positions from the training side. So it samples no frames, resizes nothing and expands no placeholders, and
both sides see the same frames at the same times.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn

from dataproto.errors import InvalidPrompt, MediaMismatch
from dataproto.vlm import family_of
from dataproto.vlm.family import VLMFamily
from dataproto.vlm.positions import IMAGE, TOKEN_TYPES
from rollout.continuation import Media, SubmittedRequest, common_length, joined_media, shown_media
from rollout.engine import Request, SamplingParams
from rollout.vllm.running_engine import error_line, model_of

R = TypeVar("R", bound=SubmittedRequest)


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

    config, processor = family.used_config(llm.model_config.hf_config), llm.renderer.get_mm_processor()
    media = joined_media(shown_media(request.multi_modal_inputs))
    spans = sorted(media_spans_of(family, request.token_types, media, config), key=lambda span: span.start)
    room = llm.llm_engine.input_processor.mm_encoder_cache_size
    check_taken(family, spans, processor.info.supported_mm_limits, room)
    dtype = llm.model_config.dtype
    inputs = {
        name: value.to(dtype) if value.is_floating_point() and name != "second_per_grid_ts" else value
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


def media_spans_of(family: VLMFamily, types: Tensor, media: Media, config: Any) -> Iterator[Span]:
    """The span of each image, then of each video and sound, in a prompt with ``types (P,)``. Raises `MediaMismatch`."""
    for kind, code in TOKEN_TYPES.items():
        counts = family.media_layout.feature_counts(kind, media, config).tolist() if media else []
        places = (types == code).nonzero().squeeze(-1)
        if len(places) != sum(counts):
            raise MediaMismatch(
                f"the prompt has {len(places)} {kind} tokens, but its {len(counts)} {kind}s have {sum(counts)} features"
            )
        for number, own in enumerate(places.split(counts)):
            # vLLM's models look for the tokens that enclose a video's frames after the start of its span.
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
    """Gives prompts with videos or sounds the positions of the training side.

    vLLM multiplies a video's seconds in double precision, Hugging Face in single precision, and both round down: at some frame
    rates a time step would be one position earlier.
    """
    model, config = model_of(worker), worker.model_runner.model_config.hf_config
    own: Any = getattr(model, "get_mrope_input_positions", None)
    if own is None:
        return

    def positions(input_tokens: list[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        if all(feature.modality == "image" for feature in mm_features):
            return own(input_tokens, mm_features)
        family = family_of(config)
        return training_positions(family, len(input_tokens), mm_features, family.used_config(config))

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
        span[slice(None) if place.is_embed is None else place.is_embed] = TOKEN_TYPES[kind]
        for name in (f"{kind}_grid_thw", "second_per_grid_ts"):
            if name in feature.data:
                grids.setdefault(name, []).append(torch.as_tensor(feature.data[name].data))
    image, video, seconds = (
        torch.stack(grids[name]) if name in grids else None
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    )
    found = family.position_ids(types, torch.ones(1, length, dtype=torch.int64), image, video, seconds, config)[0, 1:]
    return found, int(found.max()) + 1 - length


MAX_REPORTED_ROWS = 5
FIRST_STEP_SHARE = 8  # the first step of a run waits for an eighth of a step's tokens
SHARED_TOKENS = 16  # that vLLM reads at least of a prompt whose blocks it has


@dataclass(frozen=True)
class PromptRenderer:
    """Renders prompts with the renderer of a ``vllm.LLM``, under the engine's limits."""

    llm: Any
    family: VLMFamily
    max_images: int | None
    processor_options: Mapping[str, Any]
    longest_image: int | None = None
    """Tokens of an image above which vLLM computes causal attention within it, unlike the model. ``None``: no limit."""
    last: list[tuple[Request, Any]] = field(default_factory=list)
    """The request that was rendered last, for the next samples of its prompt, and vLLM's form. At most one."""

    def render(self, request: Request, sampling: SamplingParams, name: str) -> Any:
        """vLLM's form of a prompt. ``name`` of the request is for messages.

        Raises:
            InvalidPrompt: the prompt cannot be used; names it.
        """
        return for_each_prompt([(name, request)], lambda each: self.render_one(each, sampling))[request.prompt_key]

    def check(self, request: Request, sampling: SamplingParams) -> None:
        """Raises `InvalidPrompt` for a prompt that can be refused before it is rendered."""
        media = request.multi_modal_data
        images = list(media.get("image", ()))
        length = len(request.input_ids)
        if length + sampling.max_tokens > (most := int(self.llm.model_config.max_model_len)):
            raise InvalidPrompt(
                f"{length} prompt tokens and max_tokens={sampling.max_tokens} exceed max_model_len={most}"
            )
        if self.max_images is not None and len(images) > self.max_images:
            raise InvalidPrompt(f"{len(images)} images exceed max_images={self.max_images}")
        found = longest_run(request.token_types) if images and self.longest_image is not None else 0
        if self.longest_image is not None and found > self.longest_image:
            raise InvalidPrompt(
                f"an image of {found} tokens, of more than {self.longest_image}: vLLM computes causal attention within it, and "
                "the actor does not: use the hf engine, or smaller images if the model takes several sizes (max_pixels)"
            )
        if request.multi_modal_inputs and not any(media.values()):
            raise InvalidPrompt("it has pixels but no images: the vLLM engine needs the column multi_modal_data")

    def render_one(self, request: Request, sampling: SamplingParams) -> Any:
        """vLLM's form of one prompt."""
        self.check(request, sampling)
        if self.last and self.last[0][0].prompt_key == request.prompt_key:
            return self.last[0][1]
        media = request.multi_modal_data
        if media.get("video") or media.get("audio") or (media.get("image") and self.family.rollout_modality):
            rendered = prepared_prompt(self.llm, self.family, request)
        else:
            rendered = self._expanded(request, list(media.get("image", ())))
        self.last[:] = [(request, rendered)]
        return rendered

    def _expanded(self, request: Request, images: Sequence[Image.Image]) -> Any:
        """vLLM's form of a prompt whose placeholders vLLM expands and whose images it processes."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids) or request.input_ids.tolist()}
        if images:
            prompt["multi_modal_data"] = {"image": images}
            known = len(request.image_keys) == len(images)
            keys = [key.hex() for key in request.image_keys] if known else list(map(image_key, images))
            prompt["multi_modal_uuids"] = {"image": keys}
            prompt["mm_processor_kwargs"] = self.processor_options
        (rendered,) = self.llm.renderer.render_cmpl([prompt])
        check_expansion(rendered["prompt_token_ids"], request.input_ids)
        return rendered


def for_each_prompt(named: Iterable[tuple[str, Request]], do: Callable[[Request], Any]) -> dict[Hashable, Any]:
    """What ``do`` returns for each distinct prompt, by its `Request.prompt_key`. Names are for messages.

    Raises:
        InvalidPrompt: ``do`` raised for some prompts; names them.
    """
    found: dict[Hashable, Any] = {}
    errors: list[str] = []
    for name, request in named:
        if request.prompt_key in found:
            continue
        try:
            found[request.prompt_key] = do(request)
        except MemoryError:
            raise
        except Exception as error:  # vLLM and image processors raise errors of any class
            found[request.prompt_key] = None
            errors.append(f"{name}: {error_line(error)}")
    if errors:
        more = f" (and {len(errors) - MAX_REPORTED_ROWS} more rows)" if len(errors) > MAX_REPORTED_ROWS else ""
        raise InvalidPrompt("; ".join(errors[:MAX_REPORTED_ROWS]) + more)
    return found


class RenderedAhead(Generic[R]):
    """The prompts of a run, rendered one after another in a thread, while vLLM reads and decodes earlier ones."""

    def __init__(self, renderer: PromptRenderer, rows: Sequence[R], sampling: SamplingParams, step_tokens: int) -> None:
        """Begins to render. ``rows`` are in the order in which vLLM gets them, which reads ``step_tokens`` in a step."""
        self.rows, self._step_tokens = rows, step_tokens
        self._pool = ThreadPoolExecutor(1, "rendering")
        own = replace(renderer, last=[])
        distinct = {row.request.prompt_key: row.request for row in reversed(rows)}
        self._found = {key: self._pool.submit(own.render_one, distinct[key], sampling) for key in reversed(distinct)}
        self._steps = self._tokens = 0
        self._known: set[Hashable] = set()  # keys of the prompts among the first requests
        self.taken = 0  # requests

    def due(self) -> int:
        """The number of requests that vLLM needs before its next step: so many tokens of prompts that the step, and the one after
        it, are full. The first steps are shorter, so that the device does not wait until many prompts are rendered. It depends on
        nothing but the prompts, so that all ranks of an engine make the same steps.
        """
        self._steps += 1
        count, wanted = self.taken, prompt_tokens_of(self._steps, self._step_tokens)
        while count < len(self.rows) and self._tokens < wanted:
            request = self.rows[count].request
            self._tokens += SHARED_TOKENS if request.prompt_key in self._known else len(request.input_ids)
            self._known.add(request.prompt_key)
            count += 1
        return count - self.taken

    def next_prompt(self) -> Any:
        """Waits for the prompt of the next request.

        Raises:
            InvalidPrompt: prompts cannot be used; names them all.
        """
        request = self.rows[self.taken].request
        self.taken += 1
        try:
            return self._found[request.prompt_key].result()
        except MemoryError:
            raise
        except Exception:
            named = ((row.name, row.request) for row in self.rows)
            for_each_prompt(named, lambda each: self._found[each.prompt_key].result())
            raise

    @property
    def left(self) -> int:
        """The number of requests that vLLM has not got."""
        return len(self.rows) - self.taken

    def close(self) -> None:
        """Ends the thread; prompts that it has not begun are not rendered."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def prompt_tokens_of(steps: int, step_tokens: int) -> int:
    """Tokens of prompts, at least one, that vLLM, which reads ``step_tokens`` in a step, needs before its step number ``steps``,
    counted from 1.

    >>> [prompt_tokens_of(steps, 800) for steps in range(1, 10)]
    [100, 200, 400, 800, 1600, 3200, 6400, 7200, 8000]
    """
    return max(1, min((steps + 1) * step_tokens, (step_tokens << min(steps, 20)) // (2 * FIRST_STEP_SHARE)))


def image_key(image: Image.Image) -> str:
    """A digest of an image's current content, by which vLLM's caches identify it.

    >>> white, same = Image.new("RGB", (2, 2), "white"), Image.new("RGB", (2, 2), "white")
    >>> key = image_key(white)
    >>> white.putpixel((0, 0), (0, 0, 0))
    >>> image_key(same) == key, image_key(white) == key
    (True, False)
    """
    pixels = image.convert("RGBA") if image.mode in ("P", "PA") else image  # palette indices do not define the colours
    digest = blake2b(f"{image.mode}{image.size}".encode(), digest_size=16)
    digest.update(pixels.tobytes())
    return digest.hexdigest()


def check_expansion(engine_ids: Sequence[int], input_ids: Tensor) -> None:
    """Raises `MediaMismatch` if vLLM's tokens of a prompt differ from those of the training side.

    >>> import torch
    >>> check_expansion([1, 7, 7], torch.tensor([1, 7, 7, 7]))
    Traceback (most recent call last):
    ...
    dataproto.errors.MediaMismatch: vLLM expands the prompt to 3 tokens, the training side to 4; they differ from token 3 on
    """
    ours = input_ids.tolist()
    if list(engine_ids) != ours:
        first = common_length(engine_ids, ours)
        raise MediaMismatch(
            f"vLLM expands the prompt to {len(engine_ids)} tokens, the training side to {len(ours)}; they differ from token "
            f"{first} on"
        )


# Images whose tokens see each other: vLLM's attention is causal within the longest ones, and on a CPU within all


def longest_image(worker: Any) -> int | None:
    """The number of tokens of an image above which a worker's model computes causal attention within it, ``None`` without limit.

    vLLM skips images that are longer than the sliding window, except in models that keep the window within images.
    """
    text: Any = worker.model_runner.model_config.hf_text_config
    model: nn.Module = model_of(worker)
    if any(getattr(each, "mm_prefix_clamp_sliding_window", False) for each in (model, text)):
        return None
    window = getattr(text, "sliding_window", None)
    return None if window is None else int(window)


def limit_of_images(llm: Any, family: VLMFamily, device: torch.device) -> int | None:
    """The number of tokens that an image may have in a running ``vllm.LLM``, ``None`` without limit; none on a CPU."""
    if family.mutual_images(llm.model_config.hf_config) is None:
        return None
    if device.type == "cpu":
        return 0
    (limit,) = set(llm.collective_rpc(longest_image))
    return limit


def longest_run(token_types: Tensor) -> int:
    """The number of tokens of the longest image among those of a prompt, of which no two are side by side.

    >>> longest_run(torch.tensor([0, 1, 1, 0, 1, 1, 1]))
    3
    """
    ends = (token_types != IMAGE).nonzero().squeeze(1)
    bounds = torch.cat([ends.new_tensor([-1]), ends, ends.new_tensor([len(token_types)])])
    return int(bounds.diff().max()) - 1
