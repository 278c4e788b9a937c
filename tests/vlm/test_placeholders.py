"""Token counts and expansion against Hugging Face's processors."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from dataproto.errors import InvalidMedia, MediaMismatch
from dataproto.vlm import MediaTokens, family_of, frame_seconds, image_grid
from helpers.tiny_models import END, IMAGE, MROPE_TYPES, START, VIDEO, tiny_config

TOKENS = {"<|vision_start|>": START, "<|vision_end|>": END, "<|video_pad|>": VIDEO}


def characters(text):
    """Ids of a text in which every character is a token, special tokens being one each."""
    parts = re.split("(" + "|".join(map(re.escape, TOKENS)) + ")", text)
    return [i for part in parts for i in ([TOKENS[part]] if part in TOKENS else map(ord, part))]


@given(
    height=st.integers(1, 3000), width=st.integers(1, 3000), patch=st.sampled_from([14, 16]), least=st.integers(1, 90)
)
@example(height=1, width=200, patch=14, least=56)
@example(height=200, width=1, patch=16, least=1)
@example(height=42, width=70, patch=14, least=1)  # halves round to even
@example(height=3000, width=15, patch=14, least=1)
@settings(max_examples=300)
def test_token_counts_equal_the_processors_arithmetic(height, width, patch, least):
    smallest, largest = least**2, 500**2
    processor = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, min_pixels=smallest, max_pixels=largest)
    config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=patch, spatial_merge_size=2))
    family = family_of("qwen2_5_vl")
    options = family.media_layout.processor_options(processor, None, None)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="aspect ratio"):
            processor.get_number_of_image_patches(height, width)
        with pytest.raises(InvalidMedia, match=f"height {height} and width {width}"):
            family.image_tokens(height, width, processor, options, config)
    else:
        ours = family.image_tokens(height, width, processor, options, config)
        assert ours * 4 == processor.get_number_of_image_patches(height, width)


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (28, 28), (41, 43), (600, 20), (20, 600), (301, 299), (640, 480)])
def test_grids_equal_those_of_processed_pixels(size):
    width, height = size
    processor = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, min_pixels=56 * 56, max_pixels=200 * 200)
    out = processor(images=[Image.new("RGB", size)], return_tensors="pt")
    assert out["image_grid_thw"].tolist() == [[1, *image_grid(height, width, 56 * 56, 200 * 200, 14, 2)]]


@pytest.mark.parametrize(("height", "width"), [(0, 5), (5, 0), (201, 1), (1, 500)])
def test_images_of_absurd_shape_are_refused(height, width):
    with pytest.raises(InvalidMedia, match=f"height {height} and width {width}"):
        image_grid(height, width, 1, 10**6, 14, 2)


@pytest.mark.parametrize("model_type", MROPE_TYPES)
def test_images_expand_to_one_placeholder_a_feature(model_type):
    family, config = family_of(model_type), tiny_config(model_type)
    media = {"image_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 6]])}
    ids, types = family.expand([9, START, IMAGE, END, 8, START, IMAGE, END], media, config)
    assert ids.tolist() == [9, START, IMAGE, IMAGE, END, 8, START, *[IMAGE] * 6, END]
    assert types.tolist() == [0, 0, 1, 1, 0, 0, 0, *[1] * 6, 0]
    assert (ids.dtype, types.dtype) == (np.int64, np.int8)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_a_video_expands_in_place(model_type):
    family, config = family_of(model_type), tiny_config(model_type)
    media = {"image_grid_thw": torch.tensor([[1, 2, 2]]), "video_grid_thw": torch.tensor([[3, 2, 4]])}
    ids, types = family.expand([START, VIDEO, END, START, IMAGE, END], media, config)
    assert ids.tolist() == [START, *[VIDEO] * 6, END, START, IMAGE, END]
    assert types.tolist() == [0, *[2] * 6, 0, 0, 1, 0]


@pytest.mark.parametrize("indices", [[0, 12, 24, 36], [0, 5, 11]])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe"])
def test_frames_of_a_video_are_expanded_as_in_hugging_face(model_type, indices):
    family, config = family_of(model_type), tiny_config(model_type)
    grid = torch.tensor([[2, 4, 2]])
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
    )
    processor._calculate_timestamps = lambda *args: Qwen3VLProcessor._calculate_timestamps(processor, *args)
    metadata = SimpleNamespace(fps=24.0, frames_indices=list(indices))
    expected = Qwen3VLProcessor.replace_video_token(
        processor, {"video_grid_thw": grid, "video_metadata": [metadata]}, 0
    )
    seconds = [frame_seconds(indices, 24.0, 2)]
    prompt = [9, START, VIDEO, END, 8]
    ids, types = family.expand(prompt, {"video_grid_thw": grid}, config, encode_text=characters, seconds=seconds)
    assert ids.tolist() == [9, *characters(expected), 8]
    assert types.tolist() == [2 * (i == VIDEO) for i in ids]
    bare, _ = family.expand([9, VIDEO, 8], {"video_grid_thw": grid}, config, encode_text=characters, seconds=seconds)
    assert bare.tolist() == ids.tolist()


def test_two_videos_and_an_image_between():
    family, config = family_of("qwen3_vl"), tiny_config("qwen3_vl")
    media = {"image_grid_thw": torch.tensor([[1, 2, 2]]), "video_grid_thw": torch.tensor([[1, 2, 4], [2, 2, 2]])}
    prompt = [START, VIDEO, END, START, IMAGE, END, START, VIDEO, END]
    ids, types = family.expand(
        prompt, media, config, encode_text=lambda text: [len(text)], seconds=[[0.0], [1.0, 10.0]]
    )
    frame = [START, VIDEO, END]
    assert ids.tolist() == [13, START, VIDEO, VIDEO, END, START, IMAGE, END, 13, *frame, 14, *frame]
    assert types.tolist() == [0, 0, 2, 2, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 0]


@pytest.mark.parametrize("grid", [None, torch.tensor([[1, 2, 2], [1, 2, 2]])])
def test_markers_and_media_must_agree(grid):
    family, config = family_of("qwen2_vl"), tiny_config("qwen2_vl")
    count = 0 if grid is None else 2
    with pytest.raises(MediaMismatch, match=f"1 image placeholders in the prompt, but {count} images"):
        family.expand([1, IMAGE], {} if grid is None else {"image_grid_thw": grid}, config)
    with pytest.raises(MediaMismatch, match="1 video placeholders in the prompt, but 0 videos"):
        family.expand([1, VIDEO], {}, config)


def test_frame_times_are_asked_for_and_checked():
    family, config = family_of("qwen3_vl"), tiny_config("qwen3_vl")
    media = {"video_grid_thw": torch.tensor([[2, 2, 2]])}
    with pytest.raises(MediaMismatch, match="encode_text"):
        family.expand([VIDEO], media, config)
    with pytest.raises(MediaMismatch, match=r"videos of \[2\] frames, but times for \[1\]"):
        family.expand([VIDEO], media, config, encode_text=characters, seconds=[[0.0]])
    with pytest.raises(MediaMismatch, match="0 video placeholders in the prompt, but 1 videos"):
        family.expand([1], media, config, encode_text=characters, seconds=[[0.0, 1.0]])


def test_banned_ids_are_the_media_tokens():
    family, config = family_of("qwen2_5_vl"), tiny_config("qwen2_5_vl")
    assert family.media_tokens(config) == MediaTokens(image=IMAGE, video=VIDEO, vision_start=START, vision_end=END)
    assert family.banned_ids(config) == (IMAGE, VIDEO, START, END)
