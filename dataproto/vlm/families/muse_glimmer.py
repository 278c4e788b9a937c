"""Muse Glimmer: three layers with a sliding window and rotary positions, then one that sees all tokens without positions; a gate
on the output of attention; embeddings of tokens and features of images with a norm; logits that are scaled, then get a soft cap.
Its own video inputs are not read here: videos are refused.
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

from torch import Tensor

from dataproto.errors import InvalidConfig
from dataproto.vlm.costs import attention_width, dense_layer_weights, frame_pairs, tower_flops, window_pairs
from dataproto.vlm.family import DECODER_PLAN, SoftCap, VLMFamily, moved
from dataproto.vlm.media import Options, ShrunkImages


class FittedPatches(ShrunkImages):
    """`PatchGrids` of only images, whose sides are whole features near their own."""

    limit, unit = "max_image_tokens", "feature"

    def merge_size(self, config: Any) -> int:
        """From the config of the tower."""
        return int(config.vision_config.merge_size)

    def unit_area(self, processor: Any) -> int:
        """That of a feature."""
        return (int(processor.patch_size) * int(processor.merge_size)) ** 2

    def patch_shape(self, vision: Any) -> tuple[int, ...]:
        """That of the numbers of a patch."""
        return (int(vision.patch_temporal) * 3 * int(vision.patch_size) ** 2,)

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """Of the image after `fitted_size`."""
        side = int(processor.patch_size) * int(processor.merge_size)
        return math.prod(fitted_size(height, width, side, int(options["max_image_tokens"])))


def fitted_size(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of features, squares of ``side`` pixels, whose shape is closest to the image's, at most ``most`` in all.

    >>> fitted_size(100, 200, 28, most=4096), fitted_size(100, 200, 28, most=8)
    ((4, 7), (2, 4))
    """
    rows, columns = height / side, width / side
    ratio = columns / rows
    if rows * columns > most:
        rows = (most / ratio) ** 0.5
        columns = rows * ratio
    near = product((math.floor(rows), math.ceil(rows)), (math.floor(columns), math.ceil(columns)))
    fitting = [grid for grid in set(near) if min(grid) >= 1 and math.prod(grid) <= most]  # A set, as in the processor.
    if not fitting:
        return max(1, round(rows)), max(1, round(columns))
    return min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width))


class MuseGlimmer(VLMFamily):
    """Muse Glimmer, dense."""

    model_type = "muse_glimmer"
    published = ("Muse-Glimmer-30B",)
    needs_transformers = (5, 17)
    """Older ones lack the rotary positions of the tower."""
    not_in_vllm = "its samples there have not been compared with the actor"
    media_layout = LAYOUT = FittedPatches()
    image_text = ("<|image_start|>", "<|image_end|>")
    mrope = False
    numbered_layers = True
    vision_tower = "model.vision_tower"
    vision_blocks = "model.vision_tower.layers"
    mergers = ("model.vision_adapter", "model.vision_projection", "model.perception_emb_norm")
    tensor_plan = (*DECODER_PLAN, ("model.language_model.layers.*.self_attn.gate_proj", "colwise"))

    def check_supported(self, config: Any) -> None:
        """Refuses a table of the tower's positions that is not square, too, which transformers does not compute either."""
        super().check_supported(config)
        vision = config.vision_config
        if vision.pos_emb_height != vision.pos_emb_width:
            raise InvalidConfig(
                f"models of type muse_glimmer with a table of {vision.pos_emb_height} x {vision.pos_emb_width} positions in the "
                "tower are not supported: use one with as many rows as columns"
            )

    def logit_cap(self, config: Any) -> SoftCap:
        """From the config of the language model."""
        text = config.get_text_config()
        return SoftCap(float(text.final_logit_softcapping), float(text.output_multiplier))

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, H)`` after the tower, the projections and a norm. What depends only on grids is computed where they
        are.
        """
        tower, adapter, projection, norm = (model.get_submodule(path) for path in self.vision_parts)
        pixels, grids = media["pixel_values"], media["image_grid_thw"]
        if grids.device != pixels.device:
            vision_kwargs = moved(grid_arguments(tower, grids), pixels.device) | vision_kwargs
        states = tower(pixels, grid_thw=grids, **vision_kwargs).last_hidden_state
        features: Tensor = norm(projection(adapter(states)))
        return features

    def processor_files(self, config: Any) -> dict[str, dict[str, Any]]:
        """The processor of videos, without which there is no MuseGlimmerProcessor."""
        settings = {
            "processor_class": "MuseGlimmerProcessor",
            "video_processor": {"video_processor_type": "MuseGlimmerVideoProcessor"},
        }
        return {"processor_config.json": settings}

    def layer_weights(self, text: Any, layer: int) -> int:
        """A dense layer, and the gate of attention."""
        return dense_layer_weights(text) + int(text.hidden_size) * attention_width(text)

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Attention within windows as large as the table of positions, in some blocks within the image; an MLP of two layers in
        a block; an adapter of two layers and a projection.
        """
        vision, inner = config.vision_config, int(config.projector_hidden_size)
        width, side = int(vision.hidden_size), int(vision.pos_emb_height)
        near, far = window_pairs(grids, side), frame_pairs(grids)
        return tower_flops(
            grids,
            patch=math.prod(self.LAYOUT.patch_shape(vision)) * width,
            block=4 * width**2 + 2 * width * int(vision.intermediate_size),
            merger=inner * (int(config.out_hidden_size) + inner + int(config.text_config.hidden_size)),
            merge_size=self.merge_size(config),
            width=width,
            pairs=[near if kind == "window_attention" else far for kind in vision.layer_types],
        )


def grid_arguments(tower: Any, grids: Tensor) -> dict[str, Tensor]:
    """Keywords of the tower's forward that depend only on grids ``(N, 3)`` of images, computed where the grids are. The learned
    positions are those of a grid with height and width exchanged, given to patches in reading order.
    """
    from transformers import vision_utils as hf
    from transformers.models.muse_glimmer.modeling_muse_glimmer import get_vision_pixel_shuffle_index

    table = tower.patch_embedder
    indices, weights = hf.get_vision_interpolation_indices_and_weights(
        grids[:, [0, 2, 1]],
        table.num_grid_per_side,
        table.interpolation_mode,
        table.interpolation_align_corners,
        padding=table.interpolation_padding,
    )
    index, windows = hf.get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)
    return {
        "position_ids": hf.get_vision_position_ids(grids, tower.spatial_merge_size),
        "cu_seqlens": hf.get_vision_cu_seqlens(grids),
        "window_index": index,
        "cu_window_seqlens": windows,
        "interp_indices": indices,
        "interp_weights": weights,
        "pixel_shuffle_index": get_vision_pixel_shuffle_index(grids, tower.merge_size),
    }
