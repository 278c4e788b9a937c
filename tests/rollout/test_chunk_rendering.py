import io
import zlib
from functools import cache

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataproto.chunks import Datum, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk, ModelInput
from dataproto.errors import InvalidRow
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


def ids_of(text, model_type="qwen2_5_vl"):
    return builder(model_type).encode_text(text)


def chunked(*parts, wrap=ModelInput, text=EncodedTextChunk, image=ImageChunk):
    """Strings become text chunks, sizes become images, with the vision tokens of Qwen around them."""
    chunks = []
    for part in parts:
        if isinstance(part, str):
            chunks.append(text(tokens=ids_of(part)))
        else:
            chunks += [
                text(tokens=ids_of("<|vision_start|>")),
                image(data=png(part), format="png"),
                text(tokens=ids_of("<|vision_end|>")),
            ]
    return wrap(chunks=chunks)


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
    prompts = ChunkRenderer(made).prompts(chunks)
    for name in ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids"):
        assert torch.equal(prompts[name], expected[name]), name
    assert list(prompts["raw_prompt_ids"]) == list(expected["raw_prompt_ids"])
    for ours, theirs in zip(prompts["multi_modal_inputs"], expected["multi_modal_inputs"]):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [image.size for image in prompts["multi_modal_data"][0]["image"]] == SIZES[:2]


def test_tinker_chunks_become_the_same_as_ours():
    parts = ("look ", SIZES[0], " and ", SIZES[2], "!")
    ours = chunked(*parts)
    theirs = chunked(*parts, wrap=tinker.ModelInput, text=tinker.EncodedTextChunk, image=tinker.types.ImageChunk)
    renderer = ChunkRenderer(builder())
    a, b = renderer.prompts([ours]), renderer.prompts([theirs])
    assert torch.equal(a["input_ids"], b["input_ids"])
    assert torch.equal(a["position_ids"], b["position_ids"])
    assert renderer.length(ours) == renderer.length(theirs) == a["input_ids"].shape[1]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 290), min_size=1, max_size=12), st.data())
def test_several_text_chunks_equal_one(tokens, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    bounds = [0, *cuts, len(tokens)]
    pieces = ModelInput([EncodedTextChunk(tokens[a:b]) for a, b in zip(bounds, bounds[1:])])
    renderer = ChunkRenderer(builder())
    one, many = renderer.prompts([ModelInput.from_ints(tokens)]), renderer.prompts([pieces])
    assert torch.equal(one["input_ids"], many["input_ids"])
    assert one["raw_prompt_ids"][0] == many["raw_prompt_ids"][0] == tokens


def datum_of(model_input, targets, **inputs):
    return Datum(model_input, {"target_tokens": targets, **inputs})


def supervised(model_input, learnt, more=(), **inputs):
    """A datum that continues with the tokens ``more`` and learns the targets where ``learnt`` is 1."""
    row = ChunkRenderer(builder()).prompts([model_input])
    ids = row["input_ids"][0].tolist()
    ids = ids[1:] + list(more)
    return datum_of(model_input, ids, weights=learnt, **inputs)


def test_a_datum_becomes_a_training_row():
    model_input = chunked("see ", SIZES[0], "it is re")
    length = ChunkRenderer(builder()).length(model_input)
    last = ids_of("d")[0]
    weights = [0.0] * (length - 2) + [1.0, 0.5]
    batch = ChunkRenderer(builder()).rows([supervised(model_input, weights, [last])])
    prompt = ChunkRenderer(builder()).prompts([model_input])
    assert batch["input_ids"][0].tolist() == [*prompt["input_ids"][0].tolist(), last]
    assert batch["mm_token_type_ids"][0].tolist() == [*prompt["mm_token_type_ids"][0].tolist(), 0]
    assert torch.equal(batch["position_ids"][:, :, :-1], prompt["position_ids"])
    assert batch["response_mask"][0].tolist() == [0] * (length - 2) + [1, 1]
    assert batch["loss_weights"][0].tolist() == weights
    assert torch.equal(batch["multi_modal_inputs"][0]["pixel_values"], prompt["multi_modal_inputs"][0]["pixel_values"])


def test_loss_inputs_become_columns_of_the_targets():
    short, long = ModelInput.from_ints([5, 6]), ModelInput.from_ints([7, 8, 9])
    batch = ChunkRenderer(builder()).rows(
        [
            datum_of(long, [8, 9, 10], logprobs=[0, -1.0, -2.0], advantages=[0, 3.0, 4.0], mask=[0, 1, 1]),
            datum_of(short, [6, 7], logprobs=[-0.5, -0.25], advantages=[1.0, 0.0], mask=[1, 0]),
        ]
    )
    assert batch["input_ids"].tolist()[0] == [7, 8, 9, 10]
    assert batch["input_ids"].tolist()[1][:3] == [5, 6, 7]
    assert batch["response_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch["rollout_log_probs"].tolist() == [[0, -1, -2], [-0.5, -0.25, 0]]
    assert batch["advantages"].tolist() == [[0, 3, 4], [1, 0, 0]]
    assert "loss_weights" not in batch


@pytest.mark.parametrize("expected", [3, 5])
def test_wrong_expected_tokens_are_refused_alike_for_sampling_and_training(expected):
    text, image = EncodedTextChunk([1, 2]), ImageChunk(png(), "png", expected_tokens=expected)
    model_input = ModelInput([text, image, text])
    renderer = ChunkRenderer(builder())
    messages = []
    for call in (
        lambda: renderer.prompts([ModelInput.from_ints([1]), model_input]),
        lambda: renderer.rows([datum_of(ModelInput.from_ints([1]), [2]), datum_of(model_input, [0] * 8)]),
    ):
        with pytest.raises(InvalidRow) as refusal:
            call()
        assert refusal.value.index == 1
        messages.append(refusal.value.reason)
    assert messages[0] == messages[1]
    assert messages[0] == f"chunk 1 (image): expected_tokens={expected}, but its 16 x 16 pixels make 4 tokens"
    right = ModelInput([text, ImageChunk(png(), "png", expected_tokens=4), text])
    assert renderer.length(right) == right.length == 8


def test_assets_come_from_the_users_resolver_and_from_nowhere_else():
    pointer = ModelInput([EncodedTextChunk([1]), ImageAssetPointerChunk("png", "store/a", expected_tokens=4)])
    with pytest.raises(InvalidRow, match=r"chunk 1 .image_asset_pointer.: asset 'store/a' cannot be fetched: give"):
        ChunkRenderer(builder()).prompts([pointer])
    asked = []

    def resolve(location):
        asked.append(location)
        return png()

    found = ChunkRenderer(builder(), resolve).prompts([pointer, pointer])
    inline = ChunkRenderer(builder()).prompts([ModelInput([EncodedTextChunk([1]), ImageChunk(png(), "png")])])
    assert torch.equal(found["input_ids"][:1], inline["input_ids"])
    assert asked == ["store/a"]
    assert found["multi_modal_inputs"][0]["pixel_values"] is found["multi_modal_inputs"][1]["pixel_values"]

    def fail(location):
        raise KeyError(location)

    with pytest.raises(InvalidRow, match="'store/a' cannot be fetched: 'store/a'"):
        ChunkRenderer(builder(), fail).prompts([pointer])
    with pytest.raises(InvalidRow, match="not those of a png file"):
        ChunkRenderer(builder(), lambda _: b"\xff\xd8\xff").prompts([pointer])


def test_an_image_is_processed_once_for_all_rows_that_show_it():
    inputs = [chunked("a", (16, 16)), chunked("bc", (16, 16)), chunked((24, 16))]
    media = ChunkRenderer(builder()).prompts(inputs)["multi_modal_inputs"]
    assert media[0]["pixel_values"] is media[1]["pixel_values"]
    assert media[0]["pixel_values"].shape != media[2]["pixel_values"].shape


def test_text_may_hold_the_placeholders_id_in_training_but_not_for_engines():
    image = builder().media_tokens.image
    model_input = ModelInput([EncodedTextChunk([1, image, 2]), ImageChunk(png(), "png"), EncodedTextChunk([3])])
    renderer = ChunkRenderer(builder())
    ids = [1, image, 2, image, image, image, image, 3]
    batch = renderer.rows([datum_of(model_input, [*ids[1:], 4], weights=[0.0] * 7 + [1.0])])
    assert batch["mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 0, 0]]
    with pytest.raises(InvalidRow, match=f"token {image}, the placeholder of an image"):
        renderer.prompts([model_input])


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (EncodedTextChunk([1, 5000]), r"chunk 1 .encoded_text.: token 1 is 5000, but the model has tokens 0 to"),
        (EncodedTextChunk([-1]), "token 0 is -1"),
        (ImageChunk(b"\x89PNG\r\n\x1a\nbroken", "png"), r"chunk 1 .image.: image .* "),
        (ImageChunk(png()[:60], "png"), r"chunk 1 .image.: image .* is broken"),
    ],
)
def test_a_broken_chunk_is_named(chunk, message):
    model_input = ModelInput([EncodedTextChunk([1]), chunk])
    renderer = ChunkRenderer(builder())
    with pytest.raises(InvalidRow, match=message):
        renderer.prompts([model_input])
    with pytest.raises(InvalidRow, match=message):
        renderer.rows([datum_of(model_input, [1])])


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_an_image_bomb_is_refused_unread(side):
    header = bytearray(png())
    header[16:24] = side.to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    with pytest.raises(InvalidRow, match=r"chunk 0 .image.: image .* pixels"):
        ChunkRenderer(builder()).prompts([ModelInput([ImageChunk(bytes(header), "png")])])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"weights": [1.0]}, "lack 'target_tokens'"),
        ({"target_tokens": [6]}, r"'target_tokens'\] has 1 numbers for 2 input tokens"),
        ({"target_tokens": [6, 7], "mask": [1, 1, 1]}, r"'mask'\] has 3 numbers for 2 input tokens"),
        ({"target_tokens": [6, 5000], "weights": [1, 1]}, r"target_tokens\[1\] = 5000 is no token of the model"),
        ({"target_tokens": [-1, 7], "weights": [1, 1]}, r"target_tokens\[0\] = -1 is no token of the model"),
    ],
)
def test_loss_inputs_that_do_not_fit_are_refused(inputs, message):
    with pytest.raises(InvalidRow, match=message):
        ChunkRenderer(builder()).rows([Datum(ModelInput.from_ints([5, 6]), inputs)])


def test_a_target_that_is_not_learnt_may_be_anything():
    for target in (9, 5000, -100):
        datum = datum_of(ModelInput.from_ints([5, 6]), [target, 7], weights=[0, 1])
        batch = ChunkRenderer(builder()).rows([datum])
        assert batch["input_ids"].tolist() == [[5, 6, 7]]
        assert batch["targets"].tolist() == [[target, 7]]
    assert "targets" not in ChunkRenderer(builder()).rows([datum_of(ModelInput.from_ints([5]), [6], weights=[1])])


def test_what_is_learnt_may_be_another_token_than_the_next():
    short, long = ModelInput.from_ints([5]), ModelInput.from_ints([5, 6])
    batch = ChunkRenderer(builder()).rows([datum_of(long, [9, 7], weights=[1, 1]), datum_of(short, [6], weights=[1])])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [5, 6, builder().pad_token_id]]
    assert batch["targets"].tolist() == [[9, 7], [6, 0]]


def test_media_tokens_cannot_be_learnt():
    model_input = chunked("a", SIZES[0], "b")
    length = ChunkRenderer(builder()).length(model_input)
    with pytest.raises(InvalidRow, match="is no token of the model, or is a media token"):
        ChunkRenderer(builder()).rows([supervised(model_input, [1.0] * length, ids_of("!"))])


def test_rows_with_other_loss_inputs_than_the_first_are_refused():
    one = datum_of(ModelInput.from_ints([5]), [6], weights=[1.0])
    other = datum_of(ModelInput.from_ints([5]), [6], advantages=[1.0])
    with pytest.raises(InvalidRow, match="row 1"):
        ChunkRenderer(builder()).rows([one, other])


def test_an_empty_or_overlong_input_is_refused():
    with pytest.raises(InvalidRow, match="empty"):
        ChunkRenderer(builder()).prompts([ModelInput([])])
    with pytest.raises(InvalidRow, match="empty"):
        ChunkRenderer(builder()).rows([datum_of(ModelInput([]), [])])
    with pytest.raises(InvalidRow, match="max_prompt_length=8"):
        ChunkRenderer(tiny_builder(max_prompt_length=8)).prompts([ModelInput.from_ints(list(range(9)))])


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 290), min_size=2, max_size=20), min_size=1, max_size=6), st.integers(0, 2**32))
def test_rows_equal_a_naive_loop(sequences, seed):
    generator = np.random.default_rng(seed)
    banned = set(builder().family.banned_ids(builder().config))
    sequences = [[token if token not in banned else 1 for token in tokens] for tokens in sequences]
    weights = [generator.integers(0, 3, len(tokens) - 1).astype(np.float32) for tokens in sequences]
    data = [
        datum_of(ModelInput.from_ints(tokens[:-1]), tokens[1:], weights=weight)
        for tokens, weight in zip(sequences, weights)
    ]
    batch = ChunkRenderer(builder()).rows(data)
    width = max(map(len, sequences))
    for row, (tokens, weight) in enumerate(zip(sequences, weights)):
        for place in range(width):
            inside = place < len(tokens)
            assert int(batch["attention_mask"][row, place]) == inside
            assert int(batch["input_ids"][row, place]) == (tokens[place] if inside else builder().pad_token_id)
            if place:
                expected = float(weight[place - 1]) if inside else 0.0
                assert float(batch["loss_weights"][row, place - 1]) == expected
                assert int(batch["response_mask"][row, place - 1]) == (expected != 0)
