"""Complete checkpoint directories of every family, with tiny random models."""

import json
from pathlib import Path

import torch
import transformers

from dataproto.vlm import family_of
from helpers.tiny_models import CLASSES
from helpers.tiny_prompts import tiny_image_processor, tiny_prompt_config, tiny_tokenizer


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
    tokenizer.save_pretrained(path)
    if (processor := tiny_image_processor(model_type)) is not None:
        processor.save_pretrained(path)
    for name, settings in family_of(model_type).processor_files(model.config).items():
        (path / name).write_text(json.dumps(settings))
    return str(path)
