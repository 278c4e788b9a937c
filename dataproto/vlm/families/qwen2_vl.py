"""Qwen2-VL."""

from typing import Any

from torch import Tensor

from dataproto.vlm.costs import patch_tower_flops
from dataproto.vlm.family import VLMFamily


class Qwen2VL(VLMFamily):
    """Qwen2-VL: the defaults of `VLMFamily`."""

    model_type = "qwen2_vl"
    published: tuple[str, ...] = ("Qwen2-VL",)
    checkpoint_names: tuple[tuple[str, str], ...] = (
        (r"^model\.visual\.", "visual."),
        (r"^model\.language_model\.", "model."),
    )
    """Those from before the decoder became a submodule."""

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Blocks have full attention within a frame and an MLP of two layers."""
        vision = config.vision_config
        width = int(vision.embed_dim)
        mlp = 2 * width * int(width * vision.mlp_ratio)
        return patch_tower_flops(vision, grids, width, mlp, int(vision.hidden_size))
