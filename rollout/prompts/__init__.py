"""Prompts and training rows, made in one place for engines and training.

`PromptBuilder` turns rows of data sets into prompts, `SupervisedBuilder` conversations into training rows, `ChunkRenderer` chunks
into either.
"""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names, require_extra

require_extra("train", "rollout.prompts", "transformers")

if TYPE_CHECKING:
    from rollout.pretrained import IMAGE_BACKEND, load_image_processor
    from rollout.prompts.chunk_rendering import ChunkRenderer, PlacedSequence, Resolver, TokenSequence
    from rollout.prompts.conversations import SupervisedBuilder, TrainingRow
    from rollout.prompts.image_processing import ContentStore, ProcessedImage
    from rollout.prompts.messages import Turns
    from rollout.prompts.prepared_rows import Prompt, invalid_row, row_digest, row_number
    from rollout.prompts.prompt_builder import PromptBuilder

__all__ = [
    "IMAGE_BACKEND",
    "ChunkRenderer",
    "ContentStore",
    "PlacedSequence",
    "ProcessedImage",
    "Prompt",
    "PromptBuilder",
    "Resolver",
    "SupervisedBuilder",
    "TokenSequence",
    "TrainingRow",
    "Turns",
    "invalid_row",
    "load_image_processor",
    "row_digest",
    "row_number",
]

__getattr__ = lazy_names(
    __name__,
    "rollout.pretrained",
    ".chunk_rendering",
    ".conversations",
    ".image_processing",
    ".messages",
    ".prepared_rows",
    ".prompt_builder",
)
