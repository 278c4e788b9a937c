"""What is special to Idefics3 and SmolVLM: tiles with rows and columns, white tiles; from files to greedy tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata

from dataproto.errors import InvalidConfig, InvalidMedia, InvalidRow, MediaMismatch
from dataproto.vlm import family_of, media_spans
from dataproto.vlm.families.idefics3 import number_words, tile_grid
from helpers.shown_models import TILED_TYPES
from helpers.tiled_models import check_greedy_tokens, check_prompts, check_wrong_tiles, tiled_rows, write_with_pictures
from helpers.tiny_models import IMAGE, TILE, embedded, encode_text, image_inputs, tiny_config, tiny_model
from helpers.tiny_prompts import tiny_builder, tiny_image_processor
from rollout.hf.engine import HFEngine
from rollout.pretrained import load_image_processor
from rollout.prompts import PromptBuilder, SupervisedBuilder

FAMILY, CONFIG = family_of("smolvlm"), tiny_config("smolvlm")
PROCESSORS = {"smolvlm": SmolVLMProcessor, "idefics3": Idefics3Processor}
TEXT = SimpleNamespace(
    image_seq_len=4,
    fake_image_token="<fake_token_around_image>",
    image_token="<image>",
    global_image_token="<global-img>",
    global_image_tag="<global-img>",
)
"""What their methods read of a processor."""


@pytest.fixture(scope="module", params=TILED_TYPES)
def checkpoint(request, tmp_path_factory):
    return write_with_pictures(request.param, tmp_path_factory.mktemp(request.param))


def written(text, question):
    """The prompt of a question, by the chat template, with ``text`` for it, in which the processor has replaced images."""
    colon = ":" if question.startswith("<image>") else ": "
    return f"<|im_start|>User{colon}{text}<end_of_utterance>\nAssistant:"


def test_prompts_and_log_probs_are_hugging_faces(checkpoint):
    """Its processor writes the text of each image into the prompt, and pads a batch with tiles of zeros; its forward takes them
    out again.
    """
    builder, rows = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=512), tiled_rows(checkpoint)
    batch, model = builder(rows), HFEngine(str(checkpoint)).model
    images = [batch["multi_modal_data"][row].get("image", []) for row in range(3)]
    made = load_image_processor(checkpoint)(
        images=[each for each in images if each], return_row_col_info=True, return_tensors="pt"
    )
    assert not made["pixel_attention_mask"].all()  # the batch is padded
    texts, number = [], 0
    for row, source in enumerate(rows):
        text, *pieces = source["prompt"].split("<image>")
        for piece in pieces:
            text += PROCESSORS[model.config.model_type].replace_image_token(TEXT, made, number) + piece
            number += 1
        texts.append(written(text, source["prompt"]))
        assert batch["raw_prompt_ids"][row].count(builder.config.image_token_id) == len(images[row])
        assert set(batch["multi_modal_inputs"][row]) == ({"pixel_values", "image_tiles"} if images[row] else set())
    check_prompts(builder, texts, batch)
    tiles = [batch["multi_modal_inputs"][row]["image_tiles"].tolist() for row in (0, 2)]
    assert tiles == [[[2, 3]], [[3, 1], [3, 3]]]
    pictured = batch[[0, 2]]  # its forward refuses rows without images among others
    media = FAMILY.distinct_media(list(pictured["multi_modal_inputs"]), CONFIG)
    spans = media_spans(pictured["mm_token_type_ids"], media)
    with torch.no_grad():
        padding = {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
        ids, mask = pictured["input_ids"], pictured["attention_mask"]
        expected = model(input_ids=ids, attention_mask=mask, **padding).logits
        embeddings, _ = embedded(FAMILY, model, ids, media.inputs, spans)
        hidden = FAMILY.decode(model, embeddings, pictured["position_ids"], attention_mask=mask)
    ours, theirs = (x[mask.bool()].log_softmax(-1) for x in (FAMILY.lm_head(model)(hidden), expected))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_greedy_tokens_are_those_of_generate(checkpoint):
    check_greedy_tokens(checkpoint, tiled_rows(checkpoint))


@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 70), st.booleans())
@example(height=1, width=150, edge=64, split=True)
@example(height=33, width=33, edge=31, split=True)  # rounded up to an even height, it is no longer wide
@settings(max_examples=60)
def test_tiles_are_the_processors(height, width, edge, split):
    """Also where the longest side is no multiple of the tile; and a single image is never padded."""
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": edge}, max_image_size={"longest_edge": TILE}, do_image_splitting=split
    )
    options = FAMILY.media_layout.processor_options(processor, None, None)
    made = processor(images=[Image.new("RGB", (width, height))], return_tensors="pt", **options)
    inputs = FAMILY.media_layout.image_inputs(made)
    assert made["pixel_attention_mask"].all()
    assert FAMILY.media_layout.image_tiles(height, width, processor, options) == tuple(inputs["image_tiles"][0])
    expected = int(FAMILY.media_layout.feature_counts("image", inputs, CONFIG)[0])
    assert FAMILY.image_tokens(height, width, processor, options, CONFIG) == expected == 4 * len(inputs["pixel_values"])


def test_sides_are_limited_as_by_the_processor():
    assert tile_grid(100, 5000, longest_edge=5120, tile=512) == (1, 8)
    assert tile_grid(5000, 100, longest_edge=5120, tile=512) == (8, 1)
    assert tile_grid(480, 640, longest_edge=2048, tile=512) == (3, 4)


@pytest.mark.parametrize(
    ("least", "most", "tiles"),
    [(None, None, 3), (None, 32**2, 2), (None, 48**2 - 1, 2), (None, 9, 1), (50**2, None, 4), (20**2, 40**2, 2)],
)
def test_pixel_limits_are_a_number_of_tiles_along_the_longest_side(least, most, tiles):
    options = FAMILY.media_layout.processor_options(tiny_image_processor("smolvlm"), least, most)
    assert options == {"size": {"longest_edge": tiles * TILE}, "return_row_col_info": True}


@pytest.mark.parametrize("model_type", PROCESSORS)
def test_a_white_tile_has_features_though_it_is_zero(model_type):
    """Hugging Face's forward takes a tile of zeros for padding: its prompt then has too many placeholders."""
    model, family = tiny_model(model_type), family_of(model_type)
    inputs = image_inputs(model.config, (4, 8))
    inputs["pixel_values"][0] = 0
    assert len(their_features(model, inputs)) == 4
    features = family.features(model, inputs)
    assert features.shape == (8, 1, 64)
    alone = family.features(model, {"pixel_values": inputs["pixel_values"][:1]})
    torch.testing.assert_close(features[:4], alone)
    inputs["pixel_values"][0] = 1e-30  # not zero, and as good as
    torch.testing.assert_close(features[:, 0], their_features(model, inputs))


def their_features(model, inputs):
    """Those of Hugging Face's forward, one after another: a tensor, or from transformers 5.20 on a list by tile."""
    found = model.get_image_features(inputs["pixel_values"]).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


def test_joined_images_are_expanded_by_their_tiles():
    ids = [IMAGE, 9, IMAGE]
    two = [image_inputs(CONFIG, (4, 8)), image_inputs(CONFIG, (4, 4))]  # 2 tiles and 1, of 4 tokens each
    expanded, types = FAMILY.expand(ids, two, CONFIG, encode_text=encode_text)
    fake, whole = "<fake_token_around_image>", "<fake_token_around_image><global-img>"
    first, second, last, end = (encode_text(text)[0] for text in (f"{fake}<row_1_col_1>", f"\n\n{whole}", whole, fake))
    tile = [IMAGE] * 4
    assert expanded.tolist() == [first, *tile, second, *tile, end, 9, last, *tile, end]
    assert types.tolist() == [int(token == IMAGE) for token in expanded]
    joined = {name: torch.cat([each[name] for each in two]) for name in two[0]}
    assert FAMILY.expand(ids, joined, CONFIG, encode_text=encode_text)[0].tolist() == expanded.tolist()


def test_impossible_requests_are_named():
    processor = tiny_image_processor("smolvlm")
    with pytest.raises(InvalidConfig, match="min_pixels=9 and max_pixels=8"):
        FAMILY.media_layout.processor_options(processor, 9, 8)
    fixed = SmolVLMImageProcessorPil(size={"height": 9, "width": 9})
    with pytest.raises(InvalidConfig, match="has no longest_edge"):
        FAMILY.media_layout.processor_options(fixed, None, None)
    for token in ("<fake_token_around_image>", "<image>"):
        with pytest.raises(InvalidRow, match=f"the text contains {token}"):
            tiny_builder("smolvlm")([{"prompt": [{"role": "user", "content": [{"type": "text", "text": token}]}]}])
    one = image_inputs(CONFIG, (4, 4))
    with pytest.raises(MediaMismatch, match="2 image placeholders in the prompt, but 1 images"):
        FAMILY.expand([IMAGE, IMAGE], one, CONFIG, encode_text=encode_text)
    check_wrong_tiles("smolvlm")
    with pytest.raises(MediaMismatch, match="row 0: pixel_values without image_tiles"):
        FAMILY.distinct_media([{"pixel_values": one["pixel_values"]}], CONFIG)
    with pytest.raises(MediaMismatch, match="image_tiles counts 3 parts of images, but there are 1"):
        FAMILY.distinct_media([one | {"image_tiles": torch.tensor([[2, 1]])}], CONFIG)


def test_words_alone_reach_a_template_that_reads_parts():
    ids = tiny_builder("smolvlm")([{"prompt": "Words alone."}])["input_ids"][0]
    assert "User: Words alone.<end_of_utterance>" in tiny_builder("smolvlm").tokenizer.decode(ids)


FRAMES = np.random.default_rng(3).integers(0, 256, (3, 20, 30, 3), dtype=np.uint8)
TIMES = {"fps": 2.0, "frames_indices": [0, 131, 270], "total_num_frames": 300, "duration": 150.0}
FILM = [
    {"prompt": "<image>or <video>?", "images": ["wide.png"], "videos": [(FRAMES, TIMES)]},
    {"prompt": "<video>or <image>?", "images": ["wide.png"], "videos": [(FRAMES, TIMES)]},
    {"prompt": "<video>What moves?", "videos": [FRAMES[:2]]},
]
ONE_TILE = "<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>"


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    return write_with_pictures("smolvlm", tmp_path_factory.mktemp("films"))


def film_rows(path):
    return [row | {"media_root": path} for row in FILM]


def test_the_frames_of_a_video_are_images_of_one_tile(smolvlm, monkeypatch):
    """The text is that of Hugging Face's processor, and the pixels are those of its image processor without tiles."""
    monkeypatch.setattr(processing_smolvlm, "num2words", number_words)  # which need not be installed
    builder = PromptBuilder.from_pretrained(smolvlm, max_prompt_length=1024)
    batch, images = builder(film_rows(smolvlm)), load_image_processor(smolvlm)
    film, short = (
        SmolVLMProcessor.replace_video_token(
            TEXT, {"pixel_values": torch.zeros(1, count), "video_metadata": [VideoMetadata(**times)]}, 0
        )
        for count, times in ((3, TIMES), (2, {"fps": 2.0, "frames_indices": [0, 1], "total_num_frames": 2}))
    )
    assert film.startswith("You are provided the following series of three frames from a 0:02:30 [H:MM:SS] video.\n")
    assert film.endswith(f"\nFrame from 02:15:{ONE_TILE}\n\n")
    cut = images(images=[batch["multi_modal_data"][0]["image"][0]], return_row_col_info=True, return_tensors="pt")
    still = SmolVLMProcessor.replace_image_token(TEXT, cut, 0)
    texts = [f"{still}or {film}?", f"{film}or {still}?", f"{short}What moves?"]
    check_prompts(builder, [written(text, row["prompt"]) for text, row in zip(texts, FILM, strict=True)], batch)
    found = [inputs["image_tiles"].tolist() for inputs in batch["multi_modal_inputs"]]
    assert found == [[[2, 3], *[[0, 0]] * 3], [*[[0, 0]] * 3, [2, 3]], [[0, 0]] * 2]
    whole = {"do_image_splitting": False, "size": {"longest_edge": TILE}}  # as published checkpoints configure videos
    made = images(images=[Image.fromarray(frame) for frame in FRAMES], return_tensors="pt", **whole)
    for row, place in ((0, slice(7, 10)), (1, slice(0, 3))):
        assert torch.equal(batch["multi_modal_inputs"][row]["pixel_values"][place, 0], made["pixel_values"][0])
    (frames, metadata), content = batch["multi_modal_data"][1]["video"][0], batch["raw_prompt"][1][0]["content"]
    assert np.array_equal(frames, FRAMES)
    assert metadata["duration"] == 150.0
    assert [part["type"] for part in content] == ["video", "text", "image", "text"]


@pytest.mark.vllm  # where num2words and the torchvision that the processor of videos needs are installed
def test_the_whole_processor_makes_the_same_of_a_video():
    video_processor = SmolVLMVideoProcessor(size={"longest_edge": TILE}, max_image_size={"longest_edge": TILE})
    parts = tiny_image_processor("smolvlm"), tiny_builder("smolvlm").tokenizer, video_processor
    made = SmolVLMProcessor(*parts, image_seq_len=4)(
        text=[written("<video>What moves?", "")],
        videos=[[FRAMES.transpose(0, 3, 1, 2)]],
        video_metadata=[[VideoMetadata(**TIMES)]],
        return_tensors="pt",
    )
    batch = tiny_builder("smolvlm")([{"prompt": "<video>What moves?", "videos": [(FRAMES, TIMES)]}])
    assert torch.equal(batch["input_ids"], made["input_ids"])
    pixels = batch["multi_modal_inputs"][0]["pixel_values"].squeeze(1)
    torch.testing.assert_close(pixels, made["pixel_values"][0], atol=2.5 / 127.5, rtol=0)  # of PIL and of torchvision


def test_greedy_tokens_about_videos_are_those_of_generate(smolvlm):
    check_greedy_tokens(smolvlm, film_rows(smolvlm)[:2])


def test_conversations_about_videos_have_the_tokens_of_prompts(smolvlm):
    rows = film_rows(smolvlm)
    prompts = PromptBuilder.from_pretrained(smolvlm, max_prompt_length=1024)(rows)
    learning = SupervisedBuilder.from_pretrained(smolvlm, max_prompt_length=1024)
    turns = [[{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": "yes"}] for r in rows]
    batch = learning([row | {"prompt": turn} for row, turn in zip(rows, turns, strict=True)])
    for row in range(len(rows)):
        prompt = prompts["input_ids"][row, prompts["attention_mask"][row].bool()]
        assert torch.equal(batch["input_ids"][row, : len(prompt)], prompt)
        assert not batch["response_mask"][row, : len(prompt) - 1].any()
        inputs = (part["multi_modal_inputs"][row]["pixel_values"] for part in (prompts, batch))
        assert torch.equal(*inputs)


def test_videos_that_do_not_fit_are_named(smolvlm):
    row = film_rows(smolvlm)[2]
    builder = PromptBuilder.from_pretrained(smolvlm, max_prompt_length=170)
    assert builder.prompt_length(row) < 170  # without its frames: the video is not read
    with pytest.raises(InvalidRow, match=r"row 0: the prompt has .* tokens, more than max_prompt_length=170"):
        builder([row | {"videos": [np.repeat(FRAMES, 4, 0)]}])
    with pytest.raises(InvalidMedia, match="a video of 1000 frames has too many: at most 999"):
        FAMILY.frame_captions([0.0] * 1000, 0.0)
    with pytest.raises(InvalidRow, match="models of type idefics3 take no videos; show a video's frames as images"):
        tiny_builder("idefics3")([row])


def test_numbers_in_words():
    words = {
        0: "zero",
        13: "thirteen",
        21: "twenty-one",
        40: "forty",
        100: "one hundred",
        999: "nine hundred and ninety-nine",
    }
    assert {number: number_words(number) for number in words} == words
