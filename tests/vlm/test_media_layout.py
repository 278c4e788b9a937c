"""The media layout of every family, compared with its image processor."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataproto.errors import InvalidConfig, InvalidRow
from dataproto.vlm import family_of
from helpers.tiny_models import VLM_TYPES, WINDOWED_TYPES, tiny_config
from helpers.tiny_prompts import tiny_builder
from rollout.pretrained import load_image_processor

sizes = st.lists(st.tuples(st.integers(1, 120), st.integers(1, 120)), max_size=3)


def picture(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("model_type", VLM_TYPES)
@given(sizes=sizes, limit=st.sampled_from([None, 300, 1000]))
@settings(max_examples=20)
def test_the_length_from_headers_is_the_length_of_the_prompt(model_type, sizes, limit):
    builder = tiny_builder(
        model_type, max_prompt_length=4096, max_pixels=None if model_type in WINDOWED_TYPES else limit
    )
    row = {"prompt": "<image>" * len(sizes), "images": [picture(*size) for size in sizes]}
    prompt = builder.prepare(row)
    assert builder.prompt_length(row) == len(prompt.input_ids)
    media, config = builder.collate([prompt])["multi_modal_inputs"][0], builder.config
    assert int(prompt.token_types.sum()) == builder.family.feature_counts(media, config)[0]
    assert int(builder.family.grids(media, config).prod(-1).sum()) == 4 * int(prompt.token_types.sum())


@pytest.mark.parametrize("model_type", VLM_TYPES)
def test_an_empty_image_is_named(model_type):
    with pytest.raises(InvalidRow, match=r"row 0: image .* is empty: 0 x 5 pixels"):
        tiny_builder(model_type)([{"prompt": "<image>", "images": [Image.new("RGB", (0, 5))]}])


@pytest.mark.parametrize("model_type", ["internvl", "idefics3"])
def test_a_video_is_refused_where_there_are_none(model_type):
    message = f"row 0: models of type {model_type} take no videos; show a video's frames as images"
    with pytest.raises(InvalidRow, match=message):
        tiny_builder(model_type)([{"prompt": "<video>", "videos": [[picture(8, 8)]]}])
    assert family_of(model_type).grids({}, tiny_config(model_type)).shape == (0, 3)


def test_an_image_processor_without_a_pil_backend_is_named(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Sam2ImageProcessor"}')
    with pytest.raises(InvalidConfig, match=r"only for torchvision|Sam2ImageProcessor has no pil backend"):
        load_image_processor(tmp_path)


@pytest.mark.parametrize("model_type", VLM_TYPES)
def test_placeholders_define_token_types(model_type):
    config, family = tiny_config(model_type), family_of(model_type)
    types = family.token_types(torch.tensor([[1, config.image_token_id, 2]]), config)
    assert types.tolist() == [[0, 1, 0]]
    assert config.image_token_id in family.banned_ids(config)
