"""InternVL 2.5 to 3.5, dense and mixture of experts, in Hugging Face's format: an image is cut into tiles of one size and a
thumbnail, each tile takes a fixed number of tokens, and positions are one-dimensional.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto.vlm.families.qwen3_vl import Qwen3Mixture
from dataproto.vlm.family import VLMFamily
from dataproto.vlm.media import EqualImages, Ids, Options, check_limits


class Tiles(EqualImages):
    """Tiles ``(tiles, 3, height, width)`` of all images, one image after another."""

    def merge_size(self, config: Any) -> int:
        """Patches along each side of the "pixel shuffle", which joins neighbouring patches."""
        return round(1 / float(config.downsample_ratio))

    def shape(self, config: Any) -> tuple[int, ...]:
        """Of a tile."""
        return (3, *config.vision_config.image_size)

    def feature_counts(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Ids:
        """``inputs`` must be those of one image: joined tiles do not tell where an image ends."""
        grids = self.grids(kind, inputs, config)
        return np.array([int(grids.prod(-1).sum()) // self.merge_size(config) ** 2] * (len(grids) > 0), dtype=np.int64)

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Limits as numbers of tiles, without the thumbnail."""
        area = processor.size["height"] * processor.size["width"]
        least = processor.min_patches * area if min_pixels is None else min_pixels
        most = processor.max_patches * area if max_pixels is None else max_pixels
        check_limits(least, most)
        tiles = max(1, most // area)
        return {"crop_to_patches": True, "min_patches": min(math.ceil(least / area), tiles), "max_patches": tiles}

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """The processor computes the number of tiles."""
        tiles = processor.get_number_of_image_patches(height, width, dict(options))
        return int(tiles) * int(self.feature_counts("image", self.smallest(config), config)[0])


class InternVL(VLMFamily):
    """InternVL, dense."""

    model_type = "internvl"
    published: tuple[str, ...] = ("InternVL2.5", "InternVL3", "InternVL3.5")
    media_layout = Tiles()
    image_text = ("<img>", "</img>")
    mrope = False
    vision_tower = "model.vision_tower"
    vision_blocks = "model.vision_tower.encoder.layer"
    mergers = ("model.multi_modal_projector",)
    checkpoint_names = (
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.", ""),
    )
    """Those from when the output projection belonged to the language model."""

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, H)`` after the tower, the pixel shuffle and the projector.

        Transformers' own function asks for the states after each layer, by hooks that no layer can be compiled with.
        """
        config, pixels = model.config, media["pixel_values"]
        if config.vision_feature_layer != -1:
            output = model.model.get_image_features(pixels, return_dict=True, **vision_kwargs)
            features: Tensor = output.pooler_output.flatten(0, 1)
            return features
        tower, projector = (model.get_submodule(path) for path in self.vision_parts)
        states = tower(pixel_values=pixels.to(model.dtype), **vision_kwargs).last_hidden_state
        if config.vision_feature_select_strategy == "default":
            states = states[:, 1:]
        side = int(states.shape[1] ** 0.5)
        squares = model.model.pixel_shuffle(states.unflatten(1, (side, side)), scale_factor=config.downsample_ratio)
        features = projector(squares.flatten(1, 2)).flatten(0, 1)
        return features

    def processor_files(self, config: Any) -> dict[str, dict[str, Any]]:
        """The number of tokens of a tile."""
        features = int(self.feature_counts(self.dummy_media(config), config)[0])
        return {"processor_config.json": {"processor_class": "InternVLProcessor", "image_seq_length": features}}

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """A tile has a class token besides its patches; the projector does not read it."""
        vision, text = config.vision_config, config.text_config
        width, depth = int(vision.hidden_size), int(vision.num_hidden_layers)
        patches, merged = grids.prod(-1), self.merge_size(config) ** 2
        tokens = patches + 1
        embedding = width * 3 * math.prod(vision.patch_size)
        block = 4 * width**2 + 2 * width * int(vision.intermediate_size)
        projector = (width * merged + int(text.hidden_size)) * int(text.hidden_size)
        linear = patches * embedding + tokens * depth * block + patches // merged * projector
        return torch.stack([2 * linear, 4 * width * depth * tokens**2], dim=1)


class InternVLMoe(Qwen3Mixture, InternVL):
    """InternVL with Qwen3's mixture of experts. That of gpt-oss is refused, see `dataproto.vlm.family_registry`."""

    model_type = "internvl+qwen3_moe"
    published: tuple[str, ...] = ("InternVL3.5-30B-A3B", "InternVL3.5-241B-A28B")
