"""Qwen2.5-VL: Qwen2-VL with windowed vision attention and with video positions in proportion to time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import MediaMismatch
from dataproto.vlm.costs import frame_pairs, patch_tower_flops, window_pairs
from dataproto.vlm.families.qwen2_vl import Qwen2VL
from dataproto.vlm.positions import Pieces


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL; names of weights in checkpoints are those of Qwen2-VL."""

    model_type = "qwen2_5_vl"
    published: tuple[str, ...] = ("Qwen2.5-VL",)
    gated_tower = True

    def video_pieces(self, grids: Tensor, seconds: Tensor | Sequence[float] | None, config: Any) -> Pieces:
        """Time steps are ``tokens_per_second * seconds`` positions apart, rounded down. Seconds are 1 by default."""
        vision = config.vision_config
        if seconds is None:
            seconds = [1.0] * len(grids)
        if len(seconds) != len(grids):
            raise MediaMismatch(f"{len(grids)} videos, but {len(seconds)} values of second_per_grid_ts")
        # Python numbers are multiplied in double precision and tensors in their own dtype, as in Hugging Face.
        steps = seconds if isinstance(seconds, Tensor) else torch.tensor(seconds, dtype=torch.float64)
        intervals = vision.tokens_per_second * steps
        return Pieces.of_grids(
            grids, vision.spatial_merge_size, intervals if isinstance(seconds, Tensor) else intervals.float()
        )

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Some blocks have full attention within a frame, the others attention within windows. The MLP is gated."""
        vision = config.vision_config
        width, merge = int(vision.hidden_size), int(vision.spatial_merge_size)
        window = int(vision.window_size) // merge // int(vision.patch_size) * merge
        full, windowed = frame_pairs(grids), window_pairs(grids, window)
        pairs = [full if block in vision.fullatt_block_indexes else windowed for block in range(vision.depth)]
        mlp = 3 * width * int(vision.intermediate_size)
        return patch_tower_flops(vision, grids, width, mlp, int(vision.out_hidden_size), pairs=pairs)
