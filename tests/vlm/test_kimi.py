"""What Kimi K2.5 has that other families lack: its image processor by PIL, narrow values, and a token behind the vocabulary."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataproto.errors import InvalidConfig, InvalidMedia
from dataproto.vlm import family_of
from dataproto.vlm.families.kimi_k25 import grid_arguments, scaled_size
from helpers.checkpoints import write_checkpoint
from helpers.examples import at_most
from helpers.tiny_models import image_inputs, tiny_config, tiny_model
from helpers.tiny_prompts import tiny_image_processor
from rollout.pretrained import load_image_processor

FAMILY = family_of("kimi_k25")


def navit_resize(*sizes):
    """Transformers' own function, of a module that needs torchvision."""
    source = (Path(transformers.__file__).parent / "models/kimi_k25/image_processing_kimi_k25.py").read_text()
    functions = [each for each in ast.parse(source).body if getattr(each, "name", "") == "navit_resize"]
    names = {"math": math}
    exec(compile(ast.Module(functions, []), "navit_resize", "exec"), names)
    return names["navit_resize"](*sizes)


@settings(max_examples=at_most(50))
@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 300), st.integers(1, 20))
def test_images_are_scaled_as_by_transformers(height, width, max_patches, max_side):
    """Its own size, and how many features that makes."""
    size, filled = navit_resize(height, width, 4, 2, max_patches, max_side)
    assert scaled_size(height, width, 4, max_patches, max_side) == size
    processor = tiny_image_processor("kimi_k25")
    processor.size["max_height"] = max_side
    count = FAMILY.image_tokens(height, width, processor, {"max_patches": max_patches}, tiny_config("kimi_k25"))
    assert count == filled[0] * filled[1] // 64


@settings(max_examples=at_most(15))
@given(st.integers(1, 90), st.integers(1, 90))
def test_patches_are_squares_of_the_image_row_by_row(height, width):
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    processor = tiny_image_processor("kimi_k25")
    made = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    (_, rows, columns), *_ = made["image_grid_thw"].tolist()
    count = FAMILY.image_tokens(height, width, processor, {"max_patches": 256}, tiny_config("kimi_k25"))
    assert len(made["pixel_values"]) == rows * columns == 4 * count
    if scaled_size(height, width, 4, 256, 512) != (height, width):
        assert rows * columns <= 256 + 2 * (rows + columns)  # filled up to whole features
        return
    black = np.zeros((4 * rows, 4 * columns, 3))
    black[:height, :width] = pixels
    for place, patch in enumerate(made["pixel_values"]):
        row, column = 4 * (place // columns), 4 * (place % columns)
        expected = torch.from_numpy(black[row : row + 4, column : column + 4] / 127.5 - 1).permute(2, 0, 1).float()
        torch.testing.assert_close(patch, expected, atol=1e-5, rtol=0)


def test_a_checkpoint_without_a_pil_processor_gets_ours(tmp_path):
    path = write_checkpoint("kimi_k25", tmp_path)
    processor = load_image_processor(path)
    assert processor.backend == "pil"
    assert (processor.patch_size, processor.max_patches) == (4, 256)


def test_limits_of_an_image_are_numbers_of_patches():
    processor = tiny_image_processor("kimi_k25")
    options = FAMILY.media_layout.processor_options
    assert options(processor, None, None) == {"max_patches": 256}
    assert options(processor, None, 1000) == {"max_patches": 62}
    with pytest.raises(InvalidConfig, match="min_pixels=64: images of this family are never enlarged"):
        options(processor, 64, None)
    with pytest.raises(InvalidConfig, match="max_pixels=15: must be at least 16, one patch"):
        options(processor, None, 15)
    with pytest.raises(InvalidMedia, match="height 0 and width 3 is empty"):
        FAMILY.image_tokens(0, 3, processor, {"max_patches": 9}, tiny_config("kimi_k25"))


def test_what_depends_on_grids_alone_is_computed_where_they_are():
    """As for grids in host memory beside a tower on a device."""
    model = tiny_model("kimi_k25")
    media = image_inputs(model.config, (4, 6), (8, 4))
    tower = model.get_submodule(FAMILY.vision_tower)
    found = FAMILY.tower_output(model, media, **grid_arguments(tower, media["image_grid_thw"]))
    assert torch.equal(found, FAMILY.tower_output(model, media))


def test_a_token_behind_the_vocabulary_is_not_banned():
    config = tiny_config("kimi_k25")
    config.video_token_id = config.text_config.vocab_size
    assert FAMILY.banned_ids(config) == (250, 252, 253)


def test_queries_that_are_not_compressed_are_refused():
    config = tiny_config("kimi_k25")
    config.text_config.q_lora_rank = None
    with pytest.raises(InvalidConfig, match="q_lora_rank=None"):
        FAMILY.check_supported(config)
