"""The tiny checkpoint is an ordinary Qwen2.5-VL checkpoint, determined by its seed."""

import unicodedata
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
)

from recipes.demo.problems import make_problem
from recipes.demo.tiny_model import SPECIAL_TOKENS, TinyConfig, make_tiny_model
from rollout.pretrained import load_image_processor
from rollout.prompts import PromptBuilder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=3)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


def test_is_the_real_class_with_fewer_than_a_million_parameters(checkpoint):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert type(model) is Qwen2_5_VLForConditionalGeneration
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_the_file_has_exactly_the_weights_of_the_model(checkpoint):
    _, info = AutoModelForImageTextToText.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_equal_seeds_give_equal_files_and_other_seeds_other_files(checkpoint, tmp_path):
    again = make_tiny_model(tmp_path / "again", seed=3)
    other = make_tiny_model(tmp_path / "other", seed=4)
    weights = [(path / "model.safetensors").read_bytes() for path in (checkpoint, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert (checkpoint / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()


def test_a_smaller_patch_gives_a_picture_more_tokens(tmp_path):
    path = make_tiny_model(tmp_path / "model", config=TinyConfig(patch=7, vision_heads=4, vision_mlp=4))
    prompt = PromptBuilder.from_pretrained(path, 256).prepare(
        {"prompt": "<image>What?", "images": [Image.new("RGB", (112, 56), "white")]}
    )
    model = AutoModelForImageTextToText.from_pretrained(path)
    media = prompt.media[0].inputs
    features = model.model.visual(media["pixel_values"], grid_thw=media["image_grid_thw"]).pooler_output
    assert len(features) == list(prompt.input_ids).count(model.config.image_token_id) == 8 * 4
    assert model.config.vision_config.intermediate_size == 4 * 64


def test_creating_a_model_does_not_change_the_global_random_state(tmp_path):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    make_tiny_model(tmp_path / "model", seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_special_tokens_are_one_id_each_and_decode_to_no_text(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for token in SPECIAL_TOKENS:
        ids = tokenizer(token)["input_ids"]
        assert len(ids) == 1, token
        assert tokenizer.decode(ids, skip_special_tokens=True) == "", token


@given(text=st.text(st.characters(codec="utf-8"), max_size=60).map(partial(unicodedata.normalize, "NFC")))
@example(text="<think>look</think> \\boxed{40}")
@example(text="3\\sqrt{2} cm, 45° ≤ β\r\n\n  a\tb")
@settings(max_examples=100)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    """Any text in the normal form NFC, which Qwen's tokenizer applies."""
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_auto_classes_load_the_checkpoint(checkpoint, tokenizer):
    config, processor = AutoConfig.from_pretrained(checkpoint), load_image_processor(checkpoint)
    assert config.model_type == "qwen2_5_vl"
    assert config.text_config.vocab_size == len(tokenizer) <= 512
    assert "Qwen2VL" in type(processor).__name__
    assert tokenizer.eos_token == "<|im_end|>"
    media = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    assert tokenizer.convert_ids_to_tokens(media) == [
        "<|image_pad|>",
        "<|video_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
    ]


def test_the_placeholder_of_the_chat_template_becomes_the_picture(checkpoint, tokenizer):
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": "!"}],
        }
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nSee <|vision_start|><|image_pad|><|vision_end|>!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=256)
    data = builder([{"prompt": "See <image>!", "images": [Image.new("RGB", (84, 56))]}])
    placeholder = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert data["raw_prompt_ids"][0].count(placeholder) == 1
    assert int((data["input_ids"] == placeholder).sum()) == 3 * 2  # 84 x 56 pixels, 28 x 28 to a token


def test_white_paper_is_zero_to_the_model(checkpoint):
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=256)
    white = builder([{"prompt": "<image>?", "images": [Image.new("RGB", (56, 56), "white")]}])
    assert white["multi_modal_inputs"][0]["pixel_values"].abs().max() == 0


def test_a_picture_changes_the_next_token(checkpoint):
    """The logits of the untrained model depend on the picture, so that GRPO has a signal to amplify."""
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=256)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    problems = [make_problem(index) for index in range(8)]
    images = [problem.image for problem in problems]
    data = builder([{"prompt": problems[0].text, "images": [image]} for image in images])
    assert all(row == data["raw_prompt_ids"][0] for row in data["raw_prompt_ids"])
    with torch.no_grad():
        logits = model(
            input_ids=data["input_ids"],
            attention_mask=data["attention_mask"],
            position_ids=data["position_ids"].transpose(0, 1),
            pixel_values=torch.cat([row["pixel_values"] for row in data["multi_modal_inputs"]]),
            image_grid_thw=torch.cat([row["image_grid_thw"] for row in data["multi_modal_inputs"]]),
        ).logits[:, -1]
    assert (logits[1:] - logits[0]).abs().max() > 1e-4
