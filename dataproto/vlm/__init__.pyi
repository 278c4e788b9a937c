from .costs import Flops as Flops
from .family import VLMFamily as VLMFamily
from .family_registry import (
    family_of as family_of,
    known_families as known_families,
    register_family as register_family,
)
from .media import (
    DistinctMedia as DistinctMedia,
    MediaLayout as MediaLayout,
    MediaSpans as MediaSpans,
    PatchGrids as PatchGrids,
    distinct_media as distinct_media,
    image_grid as image_grid,
    media_grids as media_grids,
    media_spans as media_spans,
)
from .positions import extend_positions as extend_positions
from .prompt_layout import MediaTokens as MediaTokens, frame_seconds as frame_seconds
