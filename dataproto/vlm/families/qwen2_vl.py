"""Qwen2-VL."""

import re
from typing import Any

from torch import Tensor

from dataproto.vlm.costs import patch_tower_flops
from dataproto.vlm.family import VLMFamily

_CHECKPOINT_NAMES = ((re.compile(r"^model\.visual\."), "visual."), (re.compile(r"^model\.language_model\."), "model."))


class Qwen2VL(VLMFamily):
    """Qwen2-VL: the defaults of `VLMFamily`."""

    model_type = "qwen2_vl"
    published = ("Qwen2-VL",)

    def rollout_weight(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """Checkpoints keep the names from before the decoder became a submodule."""
        for pattern, prefix in _CHECKPOINT_NAMES:
            name = pattern.sub(prefix, name)
        return name, weight

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Blocks have full attention within a frame and an MLP of two layers."""
        vision = config.vision_config
        width = int(vision.embed_dim)
        mlp = 2 * width * int(width * vision.mlp_ratio)
        return patch_tower_flops(vision, grids, width, mlp, int(vision.hidden_size))
