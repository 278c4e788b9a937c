from .chunk_rendering import (
    ChunkRenderer as ChunkRenderer,
    PlacedSequence as PlacedSequence,
    TokenSequence as TokenSequence,
)
from .conversations import SupervisedBuilder as SupervisedBuilder, TrainingRow as TrainingRow
from .image_processing import ProcessedImage as ProcessedImage, images_by_content as images_by_content
from .messages import Turns as Turns
from .prepared_rows import (
    Prompt as Prompt,
    invalid_row as invalid_row,
    row_digest as row_digest,
    row_number as row_number,
)
from .prompt_builder import PromptBuilder as PromptBuilder
