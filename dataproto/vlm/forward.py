"""The forward of a Qwen-VL model in two halves, split where image embeddings are merged.

Models are used by the module paths of their `VLMFamily` alone, so wrapped or sharded ones work as long as those paths
do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dataproto._ops.transfer import move
from dataproto.vlm.media import MediaSpans


def tower_output(tower: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Any:
    """Run the vision tower once over images and then videos.

    ``media`` holds ``pixel_values (patches, dim)`` with ``image_grid_thw (images, 3)``, and the same for video. Where grids are
    left on the host, what follows from them is computed there, and the device is not waited for.
    """
    pixels = torch.cat([media[name] for name in ("pixel_values", "pixel_values_videos") if name in media])
    grids = torch.cat([media[name] for name in ("image_grid_thw", "video_grid_thw") if name in media])
    if grids.device != pixels.device:
        found = grid_arguments(tower, grids)
        moved = {name: move(x, pixels.device) if isinstance(x, Tensor) else x for name, x in found.items()}
        vision_kwargs = moved | vision_kwargs
    return tower(pixels, grid_thw=grids, **vision_kwargs)


def grid_arguments(tower: Any, grids: Tensor) -> dict[str, Any]:
    """What a Qwen-VL tower would compute from grids ``(N, 3)`` on its device, waiting several times for it, under the names of
    its forward's keywords: positions of patches, bounds and longest length of frames, and of windows or the places between
    learned positions where the tower has such.
    """
    from transformers import vision_utils as hf

    merge = int(tower.spatial_merge_size)
    bounds = hf.get_vision_cu_seqlens(grids)
    found = {
        "position_ids": hf.get_vision_position_ids(grids, merge),
        "cu_seqlens": bounds,
        "max_seqlen": int(bounds.diff().max()),
    }
    if hasattr(tower, "window_size"):
        index, windows = hf.get_vision_window_index(grids, merge, tower.window_size, tower.patch_size)
        found |= {"window_index": index, "cu_window_seqlens": windows, "max_window_seqlen": int(windows.diff().max())}
    if hasattr(tower, "num_grid_per_side"):
        indices, weights = hf.get_vision_interpolation_indices_and_weights(
            grids, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
        found |= {"interp_indices": indices, "interp_weights": weights}
    return found


def pooled(output: Any) -> Tensor:
    """Merged features ``(F, H)`` of a vision tower's output: a tensor, or an object with ``pooler_output`` (joined or
    by medium).
    """
    features = output.pooler_output if hasattr(output, "pooler_output") else output
    return features if isinstance(features, Tensor) else torch.cat(tuple(features))


def feature_levels(output: Any, deep: Sequence[Any] = ()) -> Tensor:
    """Features ``(F, levels, H)``: the merged ones of a tower's output and then the deeper levels."""
    return torch.stack([pooled(output), *map(pooled, deep)], dim=1)


def dense_levels(features: Tensor, tokens: int, spans: MediaSpans) -> Tensor:
    """Features ``(F, levels, H)`` at their places in a sequence of ``tokens``, zero elsewhere: ``(levels, tokens, H)``."""
    chosen = features.index_select(0, spans.features).transpose(0, 1)
    return features.new_zeros(features.shape[1], tokens, features.shape[2]).index_copy(1, spans.positions, chosen)


def place(embeddings: Tensor, features: Tensor, spans: MediaSpans) -> Tensor:
    """``embeddings (B, L, H)`` with ``features (F, H)`` written at the spans; out of place, so gradients reach both.

    >>> spans = MediaSpans(torch.tensor([1, 2]), torch.tensor([0, 0]))
    >>> place(torch.zeros(1, 3, 2), torch.ones(1, 2), spans)[0].tolist()
    [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    """
    chosen = features.index_select(0, spans.features).to(embeddings.dtype)
    return embeddings.flatten(0, 1).index_copy(0, spans.positions, chosen).view_as(embeddings)
