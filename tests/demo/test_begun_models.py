"""A model whose making was interrupted, damaged or begun with other options; nothing is downloaded or trained here."""

from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM, SmolVLMForConditionalGeneration

from dataproto.errors import FileNotWritten, InvalidConfig
from helpers.tiny_prompts import tiny_tokenizer
from recipes.configs.make_vlm_config import MakeVLMConfig, TowerConfig
from recipes.demo import make_vlm
from recipes.demo.make_vlm import check_began
from recipes.demo.smolvlm import assemble, with_image_tokens
from recipes.options import write_options


@pytest.fixture
def begun(tmp_path):
    """The options of a model whose training has begun."""
    config = MakeVLMConfig(output_dir=tmp_path / "vlm", steps=4)
    config.output_dir.mkdir()
    (config.output_dir / "README.md").touch()
    write_options(config.output_dir, config)
    (config.run_dir / "tower").mkdir(parents=True)
    return replace(config, resume=True)


def test_the_training_of_a_deleted_model_is_not_taken_for_that_of_a_new_one(begun, monkeypatch):
    monkeypatch.setattr(make_vlm, "load_text_model", None)  # it comes to nothing of the kind
    for file in begun.output_dir.iterdir():
        file.unlink()
    begun.output_dir.rmdir()
    for resume in (False, True):
        with pytest.raises(InvalidConfig, match=r"vlm-alignment holds the training of an earlier model.*: delete "):
            make_vlm.make_vlm(replace(begun, resume=resume))


@pytest.mark.parametrize("changed", [{"steps": 6}, {"seed": 3}, {"tower": TowerConfig(depth=2)}])
def test_a_model_is_resumed_with_its_own_options(begun, changed):
    check_began(begun.output_dir, begun)
    with pytest.raises(
        InvalidConfig, match=r"other options than .*/vlm was begun: give --config .*/config.yaml --resume"
    ):
        check_began(begun.output_dir, replace(begun, **changed))


def test_packages_are_fetched_before_anything_is_written(tmp_path, monkeypatch):
    def offline(package, cache=None):
        raise InvalidConfig(f"no {package.name}")

    monkeypatch.setattr(make_vlm, "fetch", offline)
    monkeypatch.setattr(make_vlm, "load_text_model", None)
    with pytest.raises(InvalidConfig, match="no emoji-datasource-google"):
        make_vlm.make_vlm(MakeVLMConfig(output_dir=tmp_path / "vlm", steps=2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_checkpoint_that_cannot_be_written_is_named(error, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise error

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    words = {"vocab_size": len(tiny_tokenizer()), "tie_word_embeddings": True, "num_key_value_heads": 1}
    tower = TowerConfig(width=32, depth=1, heads=2, image_size=32, patch_size=8)
    monkeypatch.setattr(SmolVLMForConditionalGeneration, "save_pretrained", full)
    with pytest.raises(FileNotWritten, match=r"could not be written to .*/vlm: .*No space left on device; make room"):
        assemble(
            tmp_path / "vlm",
            LlamaForCausalLM(LlamaConfig(**sizes, **words)),
            with_image_tokens(tiny_tokenizer()),
            tower,
        )
