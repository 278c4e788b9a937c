"""Everything that is special to one vision-language model, as one value, and the registry of those values.

A family is data plus a few pure functions; its methods take Hugging Face configs and models by their attributes alone,
so nothing here imports transformers. A new family is a file with such a value and a line in `_FAMILIES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import MediaMismatch, UnknownModel
from dataproto.vlm.costs import grid_sums
from dataproto.vlm.flops import Flops, grids_of, language_flops, logit_flops
from dataproto.vlm.forward import feature_levels, place, tower_output
from dataproto.vlm.media import DistinctMedia, MediaSpans, distinct_media
from dataproto.vlm.media_layout import PATCH_GRIDS, Pictures
from dataproto.vlm.mrope import IMAGE, VIDEO, Pieces, extend_positions, mrope_positions, text_positions
from dataproto.vlm.placeholders import Ids, MediaTokens, enclose, expand_ids, split_videos

_FAMILIES = {
    "qwen2_vl": "dataproto.vlm.qwen2_vl:QWEN2_VL",
    "qwen2_5_vl": "dataproto.vlm.qwen2_5_vl:QWEN2_5_VL",
    "qwen3_vl": "dataproto.vlm.qwen3_vl:QWEN3_VL",
    "qwen3_vl_moe": "dataproto.vlm.qwen3_vl:QWEN3_VL_MOE",
    "internvl": "dataproto.vlm.internvl:INTERNVL",
    "glm4v": "dataproto.vlm.glm4v:GLM4V",
}
"""``config.model_type`` to import path; the file is loaded when first asked for."""

_MEDIA_TOKENS = (
    "image",
    "video",
    *(f"{kind}_{end}" for kind in ("vision", "image", "video") for end in ("start", "end")),
)
"""``config.<name>_token_id``, as far as a config has them: placeholders and what encloses them."""

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
"""Tensor-parallel plan of a dense decoder; the vision tower is replicated."""

RenameWeight = Callable[[str, Tensor], tuple[str, Tensor]]

TowerOutput = Callable[..., Any]
"""``(family, model, media, **vision_kwargs) -> output``, see `VLMFamily.tower_output`."""


def same_weight(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Checkpoints hold the weight under the model's own name."""
    return name, weight


def visual_output(family: "VLMFamily", model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Any:
    """One module takes patches and grids, and merges."""
    return tower_output(model.get_submodule(family.vision_tower), media, **vision_kwargs)


def no_deep_features(output: Any) -> Sequence[Any]:
    """The tower makes one level of features."""
    return ()


def no_extras(features: Tensor, shape: torch.Size, spans: MediaSpans) -> dict[str, Tensor]:
    """The decoder needs nothing of the tower but what is placed among the embeddings."""
    return {}


def no_deep_layers(config: Any) -> int:
    """The decoder layers add nothing."""
    return 0


def no_dense_extras(levels: Tensor) -> dict[str, Any]:
    """There are no deep features that a decoder could need."""
    return {}


def whole_videos(grids: Tensor, seconds: Tensor | Sequence[float] | None, config: Any) -> Pieces:
    """A video is one piece; its time steps are one position apart."""
    return Pieces.of_grids(grids, config.vision_config.spatial_merge_size)


@dataclass(frozen=True)
class VLMFamily:
    """One family of vision-language models. Letters: B rows, L (prompt: P) tokens, T packed tokens, R response, H
    hidden.
    """

    model_type: str
    """``config.model_type`` of its checkpoints."""
    vision_flops: Callable[[Any, Tensor], Tensor]
    """Operations ``(N, 2)`` of the tower's linear layers and attention from the config and grids ``(N, 3)``."""
    layer_weights: Callable[[Any, int], int]
    """Weights that one token meets in the linear layers of decoder layer i, from the text config."""
    pictures: Pictures = PATCH_GRIDS
    """How images and videos lie in the model's inputs."""
    image_text: tuple[str, str] = ("", "")
    """Text, of special tokens, that the processor puts before and behind an image's placeholders; empty where the chat
    template writes it.
    """
    mrope: bool = True
    """Positions are ``(B, 4, L)``: text, time, height, width. Without, they are ranks ``(B, L)``."""
    videos: Callable[[Tensor, Tensor | Sequence[float] | None, Any], Pieces] = whole_videos
    """Video grids ``(M, 3)``, seconds per time step and config to the pieces that positions are given to."""
    videos_by_frame: bool = False
    """In ids, a video is a sequence of frames, each with its own start and end tokens after a text that tells its time.
    """
    tower_output: TowerOutput = visual_output
    """The output of vision tower and mergers for joined media: features, or an object that holds them."""
    deep_features: Callable[[Any], Sequence[Any]] = no_deep_features
    """Further levels ``(F, H)`` in the tower's output, besides the features that take the placeholders' places."""
    extras: Callable[[Tensor, torch.Size, MediaSpans], dict[str, Tensor]] = no_extras
    """What the decoder needs of features ``(F, levels, H)`` besides the first level, for a sequence of this shape."""
    deep_layers: Callable[[Any], int] = no_deep_layers
    """From the config, behind how many of the first decoder layers a level of deep features is added."""
    dense_extras: Callable[[Tensor], dict[str, Any]] = no_dense_extras
    """What a decoder that begins at some layer needs of ``(D, L, H)``, what is added behind its first D layers to each of the
    L tokens: `extras` for a part of the layers (`deep_layers` above 0 only).
    """
    rollout_weight: RenameWeight = same_weight
    """A parameter under the name, and in the layout, of the family's checkpoints, which engines load."""
    tensor_plan: TensorPlan = DECODER_PLAN
    """Module or parameter patterns, each with ``colwise``, ``rowwise`` or, for fused weights, ``packed_colwise``."""
    vision_tower: str = "model.visual"
    vision_blocks: str = "model.visual.blocks"
    mergers: tuple[str, ...] = ("model.visual.merger",)
    language_model: str = "model.language_model"
    embedding: str = "model.language_model.embed_tokens"
    decoder_layers: str = "model.language_model.layers"
    final_norm: str = "model.language_model.norm"
    head: str = "lm_head"
    experts: str | None = None
    """Pattern of the modules that hold the fused weights ``(experts, ...)`` of a sparse layer; ``None``: all are dense."""

    # Tokens

    def media_tokens(self, config: Any) -> MediaTokens:
        """Ids of the placeholder and enclosing tokens that the config knows."""
        return MediaTokens(
            image=config.image_token_id,
            video=getattr(config, "video_token_id", None),
            vision_start=getattr(config, "vision_start_token_id", None),
            vision_end=getattr(config, "vision_end_token_id", None),
        )

    def banned_ids(self, config: Any) -> tuple[int, ...]:
        """Ids the policy may never sample, ascending: a sampled placeholder would stand for media that do not exist."""
        found = {getattr(config, f"{name}_token_id", None) for name in _MEDIA_TOKENS}
        return tuple(sorted(token for token in found if token is not None))

    def token_types(self, input_ids: Tensor, config: Any) -> Tensor:
        """Types int8 of the tokens of prompts: 0 text, 1 image, 2 video."""
        tokens = self.media_tokens(config)
        types = (input_ids == tokens.image).to(torch.int8) * IMAGE
        return types if tokens.video is None else types + (input_ids == tokens.video).to(torch.int8) * VIDEO

    def merge_size(self, config: Any) -> int:
        """Patches along each side of a merged feature."""
        return self.pictures.merge_size(config)

    def image_tokens(self, height: int, width: int, processor: Any, options: Mapping[str, Any], config: Any) -> int:
        """Placeholder tokens of an image of this size in pixels, as the image processor would make them under
        ``options`` (``pictures.options``). `InvalidMedia` if absurd.
        """
        return self.pictures.image_features(height, width, processor, options, config)

    def expand(
        self,
        ids: Sequence[int] | Ids,
        media: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        config: Any,
        *,
        encode_text: Callable[[str], Sequence[int]] | None = None,
        seconds: Sequence[Sequence[float]] | None = None,
    ) -> tuple[Ids, np.ndarray[Any, np.dtype[np.int8]]]:
        """Expand ids with one placeholder a medium to one a feature: ids ``(P,)`` int64, token types ``(P,)`` int8.

        ``media`` is a row's ``multi_modal_inputs``, or those of each of its images and videos, which families need whose
        joined inputs do not tell one image from the next. Families that put text around images, or tell each frame's time
        in text, need ``encode_text`` (text to ids, no special tokens added), for video with ``seconds[video][frame]`` (see
        `frame_seconds`). Raises `MediaMismatch` where placeholders and media disagree.
        """
        tokens, parts = self.media_tokens(config), [media] if isinstance(media, Mapping) else media
        expanded = np.asarray(ids, dtype=np.int64)
        images, videos = (self._features(kind, parts, config) for kind in ("image", "video"))
        if self.videos_by_frame and len(videos):
            grids = np.concatenate([np.asarray(self.pictures.grids("video", part, config)) for part in parts])
            expanded = split_videos(expanded, tokens, _frame_texts(grids, encode_text, seconds))
            videos = np.repeat(videos // grids[:, 0], grids[:, 0])
        if any(self.image_text) and len(images):
            if encode_text is None:
                raise MediaMismatch("an image of this family needs `encode_text`: text around it is part of the prompt")
            expanded = enclose(expanded, tokens.image, *map(encode_text, self.image_text))
        return expand_ids(expanded, tokens, images, videos)

    def _features(self, kind: str, media: Sequence[Mapping[str, Any]], config: Any) -> Ids:
        counts = [self.pictures.features(kind, part, config) for part in media]
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
        """Positions ``(B, 4, L)`` int64 (text, time, height, width), or ``(B, L)``, of ``token_types (B, L)``; padding has
        0.

        Grids ``(N, 3)`` and the seconds between a video's time steps ``(M,)`` list the media of all rows in row order
        (`media_grids`). Raises `MediaMismatch`.
        """
        if not self.mrope:
            return text_positions(attention_mask)
        images = videos = Pieces.none()
        if image_grid_thw is not None:
            images = Pieces.of_grids(image_grid_thw, self.merge_size(config))
        if video_grid_thw is not None:
            videos = self.videos(video_grid_thw, second_per_grid_ts, config)
        return mrope_positions(token_types, attention_mask, images, videos)

    def extend_positions(self, position_ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
        """Positions ``(B, 4, R)`` or ``(B, R)`` of generated text after prompts ``(B, 4, P)`` or ``(B, P)`` with mask
        ``(B, P)``.
        """
        return extend_positions(position_ids, attention_mask, length)

    # Forward

    def distinct_media(self, rows: Sequence[Mapping[str, Any]], config: Any) -> DistinctMedia:
        """The rows' ``multi_modal_inputs`` joined, tensors shared by several rows once."""
        return distinct_media(rows, self.pictures, config)

    def feature_counts(self, row: Mapping[str, Any], config: Any) -> tuple[int, int]:
        """Features of a row's images and of its videos, from its ``multi_modal_inputs``."""
        images, videos = (int(self.pictures.features(kind, row, config).sum()) for kind in ("image", "video"))
        return images, videos

    def grids(self, media: Mapping[str, Any], config: Any) -> Tensor:
        """Grids ``(N, 3)`` int64 of patches that the tower sees, of images and then videos."""
        return torch.cat([self.pictures.grids(kind, media, config).cpu() for kind in ("image", "video")])

    def features(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, levels, H)`` of images and then videos, every level that `merge` needs."""
        output = self.tower_output(self, model, media, **vision_kwargs)
        return feature_levels(output, self.deep_features(output))

    def merge(
        self, model: Any, input_ids: Tensor, features: Tensor | None, spans: MediaSpans | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeddings ``(B, L, H)`` of ``input_ids (B, L)`` with ``features (F, levels, H)`` placed at ``spans``, and what
        else `decode` needs of them.

        ``input_ids`` may be any part of a sequence: spans say which features stand in that part, and where.
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
        """Embeddings ``(B, L, H)`` of ``input_ids (B, L)``, or packed ``(1, T)``, with media features at their places,
        and what the decoder needs besides. ``media`` and ``spans`` come from `distinct_media` and `media_spans`; both
        empty for text.
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
        """Hidden states ``(B, L, H)`` after the final norm, of ``embeddings (B, L, H)`` at ``position_ids (4, B, L)``.

        Keywords go to the language model. The cache is off unless ``past_key_values`` (which is filled in place) or
        ``use_cache`` says otherwise: packed rows are wrong with it.
        """
        kwargs.setdefault("use_cache", kwargs.get("past_key_values") is not None)
        decoder = model.get_submodule(self.language_model)
        hidden: Tensor = decoder(
            inputs_embeds=embeddings, position_ids=position_ids, **(extras or {}), **kwargs
        ).last_hidden_state
        return hidden

    def lm_head(self, model: Any) -> Any:
        """The module whose weight ``(V, H)`` turns hidden states into logits."""
        return model.get_submodule(self.head)

    def dummy_media(self, config: Any) -> dict[str, Tensor]:
        """The smallest image a tower takes, all zero. Embedded with empty spans it changes nothing and gives every weight of
        the tower a gradient of zero, so that a rank without media makes the same collective calls as the others.
        """
        return self.pictures.smallest(config)

    # Engine and cost

    def flops(
        self,
        config: Any,
        lengths: Tensor | Sequence[int],
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        logit_tokens: int | None = None,
    ) -> Flops:
        """Operations of a forward pass over rows of ``lengths (B,)`` attended tokens and over media, each grid counted
        once.

        ``logit_tokens``: how many tokens' logits are computed, all unless given.
        """
        rows = torch.as_tensor(lengths).long()
        logits = int(rows.sum()) if logit_tokens is None else logit_tokens
        vision = self.vision_flops(config, grids_of(image_grid_thw, video_grid_thw)).sum(0).tolist()
        language = self._language_flops(config.text_config, rows).sum(0).tolist()
        return Flops(vision[0], vision[1], language[0], language[1], logits * logit_flops(config.text_config))

    def row_flops(
        self,
        config: Any,
        lengths: Tensor | Sequence[int],
        media: Sequence[Mapping[str, Any]] | None = None,
        logit_tokens: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Operations ``(B,)`` int64 of a forward pass by row: their sum is ``flops(...).total``.

        ``media``: the rows' ``multi_modal_inputs``, none unless given. ``logit_tokens (B,)``: as in `flops`, of each row.
        """
        text, rows = config.text_config, torch.as_tensor(lengths).long()
        logits = rows if logit_tokens is None else torch.as_tensor(logit_tokens).long()
        language = self._language_flops(text, rows).sum(1) + logits * logit_flops(text)
        if media is None:
            return language
        vision = grid_sums(
            media, lambda row: self.grids(row, config), lambda grids: self.vision_flops(config, grids).sum(1)
        )
        return language + vision

    def _language_flops(self, text: Any, lengths: Tensor) -> Tensor:
        weights = [self.layer_weights(text, layer) for layer in range(text.num_hidden_layers)]
        return language_flops(text, weights, lengths)


def family_of(model: Any) -> VLMFamily:
    """The family of a model type (``"qwen2_5_vl"``), a config, or a model with a config.

    Raises `UnknownModel`, which names the known types.

    >>> family_of("qwen2_5_vl").vision_tower
    'model.visual'
    """
    config = getattr(model, "config", model)
    model_type = config if isinstance(config, str) else getattr(config, "model_type", None)
    if model_type not in _FAMILIES:
        raise UnknownModel(f"no model family for model type {model_type!r}; known: {', '.join(known_families())}")
    module, _, name = _FAMILIES[model_type].partition(":")
    family: VLMFamily = getattr(import_module(module), name)
    return family


def known_families() -> tuple[str, ...]:
    """Model types that have a family."""
    return tuple(_FAMILIES)


def _frame_texts(
    grids: Ids, encode_text: Callable[[str], Sequence[int]] | None, seconds: Sequence[Sequence[float]] | None
) -> list[list[Sequence[int]]]:
    """Token ids of each frame's time, as ``<1.5 seconds>``."""
    if encode_text is None or seconds is None:
        raise MediaMismatch(
            "a video of this family needs `encode_text` and `seconds`: each frame's time is part of the prompt"
        )
    if [len(times) for times in seconds] != grids[:, 0].tolist():
        raise MediaMismatch(
            f"videos of {grids[:, 0].tolist()} frames, but times for {[len(times) for times in seconds]}"
        )
    return [[encode_text(f"<{time:.1f} seconds>") for time in times] for times in seconds]
