"""A small Qwen2.5-VL of the Hugging Face class, with tokenizer and image processor, saved as an ordinary checkpoint."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dataproto.errors import WAY_OUT, FileNotWritten
from recipes.synthetic import sample_texts
from recipes.tiny.tokenizer import (
    END_OF_TEXT,
    END_OF_TURN,
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    train_tokenizer,
)

# These make white paper a zero input. With CLIP's mean and standard deviation GRPO learns nothing.
WHITE, CONTRAST = (1.0, 1.0, 1.0), (0.5, 0.5, 0.5)
WEIGHTS, FILES = "model.safetensors", ("config.json", "tokenizer.json", "preprocessor_config.json")
"""Files without which a checkpoint of `make_tiny_model` cannot be loaded."""


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model; by default it has about 0.7 million parameters."""

    vocabulary: int = 512
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    vision_width: int = 64
    vision_depth: int = 2
    vision_heads: int = 2
    vision_mlp: int = 2  # width of the tower's MLPs, over its own
    patch: int = 14  # pixels; a visual token covers 2 x 2 patches
    text_std: float = 0.02  # of the decoder's initial weights
    vision_std: float = 0.1  # of the vision tower's initial weights; with Hugging Face's 0.02 GRPO learns nothing
    min_pixels: int = 56 * 56
    max_pixels: int = 280 * 280


def make_tiny_model(
    path: str | Path, seed: int = 0, config: TinyConfig | None = None, texts: Iterable[str] | None = None
) -> Path:
    """Writes a randomly initialised checkpoint to the directory ``path``; equal arguments give equal weights.

    It loads with ``Qwen2_5_VLForConditionalGeneration.from_pretrained``, ``AutoTokenizer`` and ``AutoImageProcessor``.

    Args:
        texts: prompts and answers on which the tokenizer is trained; by default those of the drawn problems.

    Returns:
        ``path``.
    """
    config = config or TinyConfig()
    path = make_tiny_processors(path, config, texts)
    model = random_model(Qwen2_5_VLConfig.from_pretrained(path), config.vision_std, seed)
    model.generation_config = GenerationConfig.from_pretrained(path)
    model.save_pretrained(path)
    return path


def make_tiny_processors(
    path: str | Path, config: TinyConfig | None = None, texts: Iterable[str] | None = None
) -> Path:
    """Writes all of `make_tiny_model` but the weights: configuration, tokenizer and image processor."""
    config = config or TinyConfig()
    path = Path(path)
    tokenizer = train_tokenizer(_corpus(sample_texts() if texts is None else texts), config.vocabulary)
    model_config(config, tokenizer).save_pretrained(path)
    _generation_config(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    Qwen2VLImageProcessorPil(
        patch_size=config.patch,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        image_mean=WHITE,
        image_std=CONTRAST,
    ).save_pretrained(path)
    return path


def is_whole(path: Path) -> bool:
    """Whether a directory has all files of a checkpoint of `make_tiny_model`, none of them cut."""
    try:
        for name in FILES:
            json.loads((path / name).read_text(encoding="utf-8"))
        with safe_open(path / WEIGHTS, framework="pt"):
            return True
    except (OSError, ValueError, SafetensorError):
        return False


def model_of_run(path: Path, keep: bool, make: Callable[[Path], object]) -> Path:
    """The small model of a run at ``path``, made whole or not at all.

    Args:
        keep: leave the one that is there, if it is whole: the run is resumed. A new run makes its own, since an earlier attempt
            may have had another seed.
        make: writes a checkpoint to the directory that it gets.

    Raises:
        FileNotWritten: the disk is full, say.
    """
    if keep and is_whole(path):
        return path
    draft = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        make(draft)
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
    except (OSError, SafetensorError) as error:
        raise FileNotWritten(f"the small model could not be written to {path}: {error}{WAY_OUT}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def random_model(config: Qwen2_5_VLConfig, vision_std: float, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """A float32 model with Hugging Face's initialisation, except the vision tower's matrices, which have ``vision_std``.

    The global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float()
        with torch.no_grad():
            for parameter in model.model.visual.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=vision_std)
    return model


def model_config(config: TinyConfig, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """The Hugging Face configuration, with heads of 32 (a size that vLLM's CPU build supports) and windows of 112 pixels."""
    head = config.hidden // config.heads
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden,
        "intermediate_size": 2 * config.hidden,
        "num_hidden_layers": config.layers,
        "initializer_range": config.text_std,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads // 2,
        "max_position_embeddings": 32_768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16],
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": config.vision_depth,
        "hidden_size": config.vision_width,
        "out_hidden_size": config.hidden,
        "intermediate_size": config.vision_mlp * config.vision_width,
        "num_heads": config.vision_heads,
        "patch_size": config.patch,
        "window_size": 112,
        "fullatt_block_indexes": [config.vision_depth - 1],
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **_media_ids(tokenizer))


def _media_ids(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    names = {
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _generation_config(tokenizer: Qwen2Tokenizer) -> GenerationConfig:
    ends = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    return GenerationConfig(do_sample=True, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)


def _corpus(texts: Iterable[str]) -> Iterable[str]:
    """``texts``, and the other parts of prompts and answers between special tokens."""
    fixed = ["system\nYou are a helpful assistant.", "user\n", "assistant\n", "look", " \\boxed{x}"]
    return [*(100 * fixed), *texts]
