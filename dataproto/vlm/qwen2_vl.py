"""Qwen2-VL."""

import re
from typing import Any

from torch import Tensor

from dataproto.vlm.family import VLMFamily
from dataproto.vlm.flops import dense_layer_weights, frame_pairs, merger_weights, patch_weights, vision_flops

_CHECKPOINT_NAMES = ((re.compile(r"^model\.visual\."), "visual."), (re.compile(r"^model\.language_model\."), "model."))


def checkpoint_weight(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Checkpoints of Qwen2-VL and Qwen2.5-VL keep the names from before the decoder became a submodule."""
    for pattern, prefix in _CHECKPOINT_NAMES:
        name = pattern.sub(prefix, name)
    return name, weight


def _vision_flops(config: Any, grids: Tensor) -> Tensor:
    vision = config.vision_config
    width = int(vision.embed_dim)
    return vision_flops(
        grids,
        patch=patch_weights(vision, width),
        block=4 * width**2 + 2 * width * int(width * vision.mlp_ratio),
        merger=merger_weights(vision, width, int(vision.hidden_size)),
        merge_size=int(vision.spatial_merge_size),
        width=width,
        pairs=[frame_pairs(grids)] * int(vision.depth),
    )


QWEN2_VL = VLMFamily(
    model_type="qwen2_vl",
    vision_flops=_vision_flops,
    layer_weights=dense_layer_weights,
    rollout_weight=checkpoint_weight,
)
