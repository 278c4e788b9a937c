"""Gemma 4 with images of any size: layers with a sliding window, in which the tokens of an image may see each other, and layers
without, whose heads are wider and whose keys may also be values; logits have a soft cap. The small models give each layer an
embedding of its own of each token, and their last layers use the keys of earlier ones; one has experts next to its dense MLP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from dataproto.errors import InvalidConfig, InvalidMedia, MediaMismatch
from dataproto.transfer import move, move_readable
from dataproto.vlm.costs import causal_pairs
from dataproto.vlm.family import DECODER_PLAN, SoftCap, VLMFamily
from dataproto.vlm.media import MediaLayout, MediaSpans, Options, check_limits

FEATURES = (70, 140, 280, 560, 1120)
"""The largest numbers of features of an image that the image processor takes."""


@dataclass(frozen=True)
class PlacedPatches(MediaLayout):
    """Patches ``(patches, dim)`` of images of any size, one image after another, and their columns and rows ``(patches, 2)``. The
    forward of Hugging Face takes them padded.
    """

    image_names = ("pixel_values", "image_position_ids")

    def merge_size(self, config: Any) -> int:
        """Patches along each side of a square whose mean becomes a feature."""
        return int(config.vision_config.pooling_kernel_size)

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """One grid per image, which ends at its last column and row."""
        if not self.holds(kind, inputs):
            return torch.zeros(0, 3, dtype=torch.int64)
        pixels, places = inputs["pixel_values"], inputs["image_position_ids"].long()
        ends = (places[1:] == 0).all(1).nonzero().squeeze(1)
        ends = torch.cat([ends, ends.new_tensor([len(places) - 1])])
        sides, merge = places[ends] + 1, self.merge_size(config)  # Width and height.
        counts = ends.diff(prepend=ends.new_tensor([-1]))
        if len(pixels) != len(places) or bool((sides.prod(1) != counts).any()) or bool((sides % merge).any()):
            raise MediaMismatch(
                f"{len(pixels)} patches and {len(places)} image_position_ids do not fill images in squares of {merge} x {merge}"
            )
        return torch.cat([torch.ones_like(counts)[:, None], sides.flip(1)], dim=1)

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Limits become a number of features: images are scaled to nearly fill it. It is one of `FEATURES`."""
        area = (int(processor.patch_size) * int(processor.pooling_kernel_size)) ** 2
        if min_pixels is None and max_pixels is None:
            return {"max_soft_tokens": int(processor.max_soft_tokens)}
        least = 1 if min_pixels is None else min_pixels
        most = max(least, FEATURES[-1] * area) if max_pixels is None else max_pixels
        check_limits(least, most)
        fitting = [count for count in FEATURES if least <= count * area <= most]
        if not fitting:
            areas = [count * area for count in FEATURES]
            raise InvalidConfig(
                f"min_pixels={min_pixels} and max_pixels={max_pixels}: images of this family have about {areas} pixels"
            )
        default = int(processor.max_soft_tokens)
        return {"max_soft_tokens": default if default in fitting else fitting[-1]}

    def image_inputs(self, made: Mapping[str, Any]) -> dict[str, Tensor]:
        """Without the padding of the image processor."""
        places = made["image_position_ids"][0]
        kept = (places >= 0).all(1)
        return {"pixel_values": made["pixel_values"][0][kept], "image_position_ids": places[kept]}

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """As the image processor scales: the largest size with this shape, in squares of a feature."""
        most, side = int(options["max_soft_tokens"]), int(processor.patch_size) * int(processor.pooling_kernel_size)
        factor = math.sqrt(most * side**2 / (height * width))
        rows, columns = int(factor * height // side), int(factor * width // side)
        if not rows and not columns:
            raise InvalidMedia(f"image of height {height} and width {width} cannot be scaled to {most} features")
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        return rows * columns

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """An image of one feature."""
        vision, merge = config.vision_config, self.merge_size(config)
        places = torch.cartesian_prod(torch.arange(merge), torch.arange(merge)).flip(-1)
        return {"pixel_values": torch.zeros(merge**2, 3 * int(vision.patch_size) ** 2), "image_position_ids": places}


class Gemma4(VLMFamily):
    """Gemma 4, dense. The tower for audio that some checkpoints have is not loaded, and stays as it is in their exports."""

    model_type = "gemma4"
    published: tuple[str, ...] = ("Gemma-4-31B",)
    media_layout = PlacedPatches()
    image_text = ("<|image>", "<image|>")
    mrope = False
    numbered_layers = True
    mask_types = "mm_token_type_ids"
    vision_tower = "model.vision_tower"
    vision_blocks = "model.vision_tower.encoder.layers"
    gated_tower = True
    mergers = ("model.embed_vision",)
    unused_configs = ("audio_config",)
    unused_weights = ("model.audio_tower.*", "model.embed_audio.*")

    def kind(self, config: Any) -> str:
        """By the layers of the language model."""
        text = config.get_text_config()
        return "moe" if text.enable_moe_block else "per_layer" if text.hidden_size_per_layer_input else ""

    def check_supported(self, config: Any) -> None:
        """Refuses what no published model has: attention of all tokens to all, experts with per-layer embeddings, and a model
        without a tower.
        """
        super().check_supported(config)
        text = config.get_text_config()
        if config.vision_config is None:
            raise InvalidConfig(
                "models of type gemma4 without a vision tower (vision_config is None) are not supported: use a "
                "checkpoint with its tower"
            )
        found = {
            "experts and per-layer embeddings at once (enable_moe_block, hidden_size_per_layer_input)": (
                text.enable_moe_block and text.hidden_size_per_layer_input
            ),
            "attention of all tokens to all (use_bidirectional_attention)": text.use_bidirectional_attention == "all",
        }
        if names := [name for name, value in found.items() if value]:
            raise InvalidConfig(f"models of type gemma4 with {', '.join(names)} are not supported: use one without")

    def undivided_layers(self, config: Any) -> range:
        """The last layers, if they use keys and values of earlier ones: from the first of those on."""
        text = config.get_text_config()
        own = text.layer_types[: text.num_hidden_layers - text.num_kv_shared_layers]
        if not 0 < len(own) < text.num_hidden_layers:
            return range(0)
        read = {kind: layer for layer, kind in enumerate(own)}  # Later layers read the last one of each kind.
        return range(min(read.values()), text.num_hidden_layers)

    def mutual_images(self, config: Any) -> Literal["windowed"] | None:
        """In layers with a sliding window, if the config says so."""
        return "windowed" if config.get_text_config().use_bidirectional_attention == "vision" else None

    def logit_cap(self, config: Any) -> SoftCap | None:
        """From the config of the language model."""
        cap = config.get_text_config().final_logit_softcapping
        return None if cap is None else SoftCap(float(cap))

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, H)``. One call of the tower, as ranks that share it need; images are padded to the longest.

        Attention of Hugging Face masks the padding. Packed attention gets an image and its padding as segments.
        """
        pixels, places = media["pixel_values"], media["image_position_ids"]
        tower, embedder = (model.get_submodule(path) for path in (self.vision_tower, *self.mergers))
        lengths = self.media_layout.grids("image", media, model.config).prod(1).cpu()
        longest = int(lengths.max())
        batch = [
            move(pad_sequence(x.split(lengths.tolist()), batch_first=True, padding_value=fill), pixels.device)
            for x, fill in ((pixels, 0.0), (places, -1))
        ]
        ends = (
            torch.stack([lengths, torch.full_like(lengths, longest)], 1) + torch.arange(len(lengths))[:, None] * longest
        )
        bounds = move_readable(pad(ends.flatten(), (1, 0)).int(), pixels.device)
        segments = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        found = tower(pixel_values=batch[0], pixel_position_ids=batch[1], **segments, **vision_kwargs)
        features: Tensor = embedder(inputs_embeds=found.last_hidden_state)
        return features

    def processor_files(self, config: Any) -> dict[str, dict[str, Any]]:
        """The processors of audio and videos, without which there is no Gemma4Processor."""
        settings = {
            "processor_class": "Gemma4Processor",
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
            "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
        }
        return {"processor_config.json": settings}

    def layer_weights(self, text: Any, layer: int) -> int:
        """Attention, with keys that may be values too, or belong to an earlier layer; and a gated MLP."""
        heads, key_heads, size = self._heads(text, layer)
        shared = layer >= int(text.num_hidden_layers) - int(text.num_kv_shared_layers)
        alike = text.attention_k_eq_v and text.layer_types[layer] == "full_attention"
        keys = 0 if shared else key_heads * (1 if alike else 2)
        wide = int(text.intermediate_size) * (2 if text.use_double_wide_mlp and shared else 1)
        return int(text.hidden_size) * ((2 * heads + keys) * size + 3 * wide)

    def mixing_flops(self, text: Any, lengths: Tensor) -> Tensor:
        """Attention with heads of each layer's size, over its window."""
        total = torch.zeros_like(lengths)
        for layer, kind in enumerate(text.layer_types):
            heads, _, size = self._heads(text, layer)
            window = int(text.sliding_window) if kind == "sliding_attention" else None
            total = total + 4 * heads * size * causal_pairs(lengths, window)
        return total

    def _heads(self, text: Any, layer: int) -> tuple[int, int, int]:
        """Query heads, key heads and the size of a head in a layer."""
        own = text.per_layer_config[layer]
        return int(text.num_attention_heads), int(own.num_key_value_heads), int(own.head_dim)

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Full attention within an image, a gated MLP, and one matrix for each feature. Hugging Face's code takes the means over
        squares by a product of features and patches, which counts with attention.
        """
        vision = config.vision_config
        hidden, depth = int(vision.hidden_size), int(vision.num_hidden_layers)
        width, keys = (
            int(heads) * int(vision.head_dim) for heads in (vision.num_attention_heads, vision.num_key_value_heads)
        )
        patches = grids.prod(-1)
        block = hidden * (2 * width + 2 * keys + 3 * int(vision.intermediate_size))
        features = patches // self.merge_size(config) ** 2
        embedding = hidden * 3 * int(vision.patch_size) ** 2
        linear = patches * (embedding + depth * block) + features * hidden * int(config.text_config.hidden_size)
        mixing = 4 * width * depth * patches**2 + 2 * hidden * patches * features
        return torch.stack([2 * linear, mixing], dim=1)


class Gemma4PerLayer(Gemma4):
    """The small models. Each layer gets P numbers for a token, the sum of an embedding and of a projection of the first layer's
    input, which a gate of the layer's states multiplies. Images and audio have the embedding of padding there.
    """

    model_type = "gemma4+per_layer"
    published = ("Gemma-4-E2B", "Gemma-4-E4B")
    layer_embedding = "model.language_model.embed_tokens_per_layer"
    layer_input_parts = (
        layer_embedding,
        "model.language_model.per_layer_model_projection",
        "model.language_model.per_layer_projection_norm",
    )
    layer_input_method = "project_per_layer_inputs"
    tensor_plan = (*DECODER_PLAN, (layer_embedding, "vocabulary"))

    def merge(
        self, model: Any, input_ids: Tensor, features: Tensor | None, spans: MediaSpans | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """With the embeddings ``per_layer_inputs (B, L, layers, P)`` besides."""
        embeddings, extras = super().merge(model, input_ids, features, spans)
        config, text = model.config, model.config.get_text_config()
        ids = input_ids
        for token in (config.image_token_id, config.video_token_id, config.audio_token_id):
            ids = ids.masked_fill(ids == token, text.pad_token_id)
        # Under tensor parallelism this rank has a part of the tokens.
        found = model.get_submodule(self.layer_embedding)(ids)
        return embeddings, extras | {"per_layer_inputs": found.unflatten(-1, (text.num_hidden_layers, -1))}

    def layer_inputs(self, model: Any, embeddings: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        """Embeddings of the tokens, and the projection of the first layer's input."""
        decoder = model.get_submodule(self.language_model)
        # This is the method of the class: a stage gets them made.
        make = getattr(type(decoder), self.layer_input_method)
        found: Tensor = make(decoder, embeddings, extras["per_layer_inputs"])
        return found[0].transpose(0, 1)

    def layer_input_size(self, text: Any) -> int:
        """P."""
        return int(text.hidden_size_per_layer_input)

    def layer_input_extras(self, inputs: Tensor, before: int) -> dict[str, Tensor]:
        """``per_layer_inputs (1, L, layers, P)`` of the whole model; what lies before the stage is not read."""
        return {"per_layer_inputs": pad(inputs.transpose(0, 1), (0, 0, before, 0))[None]}

    def layer_weights(self, text: Any, layer: int) -> int:
        """Besides a gate, a projection, and the layer's part of the projection of the first layer's input."""
        return super().layer_weights(text, layer) + 3 * int(text.hidden_size * text.hidden_size_per_layer_input)


class Gemma4Moe(Gemma4):
    """A mixture of experts, which read the states before the dense MLP next to them. A router's weights have a factor for each
    expert.
    """

    model_type = "gemma4+moe"
    published = ("Gemma-4-26B-A4B",)
    experts = "model.language_model.layers.*.experts"
    router = "router"
    tensor_plan = (
        *DECODER_PLAN,
        ("model.language_model.layers.*.experts.gate_up_proj", "packed_colwise"),
        ("model.language_model.layers.*.experts.down_proj", "rowwise"),
    )

    def experts_per_token(self, text: Any) -> int:
        """As Gemma's configs name it."""
        return int(text.top_k_experts)

    def expert_weights(self, router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
        """Shares of the probabilities, which this router returns instead of logits, times the factors of the experts."""
        shares = logits.gather(-1, chosen)
        weights: Tensor = shares / shares.sum(-1, keepdim=True) * router.per_expert_scale[chosen]
        return weights

    def layer_weights(self, text: Any, layer: int) -> int:
        """Besides the router, and the experts that a token is sent to."""
        experts = 3 * int(text.top_k_experts * text.moe_intermediate_size)
        return super().layer_weights(text, layer) + int(text.hidden_size) * (int(text.num_experts) + experts)
