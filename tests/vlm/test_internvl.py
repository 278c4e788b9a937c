"""What is InternVL's own: tiles, text around images, one-dimensional positions; from files to greedy tokens as Hugging Face."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.internvl.processing_internvl import InternVLProcessor

from dataproto.errors import InvalidConfig, InvalidMedia, InvalidRow, MediaMismatch
from dataproto.vlm import family_of
from helpers.tiled_models import check_greedy_tokens, check_prompts, check_wrong_tiles, tiled_rows, write_with_pictures
from helpers.tiny_models import IMAGE, encode_text, image_inputs, tiny_config
from helpers.tiny_prompts import tiny_builder, tiny_image_processor
from rollout.hf.engine import HFEngine
from rollout.pretrained import load_image_processor
from rollout.prompts import PromptBuilder

FAMILY, CONFIG = family_of("internvl"), tiny_config("internvl")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_with_pictures("internvl", tmp_path_factory.mktemp("internvl"))


def test_prompts_are_hugging_faces(checkpoint):
    """Its processor repeats placeholders in the text, between its start and end tokens, before the text is tokenized."""
    builder, rows = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=512), tiled_rows(checkpoint)
    batch, images = builder(rows), load_image_processor(checkpoint)
    processor = SimpleNamespace(
        image_seq_length=4, start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>"
    )
    texts, seen = [], []
    for row, source in enumerate(rows):
        pieces, media = source["prompt"].split("<image>"), batch["multi_modal_data"][row].get("image", [])
        made = images(images=media, crop_to_patches=True, return_tensors="pt") if media else {}
        text = pieces[0]
        for number, piece in enumerate(pieces[1:]):
            text += f"{InternVLProcessor.replace_image_token(processor, made, number)}\n{piece}"
        texts.append(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        assert batch["raw_prompt_ids"][row].count(builder.config.image_token_id) == len(media)
        inputs = batch["multi_modal_inputs"][row]
        assert set(inputs) == ({"pixel_values"} if media else set())
        if media:
            assert torch.equal(inputs["pixel_values"], made["pixel_values"])
            seen += made["num_patches"].tolist()
    check_prompts(builder, texts, batch)
    assert len(set(seen)) > 1  # images of one tile and of several
    model = HFEngine(str(checkpoint)).model
    expected = model._prepare_position_ids_for_generation(None, dict(batch.batch.items()))
    assert torch.equal(batch["position_ids"], expected)


def test_greedy_tokens_are_those_of_generate(checkpoint):
    check_greedy_tokens(checkpoint, tiled_rows(checkpoint))


@pytest.mark.parametrize(
    ("least", "most", "tiles"),
    [
        (None, None, (1, 6)),
        (None, 4 * 256, (1, 4)),
        (2 * 256, 4 * 256 + 255, (2, 4)),
        (200, 255, (1, 1)),
        (257, 511, (1, 1)),
    ],
)
def test_pixel_limits_are_numbers_of_tiles(least, most, tiles):
    options = FAMILY.media_layout.processor_options(tiny_image_processor("internvl"), least, most)
    assert options == {"crop_to_patches": True, "min_patches": tiles[0], "max_patches": tiles[1]}


def test_impossible_requests_are_named():
    processor = tiny_image_processor("internvl")
    with pytest.raises(InvalidConfig, match="min_pixels=9 and max_pixels=8"):
        FAMILY.media_layout.processor_options(processor, 9, 8)
    with pytest.raises(InvalidMedia, match="height 0 and width 5 is empty"):
        FAMILY.image_tokens(0, 5, processor, FAMILY.media_layout.processor_options(processor, None, None), CONFIG)
    for token in ("<img>", "</img>", "<IMG_CONTEXT>"):
        with pytest.raises(InvalidRow, match=f"the text contains {token}"):
            tiny_builder("internvl")([{"prompt": f"a {token}"}])


def test_images_are_distinguished_only_if_separate():
    ids = [IMAGE, 9, IMAGE]
    two = [image_inputs(CONFIG, (4, 8)), image_inputs(CONFIG, (4, 4))]  # 2 tiles and 1, of 4 tokens each
    expanded, types = FAMILY.expand(ids, two, CONFIG, encode_text=encode_text)
    start, end = encode_text("<img>"), encode_text("</img>")
    assert expanded.tolist() == [*start, *[IMAGE] * 8, *end, 9, *start, *[IMAGE] * 4, *end]
    assert types.tolist() == [0, *[1] * 8, 0, 0, 0, *[1] * 4, 0]
    joined = {"pixel_values": torch.cat([each["pixel_values"] for each in two])}
    with pytest.raises(MediaMismatch, match="2 image placeholders in the prompt, but 1 images"):
        FAMILY.expand(ids, joined, CONFIG, encode_text=encode_text)
    with pytest.raises(MediaMismatch, match="needs `encode_text`"):
        FAMILY.expand(ids, two, CONFIG)


def test_tiles_of_another_size_are_named_with_their_row():
    check_wrong_tiles("internvl")


def test_positions_are_ranks_among_attended_tokens():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    positions = FAMILY.position_ids(torch.zeros_like(mask), mask, None, None, None, CONFIG)
    assert positions.tolist() == [[0, 0, 1, 2], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert FAMILY.extend_positions(positions, mask, 2).tolist() == [[3, 4], [2, 3], [0, 1]]
