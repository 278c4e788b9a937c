"""Complete checkpoint directories of every family, with tiny random models."""

from pathlib import Path

import torch
import transformers

from helpers.tiny_models import CLASSES
from helpers.tiny_prompts import tiny_builder, tiny_prompt_config, tiny_tokenizer


def write_checkpoint(model_type: str, path: Path, seed: int = 0, tied: bool = False) -> str:
    """Writes weights, tokenizer, image processor (for a model that has one) and generation config to ``path``, and returns it.

    Args:
        tied: the head has the weights of the embedding.
    """
    torch.manual_seed(seed)
    tokenizer, config = tiny_tokenizer(model_type), tiny_prompt_config(model_type)
    if tied:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
    model = getattr(transformers, CLASSES[model_type][1])(config)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(path)
    tiny_builder(model_type).save_pretrained(path)
    return str(path)
