"""`VLMFamily`: everything that is specific to one family of vision-language models.

A family is a subclass in a file of its own that overrides what differs; `dataproto.vlm.family_registry` finds it by model type.
Methods read Hugging Face configs and models by attribute, so importing a family imports no transformers. Submodules are used by
their paths alone, so a model may be wrapped or sharded as long as these paths exist.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dataproto.columns import RowMedia, media_parts
from dataproto.errors import MediaMismatch
from dataproto.transfer import move
from dataproto.vlm.costs import ForwardCosts
from dataproto.vlm.media import DistinctMedia, MediaSpans, distinct_media, place, split_media
from dataproto.vlm.media_layout import PATCH_GRIDS, MediaLayout
from dataproto.vlm.mrope import IMAGE, VIDEO, Pieces, extend_positions, mrope_positions, text_positions
from dataproto.vlm.placeholders import Ids, MediaTokens, enclose, expand_ids, frame_texts, split_videos

TensorPlan = tuple[tuple[str, str], ...]

DECODER_PLAN: TensorPlan = (
    ("model.language_model.layers.*.self_attn.q_proj", "colwise"),
    ("model.language_model.layers.*.self_attn.k_proj", "colwise"),
    ("model.language_model.layers.*.self_attn.v_proj", "colwise"),
    ("model.language_model.layers.*.self_attn.o_proj", "rowwise"),
    ("model.language_model.layers.*.mlp.gate_proj", "colwise"),
    ("model.language_model.layers.*.mlp.up_proj", "colwise"),
    ("model.language_model.layers.*.mlp.down_proj", "rowwise"),
    ("lm_head", "colwise"),
)
"""Tensor-parallel plan of a dense decoder. The vision tower is replicated."""

EXPERT_PLAN: TensorPlan = (
    ("model.language_model.layers.*.mlp.experts.gate_up_proj", "packed_colwise"),
    ("model.language_model.layers.*.mlp.experts.down_proj", "rowwise"),
)
"""Tensor-parallel plan of fused experts."""

_MEDIA_TOKENS = (
    "image",
    "video",
    *(f"{kind}_{end}" for kind in ("vision", "image", "video") for end in ("start", "end")),
)
"""``config.<name>_token_id``: placeholders and the tokens that enclose them. A config has some of them."""


class VLMFamily(ForwardCosts):
    """A family of vision-language models. The defaults are those that Qwen-VL and its relatives share.

    Families have no state: two instances of a class are equal, hash and pickle alike, and attributes cannot be set. To change a
    family, subclass it.

    Letters: B rows, L tokens (of prompts P, of responses R), T packed tokens, F media features, H hidden size.
    """

    model_type: str
    """``config.model_type`` of the checkpoints. ``model_type+text_model_type``: of those with this kind of language model."""
    published: tuple[str, ...] = ()
    """Names of published models of this type."""
    auto_model: str = "AutoModelForImageTextToText"
    """The class of transformers that loads the checkpoints; see `model_class`."""

    not_in_vllm: str = ""
    """Why vLLM cannot sample from these models as the policy does. Empty: it can."""

    # Module paths

    vision_tower: str | None = "model.visual"
    """``None``: the model reads text alone."""
    vision_blocks: str | None = "model.visual.blocks"
    """The list of the tower's repeated layers."""
    gated_tower: bool = False
    """The tower's MLP multiplies two products, of which an activation gates one."""
    mergers: tuple[str, ...] = ("model.visual.merger",)
    """Modules, inside or outside of the tower, that join patches into features."""
    language_model: str = "model.language_model"
    embedding: str = "model.language_model.embed_tokens"
    decoder_layers: str = "model.language_model.layers"
    final_norm: str = "model.language_model.norm"
    head: str = "lm_head"
    recurrent_mixers: str | None = None
    """Pattern of the modules that mix tokens by a recurrence instead of attention. ``None``: all layers have attention."""
    numbered_layers: bool = False
    """The decoder looks up what it hands to a layer, such as rotary angles, by the layer's number in the whole model."""
    float32_weights: tuple[str, ...] = ()
    """Patterns of parameters that stay in float32 where the model computes in a narrower dtype."""
    unused_weights: tuple[str, ...] = ()
    """Patterns of weights in checkpoints that the model does not load. An export keeps them as they were."""
    experts: str | None = None
    """Pattern of the modules that hold the fused weights ``(experts, ...)`` of a sparse layer. ``None``: all layers are dense."""
    router: str = "gate"
    """Name of the module beside the experts that chooses among them; it returns logits, and weights and numbers of the chosen."""
    tensor_plan: TensorPlan = DECODER_PLAN
    """Module or parameter patterns with their style: ``colwise``, ``rowwise`` or, for fused weights, ``packed_colwise``."""

    # Prompts

    media_layout: MediaLayout = PATCH_GRIDS
    """How images and videos are laid out in the arguments of the model's forward."""
    image_text: tuple[str, str] = ("", "")
    """Special tokens, as text, that the processor puts before and after the placeholders of an image. Empty if the chat template
    writes them.
    """
    processor_tokens: tuple[str, ...] = ()
    """Further special tokens, as text, that the processor writes around and between the parts of an image."""
    typed_content: bool = False
    """The chat template reads lists of parts alone: of content that is a string it would write nothing."""
    mrope: bool = True
    """Positions are ``(B, 4, L)``: text, time, height, width. If false, they are ``(B, L)``: ranks of tokens."""
    videos_by_frame: bool = False
    """In token ids a video is a sequence of frames, each with start and end tokens, after a text that states its time."""
    numbers_images: bool = False
    """The text around an image has its number in the prompt, see `numbered`."""
    frames_as_images: bool = False
    """A video's frames are images among the others, between the texts of `frame_captions`; no input is of videos alone."""

    def model_class(self) -> Any:
        """The class `auto_model`, whose ``from_pretrained`` loads a checkpoint and whose ``from_config`` makes a new model."""
        import transformers

        return getattr(transformers, self.auto_model)

    @property
    def vision_parts(self) -> tuple[str, ...]:
        """Module paths of all that turns media into features: tower and mergers. Empty without a tower."""
        return () if self.vision_tower is None else (self.vision_tower, *self.mergers)

    def expert_layers(self, model: Any) -> list[str]:
        """Names of the modules of `experts` in a model, in the order of the layers."""
        pattern = self.experts
        return [name for name, _ in model.named_modules() if pattern is not None and fnmatchcase(name, pattern)]

    def routers(self, model: Any) -> list[Any]:
        """The modules that choose among the experts of each of `expert_layers`."""
        return [model.get_submodule(f"{name.rpartition('.')[0]}.{self.router}") for name in self.expert_layers(model)]

    def expert_count(self, text: Any) -> int:
        """The experts that a router chooses among, by the config ``text`` of the language model."""
        return int(text.num_experts)

    def expert_weights(self, router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
        """The weights ``(S, k)`` that ``router`` gives to the experts ``chosen (S, k)`` int64, by its ``logits (S, E)``.

        By default shares of the softmax over all experts, scaled to a sum of 1 unless the router's config says otherwise.
        """
        shares = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
        if getattr(router, "norm_topk_prob", True):
            shares = shares / shares.sum(-1, keepdim=True)
        return shares.to(logits.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed: override {name!r} in a subclass")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"

    # Decoder

    def check_supported(self, config: Any) -> None:
        """Raises `InvalidConfig` for a model of this type that the family does not compute right. Default: none."""

    def check_stages(self, config: Any) -> None:
        """Raises `InvalidConfig` for a model whose layers cannot be split into pipeline stages. Default: none."""

    def mutual_images(self, config: Any) -> Literal["all", "windowed"] | None:
        """In which decoder layers, causal otherwise, each token of an image sees all tokens of the image: in all of them, or in
        those with a sliding window. Default: none.
        """
        return None

    def logit_cap(self, config: Any) -> float | None:
        """The soft cap c of logits z, which become ``c * tanh(z / c)``. Default: none."""
        return None

    # Tokens

    def media_tokens(self, config: Any) -> MediaTokens:
        """Ids of the placeholders and enclosing tokens that the config has."""
        return MediaTokens(
            image=config.image_token_id,
            video=getattr(config, "video_token_id", None),
            vision_start=getattr(config, "vision_start_token_id", None),
            vision_end=getattr(config, "vision_end_token_id", None),
        )

    def banned_ids(self, config: Any) -> tuple[int, ...]:
        """Ids that the policy never samples, ascending: a sampled placeholder has no image or video that belongs to it."""
        found = {getattr(config, f"{name}_token_id", None) for name in _MEDIA_TOKENS}
        return tuple(sorted(token for token in found if token is not None))

    def token_types(self, input_ids: Tensor, config: Any) -> Tensor:
        """Types int8 of the tokens of prompts, in their shape: 0 text, 1 image, 2 video."""
        tokens = self.media_tokens(config)
        types = torch.zeros_like(input_ids, dtype=torch.int8)
        for kind, token in ((IMAGE, tokens.image), (VIDEO, tokens.video)):
            if token is not None:
                types += (input_ids == token).to(torch.int8) * kind
        return types

    def merge_size(self, config: Any) -> int:
        """Patches along each side of a merged feature."""
        return self.media_layout.merge_size(config)

    def image_tokens(self, height: int, width: int, processor: Any, options: Mapping[str, Any], config: Any) -> int:
        """Number of placeholder tokens of an image of this size in pixels, if the image processor runs with ``options`` (see
        `MediaLayout.processor_options`). Raises `InvalidMedia` for a size that the processor refuses.
        """
        return self.media_layout.count_image_features(height, width, processor, options, config)

    def image_texts(self, media: Mapping[str, Any], config: Any) -> list[tuple[str, ...]]:
        """For each image of ``media`` (``multi_modal_inputs``) the texts that the processor puts before, between and after its
        n runs of placeholders: n + 1 texts. Default: `image_text` around one run.
        """
        return [self.image_text] * len(self.media_layout.feature_counts("image", media, config))

    def size_texts(self, height: int, width: int, processor: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
        """`image_texts` of an image of this size in pixels."""
        return self.image_text

    def run_counts(self, media: Mapping[str, Any], config: Any) -> Ids:
        """Number of placeholders of each run, of one image after another. Default: all runs of an image are equally long."""
        runs = np.array([len(texts) - 1 for texts in self.image_texts(media, config)], dtype=np.int64)
        return np.repeat(self.media_layout.feature_counts("image", media, config) // runs, runs)

    def numbered(self, texts: Sequence[str], number: int) -> tuple[str, ...]:
        """The `image_texts` of the image that is number ``number`` of its prompt, from 0. Default: the same for all."""
        return tuple(texts)

    def frame_captions(self, seconds: Sequence[float], duration: float) -> list[str]:
        """For a video of n frames at these times, n + 1 texts before, between and after its frames. Only called if
        `frames_as_images`.
        """
        raise NotImplementedError

    def image_placeholder(self, config: Any) -> int | None:
        """The token that the chat template writes for an image. Default: the one of `media_tokens`, which `expand` repeats."""
        return self.media_tokens(config).image

    def expand(
        self,
        ids: Sequence[int] | Ids,
        media: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        config: Any,
        *,
        encode_text: Callable[[str], Sequence[int]] | None = None,
        seconds: Sequence[Sequence[float]] | None = None,
        images_before: int = 0,
    ) -> tuple[Ids, np.ndarray[Any, np.dtype[np.int8]]]:
        """Replace the one placeholder of each medium by one placeholder per feature.

        Args:
            media: the row's ``multi_modal_inputs``, or a list with those of each image and video. Some families need the list,
                because the joined inputs do not tell where an image ends.
            encode_text: text to ids without added special tokens. Required by families with `image_text` or `videos_by_frame`.
            seconds: ``seconds[video][frame]``, see `frame_seconds`. Required for videos by families with `videos_by_frame`.
            images_before: number of images of the prompt before these ids, for families with `numbers_images`.

        Returns:
            Ids ``(P,)`` int64 and token types ``(P,)`` int8.

        Raises:
            MediaMismatch: placeholders and media do not agree, or a required argument is missing.
        """
        tokens, parts = self.media_tokens(config), [media] if isinstance(media, Mapping) else media
        expanded = np.asarray(ids, dtype=np.int64)
        images, videos = (self._counts(kind, parts, config) for kind in ("image", "video"))
        if self.videos_by_frame and len(videos):
            grids = np.concatenate([np.asarray(self.media_layout.grids("video", part, config)) for part in parts])
            expanded = split_videos(expanded, tokens, frame_texts(grids, encode_text, seconds))
            videos = np.repeat(videos // grids[:, 0], grids[:, 0])
        if any(self.image_text) and len(images) and tokens.image is not None:
            if encode_text is None:
                raise MediaMismatch("an image of this family needs `encode_text`: text around it is part of the prompt")
            texts = [image for part in parts for image in self.image_texts(part, config)]
            texts = [self.numbered(image, images_before + number) for number, image in enumerate(texts)]
            expanded = self.place_texts(expanded, texts, config, encode_text)
            images = np.concatenate([self.run_counts(part, config) for part in parts])
        return expand_ids(expanded, tokens, images, videos)

    def place_texts(
        self, ids: Ids, texts: Sequence[tuple[str, ...]], config: Any, encode_text: Callable[[str], Sequence[int]]
    ) -> Ids:
        """Prompt ids with the `image_texts` of each image in the place of its placeholder, and a placeholder between each two of
        them. Default: the texts are tokenized alone. Raises `MediaMismatch`.
        """
        placeholder = self.media_tokens(config).image
        assert placeholder is not None
        return enclose(ids, placeholder, [[encode_text(text) for text in image] for image in texts])

    def joined_tokens(self, ids: Sequence[int] | Ids, config: Any, encode_text: Callable[[str], Sequence[int]]) -> int:
        """How many tokens fewer `place_texts` makes of prompt ids than the prompt and the texts have alone. Default: 0."""
        return 0

    def _counts(self, kind: str, media: Sequence[Mapping[str, Any]], config: Any) -> Ids:
        counts = [self.media_layout.feature_counts(kind, part, config) for part in media]
        return np.concatenate([np.zeros(0, dtype=np.int64), *counts])

    # Positions

    def position_ids(
        self,
        token_types: Tensor,
        attention_mask: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        second_per_grid_ts: Tensor | Sequence[float] | None,
        config: Any,
    ) -> Tensor:
        """Positions int64 of ``token_types (B, L)``: ``(B, 4, L)`` (text, time, height, width) or ``(B, L)``. Padding has 0.

        Grids ``(N, 3)`` and the seconds between a video's time steps ``(M,)`` list the media of all rows in row order (see
        `media_grids`). Raises `MediaMismatch`.
        """
        if not self.mrope:
            return text_positions(attention_mask)
        images = videos = Pieces.none()
        if image_grid_thw is not None:
            images = Pieces.of_grids(image_grid_thw, self.merge_size(config))
        if video_grid_thw is not None:
            videos = self.video_pieces(video_grid_thw, second_per_grid_ts, config)
        return mrope_positions(token_types, attention_mask, images, videos)

    def video_pieces(self, grids: Tensor, seconds: Tensor | Sequence[float] | None, config: Any) -> Pieces:
        """The pieces of videos that get positions, from grids ``(M, 3)`` and the seconds between time steps ``(M,)``.

        Default: a video is one piece, and its time steps are one position apart.
        """
        return Pieces.of_grids(grids, self.merge_size(config))

    def extend_positions(self, position_ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
        """Positions ``(B, 4, R)`` or ``(B, R)`` of ``length`` generated tokens, from those of prompts ``(B, 4, P)`` or ``(B, P)``
        with mask ``(B, P)``.
        """
        return extend_positions(position_ids, attention_mask, length)

    # Media

    def distinct_media(self, rows: Sequence[RowMedia], config: Any) -> DistinctMedia:
        """The joined ``multi_modal_inputs`` of rows. Tensors that several rows share are included once."""
        return distinct_media(rows, self.media_layout, config)

    def feature_counts(self, row: RowMedia, config: Any) -> tuple[int, int]:
        """Number of features of a row's images and of its videos, from its ``multi_modal_inputs``."""
        layout, parts = self.media_layout, media_parts(row)
        images, videos = (
            sum(int(layout.feature_counts(kind, part, config).sum()) for part in parts) for kind in ("image", "video")
        )
        return images, videos

    def split_media(self, row: RowMedia, token_types: Tensor, config: Any) -> tuple[RowMedia, RowMedia] | None:
        """The media of a row's first tokens, of these types ``(n,)``, and its other media; ``None`` if a mapping has both."""
        counts = int((token_types == IMAGE).sum()), int((token_types == VIDEO).sum())
        return split_media(row, counts, lambda part: self.feature_counts(part, config))

    def grids(self, media: RowMedia, config: Any) -> Tensor:
        """Grids ``(N, 3)`` int64 of the patches that the tower reads, first of images, then of videos."""
        parts = media_parts(media) or ({},)
        return torch.cat([self.media_layout.grids(kind, p, config).cpu() for kind in ("image", "video") for p in parts])

    def dummy_media(self, config: Any) -> dict[str, Tensor]:
        """Inputs of the smallest image that the tower takes, all zero.

        Embedded with empty spans, they change no output and give every weight of the tower a gradient of zero. So a rank without
        media makes the same collective calls as the others.
        """
        return self.media_layout.smallest(config)

    # Forward

    def decoder_masks(
        self, model: Any, embeddings: Tensor, attention_mask: Tensor, token_types: Tensor, cache: Any = None
    ) -> Any:
        """What `decode` takes as ``attention_mask`` for padded rows of which ``embeddings (B, L, H)`` are the last L tokens.

        Args:
            attention_mask: ``(B, T)`` of all tokens, those in the cache included; token_types ``(B, T)`` too.
            cache: the ``past_key_values``, before these L tokens are added.

        Default: ``attention_mask``, by which every token sees those before it.
        """
        return attention_mask

    def features(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, levels, H)`` of images, then videos, with every level that `merge` needs."""
        output = self.tower_output(model, media, **vision_kwargs)
        return torch.stack([pooled(output), *map(pooled, self.deep_features(output))], dim=1)

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Any:
        """The output of vision tower and mergers for joined media: features ``(F, H)`` of images, then videos, or an object that
        has them as ``pooler_output``.

        Default: one call of the tower with ``pixel_values (patches, dim)`` and ``image_grid_thw (images, 3)``, and the same for
        videos. If grids are on the host, all that depends on them is computed there, so the host does not wait for the device.
        """
        tower = model.get_submodule(str(self.vision_tower))
        pixels = torch.cat([media[name] for name in ("pixel_values", "pixel_values_videos") if name in media])
        grids = torch.cat([media[name] for name in ("image_grid_thw", "video_grid_thw") if name in media])
        if grids.device != pixels.device:
            found = grid_arguments(tower, grids)
            moved = {name: move(x, pixels.device) if isinstance(x, Tensor) else x for name, x in found.items()}
            vision_kwargs = moved | vision_kwargs
        return tower(pixels, grid_thw=grids, **vision_kwargs)

    def deep_features(self, output: Any) -> Sequence[Any]:
        """Further levels ``(F, H)`` of features in the tower's output, for decoder layers. Default: none."""
        return ()

    def deep_layers(self, config: Any) -> int:
        """After how many of the first decoder layers a level of deep features is added. Default: 0."""
        return 0

    def extras(self, features: Tensor, shape: torch.Size, spans: MediaSpans) -> dict[str, Tensor]:
        """Keywords of the decoder for the levels of ``features (F, levels, H)`` after the first, for a sequence ``(B, L)`` of
        this shape. Default: none.
        """
        return {}

    def dense_extras(self, levels: Tensor) -> dict[str, Any]:
        """Keywords of a part of the decoder (a pipeline stage) for ``levels (D, L, H)``, which are added to all L tokens after
        its first D layers. Only called if `deep_layers` is above 0.
        """
        return {}

    def merge(
        self, model: Any, input_ids: Tensor, features: Tensor | None, spans: MediaSpans | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeddings ``(B, L, H)`` of ``input_ids (B, L)`` with ``features (F, levels, H)`` placed at ``spans``, and the
        `extras`.

        ``input_ids`` may be any part of a sequence; spans state which features belong to that part, and where.
        """
        embeddings: Tensor = model.get_submodule(self.embedding)(input_ids)
        if features is None and not spans:
            return embeddings, {}
        if features is None or spans is None:
            raise MediaMismatch("media without spans, or spans without media: both come from one `distinct_media`")
        return place(embeddings, features[:, 0], spans), self.extras(features, embeddings.shape[:-1], spans)

    def embed(
        self,
        model: Any,
        input_ids: Tensor,
        media: Mapping[str, Tensor],
        spans: MediaSpans | None = None,
        vision_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`features` and `merge`: embeddings ``(B, L, H)`` of ``input_ids (B, L)``, or packed ``(1, T)``, and the `extras`.

        ``media`` and ``spans`` come from `distinct_media` and `media_spans`; for text both are empty.
        """
        features = self.features(model, media, **(vision_kwargs or {})) if media else None
        return self.merge(model, input_ids, features, spans)

    def decode(
        self,
        model: Any,
        embeddings: Tensor,
        position_ids: Tensor,
        extras: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states ``(B, L, H)`` after the final norm, of ``embeddings (B, L, H)`` at ``position_ids (4, B, L)`` or
        ``(B, L)``.

        Keywords are passed to the language model. The cache is off unless ``past_key_values`` (filled in place) is given or
        ``use_cache`` is set: with a cache packed rows are wrong.
        """
        kwargs.setdefault("use_cache", kwargs.get("past_key_values") is not None)
        decoder = model.get_submodule(self.language_model)
        hidden: Tensor = decoder(
            inputs_embeds=embeddings, position_ids=position_ids, **(extras or {}), **kwargs
        ).last_hidden_state
        return hidden

    def lm_head(self, model: Any) -> Any:
        """The module whose weight ``(V, H)`` maps hidden states to logits."""
        return model.get_submodule(self.head)

    # Checkpoints

    def processor_files(self, config: Any) -> dict[str, dict[str, Any]]:
        """Files of a checkpoint by name, with their content as JSON, that Hugging Face's processor reads beside those of the
        tokenizer and the image processor. vLLM needs them to expand prompts. Default: none.
        """
        return {}

    def in_float32(self, name: str) -> bool:
        """Whether the parameter of this name is one of `float32_weights`."""
        return any(fnmatchcase(name, pattern) for pattern in self.float32_weights)

    def rollout_weight(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """A parameter under the name and in the layout of the family's checkpoints, which rollout engines load.

        Default: the model's own.
        """
        return name, weight

    def rollout_media(self, media: Mapping[str, Tensor], config: Any) -> Mapping[str, Tensor]:
        """The ``multi_modal_inputs`` of a row, under the names and in the shapes of vLLM's model. Default: the same."""
        return media


def pooled(output: Any) -> Tensor:
    """Merged features ``(F, H)`` of a tower's output: a tensor, or an object with ``pooler_output`` (joined or per medium)."""
    features = output.pooler_output if hasattr(output, "pooler_output") else output
    return features if isinstance(features, Tensor) else torch.cat(tuple(features))


def grid_arguments(tower: Any, grids: Tensor) -> dict[str, Any]:
    """Keywords of a Qwen-VL tower's forward that depend on grids ``(N, 3)`` alone, computed where the grids are.

    Positions of patches, bounds and longest length of frames and, if the tower has them, of windows, or interpolation of learned
    positions. The tower would compute them on its device and wait for it several times.
    """
    from transformers import vision_utils as hf

    merge = int(tower.spatial_merge_size)
    bounds = hf.get_vision_cu_seqlens(grids)
    found = {
        "position_ids": hf.get_vision_position_ids(grids, merge),
        "cu_seqlens": bounds,
        "max_seqlen": int(bounds.diff().max()),
    }
    if hasattr(tower, "window_size"):
        index, windows = hf.get_vision_window_index(grids, merge, tower.window_size, tower.patch_size)
        found |= {"window_index": index, "cu_window_seqlens": windows, "max_window_seqlen": int(windows.diff().max())}
    if hasattr(tower, "num_grid_per_side"):
        indices, weights = hf.get_vision_interpolation_indices_and_weights(
            grids, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
        found |= {"interp_indices": indices, "interp_weights": weights}
    return found
