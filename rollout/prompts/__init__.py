"""What engines and training are given, made in one place: rows of data sets, whole conversations, and chunks to batches.

`PromptBuilder` turns rows into prompts, `SupervisedBuilder` conversations into training rows, `ChunkRenderer` chunks into either.
"""

from rollout.prompts.chunk_rendering import ChunkRenderer, Resolver, token_values
from rollout.prompts.conversations import SupervisedBuilder, TrainingRow, Turns
from rollout.prompts.prompt_builder import (
    IMAGE_BACKEND,
    ProcessedImage,
    Prompt,
    PromptBuilder,
    invalid_row,
    load_image_processor,
    row_digest,
    row_number,
)

__all__ = [
    "IMAGE_BACKEND",
    "ChunkRenderer",
    "ProcessedImage",
    "Prompt",
    "PromptBuilder",
    "Resolver",
    "SupervisedBuilder",
    "TrainingRow",
    "Turns",
    "invalid_row",
    "load_image_processor",
    "row_digest",
    "row_number",
    "token_values",
]
