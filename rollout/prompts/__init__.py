"""Prompts and training rows, made in one place for engines and training.

`PromptBuilder` turns rows of data sets into prompts, `SupervisedBuilder` conversations into training rows, `ChunkRenderer` chunks
into tokens and images.
"""

import lazy_loader

from dataproto.extras import require_extra

require_extra("train", "rollout.prompts", "transformers")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
