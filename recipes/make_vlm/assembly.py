"""A SmolVLM checkpoint from a text model and a new SigLIP tower: config, weights, tokenizer, processor, chat template."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from dataproto.errors import WAY_OUT, FileNotWritten
from recipes.configs.make_vlm_config import TowerConfig
from recipes.make_vlm.text_model import END_OF_TEXT, END_OF_TURN, IMAGE
from rollout.prompts import PromptBuilder

SETTINGS_OF_FILES = (
    "quantization_config",
    "_model_name_or_path",
    "_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
)
"""What a text model's config says of the file that it was read from."""


def assemble(path: Path, text_model: Any, tokenizer: Any, tower: TowerConfig, seed: int = 0) -> Path:
    """Writes the checkpoint to the directory ``path`` and returns it; equal arguments give equal weights.

    Tower and connector are random. New rows of the embedding, which is the output projection too, are the mean of the others
    with a little noise, so that no new token is likely at first. All other weights are the text model's own.

    Raises:
        FileNotWritten: the disk is full, say.
    """
    model = join(text_model, tokenizer, tower, seed)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
    )
    # A white image is not zero with these means: Hugging Face and vLLM take zeros for padding.
    side, half = {"longest_edge": tower.image_size}, [0.5, 0.5, 0.5]
    images = SmolVLMImageProcessorPil(size=side, max_image_size=side, image_mean=half, image_std=half)
    try:
        model.save_pretrained(path)
        PromptBuilder(tokenizer, images, model.config, max_prompt_length=1).save_pretrained(path)
    except (OSError, SafetensorError) as error:
        raise FileNotWritten(f"the checkpoint could not be written to {path}: {error}{WAY_OUT}") from error
    return path


def join(text_model: Any, tokenizer: Any, tower: TowerConfig, seed: int) -> SmolVLMForConditionalGeneration:
    """The model in float32. The global random state does not change."""
    config = model_config(text_model.config, tokenizer, tower)
    words = text_model.get_input_embeddings().weight.detach()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmolVLMForConditionalGeneration(config).float()
        noise = torch.randn(len(tokenizer) - len(words), words.shape[1]) * 0.1 * words.std(0)
    state = {name: weight for name, weight in text_model.model.state_dict().items() if name != "embed_tokens.weight"}
    decoder: nn.Module = model.model.text_model
    missing, unexpected = decoder.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], []), (missing, unexpected)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.cat([words, words.mean(0) + noise]))
    model.tie_weights()
    return model


def model_config(text_config: Any, tokenizer: Any, tower: TowerConfig) -> SmolVLMConfig:
    """The config of the whole model."""
    text = {name: value for name, value in text_config.to_dict().items() if name not in SETTINGS_OF_FILES}
    vision = {
        "hidden_size": tower.width,
        "intermediate_size": 4 * tower.width,
        "num_hidden_layers": tower.depth,
        "num_attention_heads": tower.heads,
        "image_size": tower.image_size,
        "patch_size": tower.patch_size,
        "initializer_range": tower.std,
    }
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = SmolVLMConfig(
        text_config=text | ids | {"vocab_size": len(tokenizer), "tie_word_embeddings": True},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=tower.scale_factor,
        tie_word_embeddings=True,
    )
    config.pad_token_id = tokenizer.pad_token_id
    return config
