"""The forward of a Qwen-VL model in two halves, split where image embeddings are merged.

Models are used by the module paths of their `VLMFamily` alone, so wrapped or sharded ones work as long as those paths
do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dataproto.vlm.media import MediaSpans


def tower_output(tower: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Any:
    """Run the vision tower once over images and then videos.

    ``media`` holds ``pixel_values (patches, dim)`` with ``image_grid_thw (images, 3)``, and the same for video.
    """
    pixels = [media[name] for name in ("pixel_values", "pixel_values_videos") if name in media]
    grids = [media[name] for name in ("image_grid_thw", "video_grid_thw") if name in media]
    return tower(torch.cat(pixels), grid_thw=torch.cat(grids), **vision_kwargs)


def pooled(output: Any) -> Tensor:
    """Merged features ``(F, H)`` of a vision tower's output: a tensor, or an object with ``pooler_output`` (joined or
    by medium).
    """
    features = output.pooler_output if hasattr(output, "pooler_output") else output
    return features if isinstance(features, Tensor) else torch.cat(tuple(features))


def feature_levels(output: Any, deep: Sequence[Any] = ()) -> Tensor:
    """Features ``(F, levels, H)``: the merged ones of a tower's output and then the deeper levels."""
    return torch.stack([pooled(output), *map(pooled, deep)], dim=1)


def place(embeddings: Tensor, features: Tensor, spans: MediaSpans) -> Tensor:
    """``embeddings (B, L, H)`` with ``features (F, H)`` written at the spans; out of place, so gradients reach both.

    >>> spans = MediaSpans(torch.tensor([1, 2]), torch.tensor([0, 0]))
    >>> place(torch.zeros(1, 3, 2), torch.ones(1, 2), spans)[0].tolist()
    [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    """
    chosen = features.index_select(0, spans.features).to(embeddings.dtype)
    return embeddings.flatten(0, 1).index_copy(0, spans.positions, chosen).view_as(embeddings)
