"""InternVL (2.5 to 3.5, the dense ones, in Hugging Face's form): an image is cut into tiles of one size and a thumbnail, each
tile takes a fixed number of tokens, and positions are one-dimensional.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidMedia, MediaMismatch
from dataproto.vlm.family import VLMFamily
from dataproto.vlm.flops import dense_layer_weights
from dataproto.vlm.media_layout import check_limits
from dataproto.vlm.placeholders import Ids


@dataclass(frozen=True)
class Tiles:
    """Tiles ``(tiles, 3, height, width)`` of all images, one after the other; a tile is one grid of patches."""

    def names(self, kind: str) -> tuple[str, ...]:
        """Nothing but pixels, and no videos: those are frames told as images in the prompt's text."""
        return ("pixel_values",) if kind == "image" else ()

    def merge_size(self, config: Any) -> int:
        """The "pixel shuffle" that joins neighbouring patches."""
        return round(1 / float(config.downsample_ratio))

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """One for each tile."""
        pixels = inputs.get("pixel_values") if kind == "image" else None
        size, patch = config.vision_config.image_size, config.vision_config.patch_size
        if pixels is not None and tuple(pixels.shape[1:]) != (3, *size):
            raise MediaMismatch(f"image tiles {tuple(pixels.shape)} are not (tiles, 3, {size[0]}, {size[1]})")
        tiles = 0 if pixels is None else len(pixels)
        return torch.tensor([[1, size[0] // patch[0], size[1] // patch[1]]]).expand(tiles, 3)

    def features(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Ids:
        """``inputs`` are one image: nothing in those of several tells whose a tile is."""
        grids = self.grids(kind, inputs, config)
        return np.array([int(grids.prod(-1).sum()) // self.merge_size(config) ** 2] * (len(grids) > 0), dtype=np.int64)

    def options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Limits as numbers of tiles, the thumbnail not counted."""
        area = processor.size["height"] * processor.size["width"]
        least = processor.min_patches * area if min_pixels is None else min_pixels
        most = processor.max_patches * area if max_pixels is None else max_pixels
        check_limits(least, most)
        tiles = max(1, most // area)
        return {"crop_to_patches": True, "min_patches": min(math.ceil(least / area), tiles), "max_patches": tiles}

    def image_features(self, height: int, width: int, processor: Any, options: Mapping[str, Any], config: Any) -> int:
        """The processor knows how it cuts."""
        if min(height, width) <= 0:
            raise InvalidMedia(f"image of height {height} and width {width} is empty")
        tiles = processor.get_number_of_image_patches(height, width, dict(options))
        return int(tiles) * int(self.features("image", self.smallest(config), config)[0])

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """One tile."""
        return {"pixel_values": torch.zeros(1, 3, *config.vision_config.image_size)}


def _tile_features(family: VLMFamily, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
    """Features ``(F, H)`` through the tower, the pixel shuffle and the projector."""
    output = model.model.get_image_features(media["pixel_values"], return_dict=True, **vision_kwargs)
    features: Tensor = output.pooler_output.flatten(0, 1)
    return features


def _vision_flops(config: Any, grids: Tensor) -> Tensor:
    """A tile has a class token besides its patches, which the projector does not see."""
    vision, text = config.vision_config, config.text_config
    width, depth = int(vision.hidden_size), int(vision.num_hidden_layers)
    patches, merged = grids.prod(-1), TILES.merge_size(config) ** 2
    tokens = patches + 1
    embedding = width * 3 * math.prod(vision.patch_size)
    block = 4 * width**2 + 2 * width * int(vision.intermediate_size)
    projector = (width * merged + int(text.hidden_size)) * int(text.hidden_size)
    linear = patches * embedding + tokens * depth * block + patches // merged * projector
    return torch.stack([2 * linear, 4 * width * depth * tokens**2], dim=1)


_CHECKPOINT_NAMES = (
    (re.compile(r"^lm_head\."), "language_model.lm_head."),
    (re.compile(r"^model\.language_model\."), "language_model.model."),
    (re.compile(r"^model\."), ""),
)


def _checkpoint_weight(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Checkpoints keep the names from before the language model lost its head to the whole."""
    for pattern, prefix in _CHECKPOINT_NAMES:
        name, found = pattern.subn(prefix, name)
        if found:
            break
    return name, weight


TILES = Tiles()

INTERNVL = VLMFamily(
    model_type="internvl",
    pictures=TILES,
    image_text=("<img>", "</img>"),
    mrope=False,
    vision_tower="model.vision_tower",
    vision_blocks="model.vision_tower.encoder.layer",
    mergers=("model.multi_modal_projector",),
    tower_output=_tile_features,
    vision_flops=_vision_flops,
    layer_weights=dense_layer_weights,
    rollout_weight=_checkpoint_weight,
)
