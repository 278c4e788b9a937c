"""Attention of packed rows where no kernel for segments of unequal length computes it, and images whose tokens see each other."""

from workers.model.segments.image_blocks import ImageBlocks, block_attention, image_blocks
from workers.model.segments.segment_attention import segment_attention, segment_sdpa

__all__ = ["ImageBlocks", "block_attention", "image_blocks", "segment_attention", "segment_sdpa"]
