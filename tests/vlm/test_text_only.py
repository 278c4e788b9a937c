"""Models without a vision tower: what they refuse, and whose row it is."""

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto.chunks import EncodedTextChunk, ImageChunk
from dataproto.errors import InvalidChunk, InvalidConfig, InvalidRow, MediaMismatch
from dataproto.vlm import family_of
from helpers.batches import padded_log_probs, prompt_batch, with_responses
from helpers.checkpoints import write_checkpoint
from helpers.geo3k_files import png
from helpers.tiny_models import TEXT_TYPES, image_inputs, tiny_config, tiny_model
from helpers.tiny_prompts import tiny_builder, tiny_prompt_config, tiny_tokenizer
from rollout.prompts import ChunkRenderer, PromptBuilder, SupervisedBuilder
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.model_worker import PolicyConfig, ReferenceWorker

CPU = torch.device("cpu")
PICTURE = Image.new("RGB", (16, 16))


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_the_tokenizer_alone_is_enough(model_type, tmp_path):
    tiny_prompt_config(model_type).save_pretrained(tmp_path)
    tiny_tokenizer(model_type).save_pretrained(tmp_path)
    builder = PromptBuilder.from_pretrained(tmp_path, 100)
    assert builder.image_processor is None
    assert builder.processors == (builder.tokenizer,)
    data = builder([{"prompt": "What is 2 + 3?"}, {"prompt": "Why?"}])
    assert data["position_ids"].shape == data["input_ids"].shape
    assert data["position_ids"][1][data["attention_mask"][1] == 1].tolist() == list(
        range(builder([{"prompt": "Why?"}])["input_ids"].shape[1])
    )
    assert not data["mm_token_type_ids"].any()
    assert builder.prompt_length({"prompt": "Why?"}) == int(data["attention_mask"][1].sum())


def test_text_in_parts_reaches_a_template_that_takes_strings():
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
    typed, plain = ([{"role": "user", "content": content}] for content in (parts, "2 + 3?"))
    ours, theirs = (tiny_builder("qwen3")([{"prompt": prompt}])["input_ids"] for prompt in (typed, plain))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_row_with_media_is_refused_by_its_number(kind):
    rows = [{"prompt": "a"}, {"prompt": f"<{kind}>b", f"{kind}s": [PICTURE if kind == "image" else [PICTURE]]}]
    said = rf"row 1: models of type qwen3 take no {kind}s; they read only text"
    builder = tiny_builder("qwen3")
    with pytest.raises(InvalidRow, match=said):
        builder(rows)
    learning = SupervisedBuilder(builder.tokenizer, None, builder.config, 100)
    answered = [
        row | {"prompt": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "yes"}]}
        for row in rows
    ]
    with pytest.raises(InvalidRow, match=said):
        learning(answered)


def test_an_image_chunk_is_refused_by_its_number():
    renderer = ChunkRenderer(tiny_builder("qwen3"))
    assert renderer.sequence([EncodedTextChunk([5, 6])], {}).input_ids.tolist() == [5, 6]
    with pytest.raises(InvalidChunk, match=r"chunk 1 \(image\): models of type qwen3 take no images"):
        renderer.sequence([EncodedTextChunk([5]), ImageChunk(png(PICTURE), "png")], {})


def test_media_of_another_model_are_refused_by_their_row(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    config = tiny_config("qwen3")
    data = with_responses(config, prompt_batch(config, [[], []], texts=[4, 3]), lengths=[2, 1], width=2)
    pixels = np.empty(2, dtype=object)
    pixels[:] = [{}, image_inputs(tiny_config("qwen3_vl"), (4, 4))]
    reference = ReferenceWorker(PolicyConfig(str(tmp_path)), CPU)
    assert reference.log_probs(data)["ref_log_prob"].shape == (2, 2)
    data["multi_modal_inputs"] = pixels
    said = "row 1: it has image_grid_thw, pixel_values, but the model reads only text"
    with pytest.raises(MediaMismatch, match=said):
        reference.log_probs(data)
    with pytest.raises(MediaMismatch, match=said):
        family_of("qwen3").distinct_media(list(pixels), config)


def test_options_of_a_tower_are_refused(tmp_path):
    path = write_checkpoint("qwen3", tmp_path)
    with pytest.raises(InvalidConfig, match="min_pixels=64 and max_pixels=None: the model reads only text"):
        PromptBuilder.from_pretrained(path, 100, min_pixels=64)
    for options in ({"freeze_vision": True}, {"freeze_language": True}, {"lora_rank": 2, "lora_vision": True}):
        with pytest.raises(InvalidConfig, match="models of type qwen3 have no vision tower"):
            ActorWorker(ActorConfig(path, **options), CPU)


def test_a_sliding_window_is_that_of_hugging_face(tmp_path):
    """Mistral 7B v0.1 has one of 4,096 tokens; here it is shorter than the rows. Two samples share a prompt."""
    config = tiny_config("mistral")
    config.sliding_window = 3
    model = tiny_model("mistral", config=config)
    model.save_pretrained(tmp_path)
    prompts = prompt_batch(config, [[], []], texts=[9, 4])[[0, 0, 1]]
    data = with_responses(config, prompts, lengths=[2, 5, 3], width=5)
    found = ReferenceWorker(PolicyConfig(str(tmp_path)), CPU).log_probs(data)["ref_log_prob"]
    torch.testing.assert_close(found, padded_log_probs(model, data), atol=1e-5, rtol=0)
    model.config.sliding_window = None
    wide = tiny_model("mistral", config=model.config)
    assert (found - padded_log_probs(wide, data)).abs().max() > 1e-3
