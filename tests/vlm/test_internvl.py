"""What is InternVL's own: tiles, text around images, one-dimensional positions; from files to greedy tokens as Hugging Face."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.internvl.processing_internvl import InternVLProcessor

from dataproto.errors import InvalidConfig, InvalidMedia, InvalidRow, MediaMismatch
from dataproto.vlm import family_of
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import IMAGE, TILE, encode_text, image_inputs, tiny_config
from helpers.tiny_prompts import tiny_builder, tiny_image_processor
from rollout.engine import SamplingParams
from rollout.hf.hf_engine import HFEngine
from rollout.prompts import PromptBuilder, load_image_processor
from rollout.responses import attach_responses, build_requests

FAMILY, CONFIG = family_of("internvl"), tiny_config("internvl")


def picture(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("internvl")
    write_checkpoint("internvl", path)
    for name, image in {"wide": picture(50, 20), "tall": picture(9, 40, 1), "square": picture(16, 16, 2)}.items():
        image.save(path / f"{name}.png")
    return path


def rows_of(path):
    return [
        {"prompt": "<image>Find x.", "images": ["wide.png"], "media_root": path},
        {"prompt": "Words alone."},
        {"prompt": "<image> and <image>", "images": ["tall.png", "square.png"], "media_root": path},
    ]


def test_prompts_are_hugging_faces(checkpoint):
    """Its processor repeats placeholders in the text, between its start and end tokens, before the text is tokenized."""
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=512)
    batch = builder(rows_of(checkpoint))
    images = load_image_processor(checkpoint)
    processor = SimpleNamespace(
        image_seq_length=4, start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>"
    )
    seen = []
    for row, source in enumerate(rows_of(checkpoint)):
        pieces, media = source["prompt"].split("<image>"), batch["multi_modal_data"][row].get("image", [])
        made = images(images=media, crop_to_patches=True, return_tensors="pt") if media else {}
        text = pieces[0]
        for number, piece in enumerate(pieces[1:]):
            text += f"{InternVLProcessor.replace_image_token(processor, made, number)}\n{piece}"
        ids = builder.tokenizer(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        kept = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row, kept].tolist() == ids
        placeholder = builder.config.image_token_id
        assert batch["mm_token_type_ids"][row, kept].tolist() == [int(i == placeholder) for i in ids]
        assert batch["raw_prompt_ids"][row].count(placeholder) == len(media)
        inputs = batch["multi_modal_inputs"][row]
        assert set(inputs) == ({"pixel_values"} if media else set())
        if media:
            assert torch.equal(inputs["pixel_values"], made["pixel_values"])
            seen += made["num_patches"].tolist()
    assert len(set(seen)) > 1  # images of one tile and of several
    model = HFEngine(str(checkpoint)).model
    expected = model._prepare_position_ids_for_generation(None, dict(batch.batch.items()))
    assert torch.equal(batch["position_ids"], expected)


def test_greedy_tokens_are_those_of_generate(checkpoint):
    engine = HFEngine(str(checkpoint))
    prompts = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=512)(rows_of(checkpoint))
    sampling = SamplingParams(temperature=0, max_tokens=5)
    completions = list(engine.generate(build_requests(prompts, sampling), sampling))
    data = attach_responses(prompts, completions, sampling, engine.family, pad_token_id=0)
    for row in range(len(prompts)):
        ids = prompts["input_ids"][row, prompts["attention_mask"][row].bool()][None]
        options = {"do_sample": False, "max_new_tokens": 5, "suppress_tokens": list(engine.banned_ids)}
        whole = engine.model.generate(
            ids, attention_mask=torch.ones_like(ids), **prompts["multi_modal_inputs"][row], **options
        )
        expected = whole[0, ids.shape[1] :].tolist()
        assert data["responses"][row, : len(expected)].tolist() == expected


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
    wrong = {"pixel_values": torch.zeros(2, 3, TILE, TILE + 4)}
    with pytest.raises(MediaMismatch, match=r"row 1: image tiles \(2, 3, 16, 20\) are not \(tiles, 3, 16, 16\)"):
        FAMILY.distinct_media([{}, wrong], CONFIG)


def test_positions_are_ranks_among_attended_tokens():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    positions = FAMILY.position_ids(torch.zeros_like(mask), mask, None, None, None, CONFIG)
    assert positions.tolist() == [[0, 0, 1, 2], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert FAMILY.extend_positions(positions, mask, 2).tolist() == [[3, 4], [2, 3], [0, 1]]
