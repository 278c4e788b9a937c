import io
import zlib
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataproto.chunks import EncodedTextChunk, ImageChunk
from dataproto.errors import InvalidChunk, InvalidPrompt
from helpers.tiny_prompts import tiny_builder
from rollout.prompts import ChunkRenderer

SIZES = [(16, 16), (24, 16), (40, 32)]  # of width and height; 8 pixels a token side
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@cache
def builder(model_type="qwen2_5_vl", **options):
    return tiny_builder(model_type, **options)


@cache
def png(size=(16, 16), colour=(200, 10, 30)):
    buffer = io.BytesIO()
    image = Image.new("RGB", size, colour)
    image.putpixel((1, 1), (0, 0, 0))
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def ids_of(text):
    return builder().encode_text(text)


def chunked(*parts):
    """Strings become text chunks, sizes become images, with the vision tokens of Qwen around them."""
    chunks = []
    for part in parts:
        if isinstance(part, str):
            chunks.append(EncodedTextChunk(ids_of(part)))
        else:
            around = (EncodedTextChunk(ids_of(f"<|vision_{name}|>")) for name in ("start", "end"))
            chunks += [next(around), ImageChunk(png(part), "png"), next(around)]
    return chunks


def sequence(chunks):
    return ChunkRenderer(builder()).sequence(chunks, {})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_chunks_become_the_prompt_that_messages_become(model_type):
    made = builder(model_type)
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "why?"}]
    rows = [
        {"prompt": [{"role": "user", "content": content}], "images": [png(SIZES[0]), png(SIZES[1])]},
        {"prompt": "no picture"},
    ]
    expected = made(rows)
    chunks = [
        chunked("<|im_start|>user\n", SIZES[0], "and", SIZES[1], "why?<|im_end|>\n<|im_start|>assistant\n"),
        chunked("<|im_start|>user\nno picture<|im_end|>\n", "<|im_start|>assistant\n"),
    ]
    renderer = ChunkRenderer(made)
    placed = renderer.placed([renderer.sequence(each, {}) for each in chunks])
    for row, one in enumerate(placed):
        assert torch.equal(one.input_ids, expected["input_ids"][row, -len(one) :])
        assert torch.equal(one.token_types, expected["mm_token_type_ids"][row, -len(one) :])
        assert torch.equal(one.position_ids, expected["position_ids"][row, ..., -len(one) :])
        assert list(one.prompt_ids) == expected["raw_prompt_ids"][row]
    theirs = expected["multi_modal_inputs"][0]
    for name in theirs:
        assert torch.equal(torch.cat([image.inputs[name] for image in placed[0].images]), theirs[name])
    assert [image.image.size for image in placed[0].images] == SIZES[:2]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 290), min_size=1, max_size=12), st.data())
def test_several_text_chunks_equal_one(tokens, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    bounds = [0, *cuts, len(tokens)]
    many = sequence([EncodedTextChunk(tokens[a:b]) for a, b in zip(bounds, bounds[1:])])
    assert many.input_ids.tolist() == list(many.prompt_ids) == tokens


@pytest.mark.parametrize("expected", [3, 5])
def test_wrong_expected_tokens_are_refused(expected):
    text = EncodedTextChunk([1, 2])
    says = rf"chunk 1 \(image\): expected_tokens={expected}, but its 16 x 16 pixels make 4 tokens"
    with pytest.raises(InvalidChunk, match=says):
        sequence([text, ImageChunk(png(), "png", expected_tokens=expected), text])
    assert len(sequence([text, ImageChunk(png(), "png", expected_tokens=4), text])) == 8


def test_an_image_is_processed_once_for_all_sequences_that_show_it():
    renderer, seen = ChunkRenderer(builder()), {}
    inputs = [chunked("a", (16, 16)), chunked("bc", (16, 16)), chunked((24, 16))]
    one, other, third = (renderer.sequence(each, seen).images[0] for each in inputs)
    assert one is other
    assert one.inputs["pixel_values"].shape != third.inputs["pixel_values"].shape


def test_text_may_hold_the_placeholders_id():
    image = builder().media_tokens.image
    found = sequence([EncodedTextChunk([1, image, 2]), ImageChunk(png(), "png"), EncodedTextChunk([3])])
    assert found.token_types.tolist() == [0, 0, 0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (EncodedTextChunk([1, 5000]), r"chunk 1 .encoded_text.: token 1 is 5000, but the model has tokens 0 to"),
        (EncodedTextChunk([-1]), "token 0 is -1"),
        (ImageChunk(b"\x89PNG\r\n\x1a\nbroken", "png"), r"chunk 1 .image.: image .* "),
        (ImageChunk(png()[:60], "png"), r"chunk 1 .image.: image .* is broken"),
        ({"tokens": [1]}, r"chunk 1 .dict.: only text and images are known"),
    ],
)
def test_a_broken_chunk_is_named(chunk, message):
    with pytest.raises(InvalidChunk, match=message):
        sequence([EncodedTextChunk([1]), chunk])


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_an_image_bomb_is_refused_unread(side):
    header = bytearray(png())
    header[16:24] = side.to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    with pytest.raises(InvalidChunk, match=r"chunk 0 .image.: image .* pixels"):
        sequence([ImageChunk(bytes(header), "png")])


def test_an_empty_input_is_refused():
    with pytest.raises(InvalidPrompt, match="empty"):
        sequence([])
