"""Qwen2.5-VL: windowed vision attention, and video positions that follow the clock."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import MediaMismatch
from dataproto.vlm.family import VLMFamily
from dataproto.vlm.flops import (
    dense_layer_weights,
    frame_pairs,
    merger_weights,
    patch_weights,
    vision_flops,
    window_pairs,
)
from dataproto.vlm.mrope import Pieces
from dataproto.vlm.qwen2_vl import checkpoint_weight


def _timed_videos(grids: Tensor, seconds: Tensor | Sequence[float] | None, config: Any) -> Pieces:
    """A time step lasts ``seconds`` (1 unless given), each of ``tokens_per_second`` positions, rounded down."""
    vision = config.vision_config
    if seconds is None:
        seconds = [1.0] * len(grids)
    if len(seconds) != len(grids):
        raise MediaMismatch(f"{len(grids)} videos, but {len(seconds)} values of second_per_grid_ts")
    # Python numbers are multiplied in double precision and tensors in their own, as Hugging Face does.
    steps = seconds if isinstance(seconds, Tensor) else torch.tensor(seconds, dtype=torch.float64)
    intervals = vision.tokens_per_second * steps
    return Pieces.of_grids(
        grids, vision.spatial_merge_size, intervals if isinstance(seconds, Tensor) else intervals.float()
    )


def _vision_flops(config: Any, grids: Tensor) -> Tensor:
    vision = config.vision_config
    width, merge = int(vision.hidden_size), int(vision.spatial_merge_size)
    window = int(vision.window_size) // merge // int(vision.patch_size) * merge
    full, windowed = frame_pairs(grids), window_pairs(grids, window)
    return vision_flops(
        grids,
        patch=patch_weights(vision, width),
        block=4 * width**2 + 3 * width * int(vision.intermediate_size),
        merger=merger_weights(vision, width, int(vision.out_hidden_size)),
        merge_size=merge,
        width=width,
        pairs=[full if block in vision.fullatt_block_indexes else windowed for block in range(vision.depth)],
    )


QWEN2_5_VL = VLMFamily(
    model_type="qwen2_5_vl",
    vision_flops=_vision_flops,
    layer_weights=dense_layer_weights,
    videos=_timed_videos,
    rollout_weight=checkpoint_weight,
)
