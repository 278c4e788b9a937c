"""What is special to Idefics3 and SmolVLM: tiles with rows and columns, white tiles; from files to greedy tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from dataproto.errors import InvalidConfig, InvalidMedia, InvalidRow, MediaMismatch
from dataproto.vlm import family_of, media_spans
from dataproto.vlm.families.idefics3 import tile_grid
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import IMAGE, TILE, encode_text, image_inputs, tiny_config, tiny_model
from helpers.tiny_prompts import tiny_builder, tiny_image_processor
from rollout.engine import SamplingParams
from rollout.hf.hf_engine import HFEngine
from rollout.prompts import PromptBuilder, load_image_processor
from rollout.responses import attach_responses, build_requests

FAMILY, CONFIG = family_of("smolvlm"), tiny_config("smolvlm")
PROCESSORS = {"smolvlm": SmolVLMProcessor, "idefics3": Idefics3Processor}
TEXT = {
    "image_seq_len": 4,
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "global_image_tag": "<global-img>",
}


def picture(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


PICTURES = {"wide": picture(50, 20), "tall": picture(9, 40, 1), "square": picture(16, 16, 2)}


@pytest.fixture(scope="module", params=PROCESSORS)
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, path)
    for name, image in PICTURES.items():
        image.save(path / f"{name}.png")
    return path


def rows_of(path):
    return [
        {"prompt": "<image>Find x.", "images": ["wide.png"], "media_root": path},
        {"prompt": "Words alone."},
        {"prompt": "<image> and <image>", "images": ["tall.png", "square.png"], "media_root": path},
    ]


def test_prompts_and_log_probs_are_hugging_faces(checkpoint):
    """Its processor writes the text of each image into the prompt, and pads a batch with tiles of zeros; its forward takes them
    out again.
    """
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=512)
    batch, model = builder(rows_of(checkpoint)), HFEngine(str(checkpoint)).model
    processor, text = load_image_processor(checkpoint), SimpleNamespace(**TEXT)
    images = [batch["multi_modal_data"][row].get("image", []) for row in range(3)]
    made = processor(images=[each for each in images if each], return_row_col_info=True, return_tensors="pt")
    assert not made["pixel_attention_mask"].all()  # the batch is padded
    number = 0
    for row, source in enumerate(rows_of(checkpoint)):
        pieces = source["prompt"].split("<image>")
        prompt = pieces[0]
        for piece in pieces[1:]:
            prompt += PROCESSORS[model.config.model_type].replace_image_token(text, made, number) + piece
            number += 1
        colon = ":" if source["prompt"].startswith("<image>") else ": "
        prompt = f"<|im_start|>User{colon}{prompt}<end_of_utterance>\nAssistant:"
        ids = builder.tokenizer(prompt)["input_ids"]
        kept = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row, kept].tolist() == ids
        placeholder = builder.config.image_token_id
        assert batch["mm_token_type_ids"][row, kept].tolist() == [int(i == placeholder) for i in ids]
        assert batch["raw_prompt_ids"][row].count(placeholder) == len(images[row])
        assert set(batch["multi_modal_inputs"][row]) == ({"pixel_values", "image_tiles"} if images[row] else set())
    tiles = [batch["multi_modal_inputs"][row]["image_tiles"].tolist() for row in (0, 2)]
    assert tiles == [[[2, 3]], [[3, 1], [3, 3]]]
    rows = batch[[0, 2]]  # its forward refuses rows without images among others
    media = FAMILY.distinct_media(list(rows["multi_modal_inputs"]), CONFIG)
    spans = media_spans(rows["mm_token_type_ids"], media)
    with torch.no_grad():
        padding = {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
        expected = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], **padding).logits
        embeddings, _ = FAMILY.embed(model, rows["input_ids"], media.inputs, spans)
        mask = rows["attention_mask"]
        hidden = FAMILY.decode(model, embeddings, rows["position_ids"], attention_mask=mask)
    ours, theirs = (x[mask.bool()].log_softmax(-1) for x in (FAMILY.lm_head(model)(hidden), expected))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_greedy_tokens_are_those_of_generate(checkpoint):
    engine = HFEngine(str(checkpoint))
    prompts = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=512)(rows_of(checkpoint))
    sampling = SamplingParams(temperature=0, max_tokens=5)
    completions = list(engine.generate(build_requests(prompts, sampling), sampling))
    data = attach_responses(prompts, completions, sampling, engine.family, pad_token_id=0)
    for row in range(len(prompts)):
        ids = prompts["input_ids"][row, prompts["attention_mask"][row].bool()][None]
        options = {"do_sample": False, "max_new_tokens": 5, "suppress_tokens": list(engine.banned_ids)}
        media = prompts["multi_modal_inputs"][row]
        pixels = {"pixel_values": media["pixel_values"]} if media else {}
        whole = engine.model.generate(ids, attention_mask=torch.ones_like(ids), **pixels, **options)
        expected = whole[0, ids.shape[1] :].tolist()
        assert data["responses"][row, : len(expected)].tolist() == expected


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
    with pytest.raises(InvalidMedia, match="height 0 and width 5 is empty"):
        tile_grid(0, 5, 64, 16)


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
    wrong = {"pixel_values": torch.zeros(2, 1, 3, TILE, TILE + 4), "image_tiles": torch.tensor([[1, 1]])}
    with pytest.raises(MediaMismatch, match=r"row 1: image tiles \(2, 1, 3, 16, 20\) are not \(tiles, 1, 3, 16, 16\)"):
        FAMILY.distinct_media([{}, wrong], CONFIG)
    with pytest.raises(MediaMismatch, match="row 0: pixel_values without image_tiles"):
        FAMILY.distinct_media([{"pixel_values": one["pixel_values"]}], CONFIG)
    with pytest.raises(MediaMismatch, match="image_tiles counts 3 tiles, but there are 1"):
        FAMILY.distinct_media([one | {"image_tiles": torch.tensor([[2, 1]])}], CONFIG)


def test_words_alone_reach_a_template_that_reads_parts():
    ids = tiny_builder("smolvlm")([{"prompt": "Words alone."}])["input_ids"][0]
    assert "User: Words alone.<end_of_utterance>" in tiny_builder("smolvlm").tokenizer.decode(ids)
