"""What is special to each vision-language model: tokens, positions, the forward in two halves, weights and cost.

>>> from dataproto.vlm import family_of
>>> family = family_of("qwen2_5_vl")  # or a Hugging Face config or model
"""

from dataproto.vlm.costs import row_costs
from dataproto.vlm.family import VLMFamily, family_of, known_families
from dataproto.vlm.flops import Flops
from dataproto.vlm.media import DistinctMedia, MediaSpans, distinct_media, media_grids, media_spans
from dataproto.vlm.mrope import extend_positions
from dataproto.vlm.placeholders import MediaTokens, frame_seconds, image_grid

__all__ = [
    "DistinctMedia",
    "Flops",
    "MediaSpans",
    "MediaTokens",
    "VLMFamily",
    "distinct_media",
    "extend_positions",
    "family_of",
    "frame_seconds",
    "image_grid",
    "known_families",
    "media_grids",
    "media_spans",
    "row_costs",
]
