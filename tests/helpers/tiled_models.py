"""Rows with pictures of several tiles, and what models with tiles (InternVL, Idefics3, SmolVLM) must do with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto.errors import MediaMismatch
from dataproto.vlm import family_of
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import TILE, forward_media, image_inputs, tiny_config
from rollout.engine import SamplingParams
from rollout.hf.engine import HFEngine
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses, build_requests


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def write_with_pictures(model_type: str, path: Path) -> Path:
    """A checkpoint with the pictures of `tiled_rows` beside it."""
    write_checkpoint(model_type, path)
    for name, image in {"wide": picture(50, 20), "tall": picture(9, 40, 1), "square": picture(16, 16, 2)}.items():
        image.save(path / f"{name}.png")
    return path


def tiled_rows(path: Path) -> list[dict[str, Any]]:
    """One picture, none, and two."""
    return [
        {"prompt": "<image>Find x.", "images": ["wide.png"], "media_root": path},
        {"prompt": "Words alone."},
        {"prompt": "<image> and <image>", "images": ["tall.png", "square.png"], "media_root": path},
    ]


def check_prompts(builder: PromptBuilder, texts: list[str], batch: Any) -> None:
    """Each row of the batch has the tokens of its text, in which Hugging Face's processor has repeated the placeholders."""
    placeholder = builder.config.image_token_id
    for row, text in enumerate(texts):
        ids, kept = builder.tokenizer(text)["input_ids"], batch["attention_mask"][row].bool()
        assert batch["input_ids"][row, kept].tolist() == ids
        assert batch["mm_token_type_ids"][row, kept].tolist() == [int(token == placeholder) for token in ids]


def check_greedy_tokens(path: Path, rows: list[dict[str, Any]]) -> None:
    """Our engine samples the tokens of Hugging Face's ``generate``, which gets each row alone."""
    engine = HFEngine(str(path))
    prompts = PromptBuilder.from_pretrained(path, max_prompt_length=512)(rows)
    sampling = SamplingParams(temperature=0, max_tokens=5)
    completions = list(engine.generate(build_requests(prompts, sampling), sampling))
    data = attach_responses(prompts, completions, sampling, engine.family, pad_token_id=0)
    names = engine.family.media_layout.names("image")
    for row in range(len(prompts)):
        ids = prompts["input_ids"][row, prompts["attention_mask"][row].bool()][None]
        options = {"do_sample": False, "max_new_tokens": 5, "suppress_tokens": list(engine.banned_ids)}
        media = {name: value for name, value in prompts["multi_modal_inputs"][row].items() if name in names}
        whole = engine.model.generate(
            ids, attention_mask=torch.ones_like(ids), **forward_media(engine.model, media), **options
        )
        expected = whole[0, ids.shape[1] :].tolist()
        assert data["responses"][row, : len(expected)].tolist() == expected


def check_wrong_tiles(model_type: str) -> None:
    """Tiles of another size are named with their row."""
    config = tiny_config(model_type)
    inputs = image_inputs(config, (4, 8))
    shape = [*inputs["pixel_values"].shape[:-1], TILE + 4]
    found, known = ((*shape[:-2], height, width) for height, width in ((TILE, TILE + 4), (TILE, TILE)))
    says = rf"row 1: images \({', '.join(map(str, found))}\) are not \(N, {', '.join(map(str, known[1:]))}\)"
    with pytest.raises(MediaMismatch, match=says):
        family_of(model_type).distinct_media([{}, inputs | {"pixel_values": torch.zeros(shape)}], config)
