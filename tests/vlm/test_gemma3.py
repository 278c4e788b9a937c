"""What is Gemma 3's own: images of one size, line breaks around them, one-dimensional positions; from files to greedy tokens as
Hugging Face.
"""

import io
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from dataproto.chunks import EncodedTextChunk, ImageChunk
from dataproto.errors import InvalidChunk, InvalidConfig, InvalidRow, MediaMismatch
from dataproto.vlm import family_of
from helpers.tiled_models import tiled_rows, write_with_pictures
from helpers.tiny_models import forward_inputs, tiny_config
from helpers.tiny_prompts import tiny_builder, tiny_tokenizer
from rollout.engine import SamplingParams
from rollout.hf.engine import HFEngine
from rollout.pretrained import load_image_processor
from rollout.prompts import ChunkRenderer, PromptBuilder
from rollout.responses import attach_responses, build_requests

FAMILY, CONFIG = family_of("gemma3"), tiny_config("gemma3")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_with_pictures("gemma3", tmp_path_factory.mktemp("gemma3"))


def test_prompts_are_hugging_faces(checkpoint):
    """Its processor puts the image's tokens, and line breaks, into the text before the text is tokenized."""
    builder, rows = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=512), tiled_rows(checkpoint)
    batch, images, tokenizer = builder(rows), load_image_processor(checkpoint), builder.tokenizer
    tokens = SimpleNamespace(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>", boi_token_id=0
    )
    processor = Gemma3Processor.__new__(Gemma3Processor)
    sequence = f"\n\n{tokens.boi_token}{tokens.image_token * 4}{tokens.eoi_token}\n\n"
    processor.full_image_sequence = sequence
    for row, source in enumerate(rows):
        media = batch["multi_modal_data"][row].get("image", [])
        made = images(images=media, do_pan_and_scan=False, return_tensors="pt") if media else {}
        pieces = source["prompt"].split("<image>")
        text = pieces[0].strip()
        for number, piece in enumerate(pieces[1:]):
            text += processor.replace_image_token(made, number) + piece.strip()
        whole = f"<start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n"
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        kept = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row, kept].tolist() == ids
        assert builder.prompt_length(source) == len(ids)
        image = tokenizer.convert_tokens_to_ids(tokens.image_token)
        assert batch["mm_token_type_ids"][row, kept].tolist() == [int(token == image) for token in ids]
        start = tokenizer.convert_tokens_to_ids(tokens.boi_token)
        assert batch["raw_prompt_ids"][row].count(start) == len(media)
        inputs = batch["multi_modal_inputs"][row]
        assert set(inputs) == ({"pixel_values"} if media else set())
        if media:
            assert torch.equal(inputs["pixel_values"], made["pixel_values"])


def test_line_breaks_between_two_images_are_one_token():
    tokenizer, builder = tiny_tokenizer("gemma3"), tiny_builder("gemma3")
    picture = Image.new("RGB", (9, 9))
    ids = builder.prepare({"prompt": "<image><image>", "images": [picture, picture]}).input_ids.tolist()
    end, start, four = (tokenizer.convert_tokens_to_ids(t) for t in ("<end_of_image>", "<start_of_image>", "\n\n\n\n"))
    assert ids[ids.index(end) : ids.index(end) + 3] == [end, four, start]


def test_image_chunks_are_the_prompt_of_the_whole_text_or_refused():
    """A tokenizer would make one token of the line breaks around an image and those beside it; chunks keep their tokens."""
    builder, tokenizer, png = tiny_builder("gemma3"), tiny_tokenizer("gemma3"), io.BytesIO()
    Image.new("RGB", (9, 9)).save(png, "PNG")
    image, renderer = ImageChunk(png.getvalue(), "png"), ChunkRenderer(builder)

    def text(written):
        return EncodedTextChunk(tokenizer(written, add_special_tokens=False)["input_ids"])

    shown = "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
    whole = tokenizer(f"see{shown}why?\n", add_special_tokens=False)["input_ids"]
    assert renderer.sequence([text("see"), image, text("why?\n")], {}).input_ids.tolist() == whole
    for chunks, number in (
        ([text("<start_of_turn>user\n"), image, text("why?")], 1),
        ([text("see"), image, EncodedTextChunk([]), text("\nwhy?")], 1),
        ([image, image], 0),
    ):
        says = f"chunk {number} is an image, and models of type gemma3 join the line breaks around it"
        with pytest.raises(InvalidChunk, match=says):
            renderer.sequence(chunks, {})


@pytest.mark.slow
def test_greedy_tokens_are_those_of_a_forward_pass_without_cache(checkpoint):
    """Rows are longer than the window, and so is the cache of the layers that have one."""
    engine, rows = HFEngine(str(checkpoint)), tiled_rows(checkpoint)
    prompts = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=512)(rows)
    sampling = SamplingParams(temperature=0, max_tokens=9)
    completions = list(engine.generate(build_requests(prompts, sampling), sampling))
    data = attach_responses(prompts, completions, sampling, engine.family, pad_token_id=0)
    for row in range(len(prompts)):
        kept = prompts["attention_mask"][row].bool()
        ids, types = prompts["input_ids"][row, kept][None], prompts["mm_token_type_ids"][row, kept][None]
        length = ids.shape[1]
        for _ in range(int(data["response_mask"][row].sum())):
            with torch.no_grad():
                found = engine.model(ids, **forward_inputs(engine.model, types, prompts["multi_modal_inputs"][row]))
            token = found.logits[0, -1].index_fill(0, torch.tensor(engine.banned_ids), -torch.inf).argmax()
            ids, types = torch.cat([ids, token[None, None]], 1), torch.cat([types, types.new_zeros(1, 1)], 1)
        assert data["responses"][row, : ids.shape[1] - length].tolist() == ids[0, length:].tolist()


@pytest.mark.parametrize("limits", [{"max_pixels": 300}, {"min_pixels": 9}])
def test_limits_of_pixels_are_refused(limits):
    with pytest.raises(InvalidConfig, match="see every image in 16 x 16 pixels; leave the limits out"):
        tiny_builder("gemma3", **limits)


def test_impossible_requests_are_named():
    for token in ("<start_of_image>", "<end_of_image>", "<image_soft_token>"):
        with pytest.raises(InvalidRow, match=f"the text contains {token}"):
            tiny_builder("gemma3")([{"prompt": f"a {token}"}])
    with pytest.raises(MediaMismatch, match=r"row 1: images \(1, 3, 16, 20\) are not \(N, 3, 16, 16\)"):
        FAMILY.distinct_media([{}, {"pixel_values": torch.zeros(1, 3, 16, 20)}], CONFIG)


def test_positions_are_ranks_among_attended_tokens():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    positions = FAMILY.position_ids(torch.zeros_like(mask), mask, None, None, None, CONFIG)
    assert positions.tolist() == [[0, 0, 1, 2], [0, 1, 0, 0]]
