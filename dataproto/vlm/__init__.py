"""Everything that is specific to a family of vision-language models: tokens, positions, the forward pass, weights and costs.

>>> from dataproto.vlm import family_of
>>> family = family_of("qwen2_5_vl")  # or a Hugging Face config or model
"""

from dataproto.vlm.costs import Flops
from dataproto.vlm.family import VLMFamily
from dataproto.vlm.family_registry import family_of, known_families, register_family
from dataproto.vlm.media import (
    DistinctMedia,
    MediaLayout,
    MediaSpans,
    PatchGrids,
    distinct_media,
    image_grid,
    media_grids,
    media_spans,
)
from dataproto.vlm.positions import extend_positions
from dataproto.vlm.prompt_layout import MediaTokens, frame_seconds

__all__ = [
    "DistinctMedia",
    "Flops",
    "MediaLayout",
    "MediaSpans",
    "MediaTokens",
    "PatchGrids",
    "VLMFamily",
    "distinct_media",
    "extend_positions",
    "family_of",
    "frame_seconds",
    "image_grid",
    "known_families",
    "media_grids",
    "media_spans",
    "register_family",
]
