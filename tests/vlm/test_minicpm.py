"""What is MiniCPM-V's own: slices, and the number of each image in the text; from files to greedy tokens as Hugging Face."""

import io
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from dataproto.chunks import ImageChunk
from dataproto.errors import InvalidChunk, InvalidConfig, InvalidPrompt, InvalidRow, MediaMismatch
from dataproto.vlm import family_of
from helpers.tiled_models import check_greedy_tokens, check_prompts, tiled_rows, write_with_pictures
from helpers.tiny_models import image_inputs, tiny_config
from helpers.tiny_prompts import tiny_builder, tiny_image_processor
from rollout.environments import Observation
from rollout.environments.turn_renderer import TurnRenderer
from rollout.hf.engine import HFEngine
from rollout.pretrained import check_in_vllm, load_image_processor
from rollout.prompts import ChunkRenderer, PromptBuilder, SupervisedBuilder

FAMILY, CONFIG = family_of("minicpmv4_6"), tiny_config("minicpmv4_6")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_with_pictures("minicpmv4_6", tmp_path_factory.mktemp("minicpm"))


def processor_of(builder, images):
    """What the methods of Hugging Face's processor read."""
    marks = {
        f"{name}_{end}_token": f"<{slash}{name}>"
        for name in ("image", "slice", "image_id")
        for end, slash in (("start", ""), ("end", "/"))
    }
    return SimpleNamespace(image_token="<|image_pad|>", slice_mode=True, image_processor=images, **marks)


def written(checkpoint, rows, batch):
    """The prompts, in which Hugging Face's processor has replaced the images."""
    images, texts, grids = load_image_processor(checkpoint), [], []
    processor = processor_of(None, images)
    for row, source in enumerate(rows):
        pictures = batch["multi_modal_data"][row].get("image", [])
        text = source["prompt"].replace("<image>", "<|image_pad|>")
        if pictures:
            made = images(pictures, return_tensors="pt")
            grids += made["grids"]
            replaced = [
                MiniCPMV4_6Processor.replace_image_token(processor, made, number, image_token_divisor=16)
                for number in range(len(pictures))
            ]
            first, *pieces = text.split("<|image_pad|>")
            numbered = MiniCPMV4_6Processor._prepend_local_ids(processor, [text], replaced, "<|image_pad|>")
            text = first + "".join(image + piece for image, piece in zip(numbered, pieces, strict=True))
            patches = FAMILY.media_layout.image_inputs(made)["pixel_values"]
            assert torch.equal(batch["multi_modal_inputs"][row]["pixel_values"], patches)
        texts.append(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    assert len({tuple(grid) for grid in grids}) > 1  # images with slices and without
    return texts


def test_prompts_are_hugging_faces(checkpoint):
    builder, rows = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=512), tiled_rows(checkpoint)
    batch = builder(rows)
    check_prompts(builder, written(checkpoint, rows, batch), batch)
    assert [builder.prompt_length(row) for row in rows] == batch["attention_mask"].sum(1).tolist()
    model = HFEngine(str(checkpoint)).model
    assert torch.equal(
        batch["position_ids"], model._prepare_position_ids_for_generation(None, dict(batch.batch.items()))
    )


def test_greedy_tokens_are_those_of_generate(checkpoint):
    check_greedy_tokens(checkpoint, tiled_rows(checkpoint))


def test_images_of_a_conversation_are_numbered_through_its_turns(checkpoint):
    asks = [{"role": "user", "content": "<image>one"}, {"role": "assistant", "content": "yes"}]
    messages = [*asks, {"role": "user", "content": "<image>two"}, {"role": "assistant", "content": "no"}]
    pictures = {"images": ["wide.png", "tall.png"], "media_root": checkpoint}
    builder = SupervisedBuilder.from_pretrained(checkpoint, max_prompt_length=512)
    text = builder.tokenizer.decode(builder([{"prompt": messages, **pictures}])["input_ids"][0])
    assert "<image_id>0</image_id><image>" in text
    assert "<image_id>1</image_id><image>" in text
    assert text.count("<image_id>") == 2


@pytest.mark.parametrize("size", [(16, 16), (20, 50), (40, 9), (100, 90), (17, 64), (7, 7)])
@pytest.mark.parametrize("slices", [1, 2, 4, 9])
def test_lengths_are_known_before_images_are_decoded(size, slices):
    processor = tiny_image_processor("minicpmv4_6")
    options = FAMILY.media_layout.processor_options(processor, None, 256 * slices)
    assert options == {"max_slice_nums": slices}
    made = processor([Image.new("RGB", size[::-1])], return_tensors="pt", **options)
    inputs = FAMILY.media_layout.image_inputs(made)
    counts = FAMILY.media_layout.feature_counts("image", inputs, CONFIG)
    assert counts.tolist() == [FAMILY.image_tokens(*size, processor, options, CONFIG)]
    assert FAMILY.image_texts(inputs, CONFIG) == [FAMILY.size_texts(*size, processor, options)]


def test_what_does_not_fit_is_named():
    layout, processor = FAMILY.media_layout, tiny_image_processor("minicpmv4_6")
    with pytest.raises(InvalidConfig, match=r"min_pixels=300: images of this family are enlarged to 256 pixels"):
        layout.processor_options(processor, 300, 600)
    processor.downsample_mode = "4x"
    with pytest.raises(InvalidConfig, match=r"has downsample_mode='4x', the model '16x'"):
        FAMILY.image_tokens(16, 16, processor, {"max_slice_nums": 1}, CONFIG)
    processor.use_image_id = False
    with pytest.raises(InvalidConfig, match="use_image_id=False"):
        layout.processor_options(processor, None, None)
    inputs = image_inputs(CONFIG, (6, 6))
    with pytest.raises(MediaMismatch, match="image_slices counts 1 parts of images, but there are 3"):
        FAMILY.distinct_media([inputs | {"image_slices": torch.zeros(1, 2, dtype=torch.int64)}], CONFIG)
    with pytest.raises(MediaMismatch, match="count 96 patches, but there are 64"):
        FAMILY.distinct_media([inputs | {"pixel_values": inputs["pixel_values"][:64]}], CONFIG)


@pytest.mark.parametrize("name", ["image", "slice", "image_id"])
def test_text_with_tokens_of_the_processor_is_refused(name):
    for token in (f"<{name}>", f"</{name}>"):
        with pytest.raises(InvalidRow, match=f"the text contains {token}, which only the chat template may write"):
            tiny_builder("minicpmv4_6")([{"prompt": [{"role": "user", "content": [{"type": "text", "text": token}]}]}])


@pytest.mark.parametrize("model_type", ["minicpmv4_6", "glm46v"])
def test_vllm_is_refused_before_it_starts(model_type, tmp_path):
    tiny_config(model_type).save_pretrained(tmp_path)
    reason = family_of(model_type).not_in_vllm
    with pytest.raises(InvalidConfig, match=f"no models of type {model_type}: {reason}; use the hf engine"):
        check_in_vllm(str(tmp_path))


def test_videos_and_images_without_a_known_number_are_refused():
    builder = tiny_builder("minicpmv4_6")
    with pytest.raises(InvalidRow, match="models of type minicpmv4_6 take no videos"):
        builder([{"prompt": "<video>What?", "videos": [torch.zeros(2, 20, 30, 3, dtype=torch.uint8).numpy()]}])
    picture, png = Image.new("RGB", (16, 16)), io.BytesIO()
    picture.save(png, "PNG")
    with pytest.raises(InvalidPrompt, match="number the images of a prompt: show images in the first observation"):
        TurnRenderer(builder).turn(Observation(content=[picture]))
    with pytest.raises(InvalidChunk, match="number the images of a prompt, and a chunk does not tell its number"):
        ChunkRenderer(builder).sequence([ImageChunk(png.getvalue(), "png")], {})


@pytest.mark.parametrize(("installed", "refused"), [("5.18.0", True), ("5.19.0", False), ("6.0.0.dev0", False)])
def test_versions_whose_tower_mixes_up_images_of_unequal_size_are_refused(monkeypatch, installed, refused):
    """transformers 5.17 gave log-probs that were off by 0.4 nats, without an error."""
    monkeypatch.setattr("dataproto.vlm.family.version", {"transformers": installed}.__getitem__)
    if not refused:
        FAMILY.check_supported(CONFIG)
        return
    with pytest.raises(InvalidConfig, match=r"5\.19 or newer, and 5\.18\.0 is installed"):
        FAMILY.check_supported(CONFIG)
