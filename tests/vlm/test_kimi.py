"""What Kimi K2.5 has that other families lack: its image processor by PIL, narrow values, and a token after the vocabulary."""

import ast
import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from dataproto.errors import InvalidConfig, InvalidMedia
from dataproto.vlm import family_of
from dataproto.vlm.families.kimi_k25 import grid_arguments, scaled_size
from dataproto_server.backend import at_once
from dataproto_server.engine.adapter_trainer import trainable_weights
from dataproto_server.engine.trained_adapter import TrainedWeights
from helpers.checkpoints import write_checkpoint
from helpers.examples import at_most
from helpers.tiny_models import image_inputs, tiny_config, tiny_model
from helpers.tiny_prompts import tiny_image_processor
from rollout.pretrained import load_image_processor
from workers.roles.actor import ActorConfig, ActorWorker

FAMILY = family_of("kimi_k25")


def navit_resize(*sizes):
    """Transformers' own function, of a module that needs torchvision."""
    source = (Path(transformers.__file__).parent / "models/kimi_k25/image_processing_kimi_k25.py").read_text()
    functions = [each for each in ast.parse(source).body if getattr(each, "name", "") == "navit_resize"]
    names = {"math": math}
    exec(compile(ast.Module(functions, []), "navit_resize", "exec"), names)
    return names["navit_resize"](*sizes)


@settings(max_examples=at_most(50))
@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 300), st.integers(1, 20))
def test_images_are_scaled_as_by_transformers(height, width, max_patches, max_side):
    """Its own size, and how many features that makes."""
    size, filled = navit_resize(height, width, 4, 2, max_patches, max_side)
    assert scaled_size(height, width, 4, max_patches, max_side) == size
    processor = tiny_image_processor("kimi_k25")
    processor.size["max_height"] = max_side
    count = FAMILY.image_tokens(height, width, processor, {"max_patches": max_patches}, tiny_config("kimi_k25"))
    assert count == filled[0] * filled[1] // 64


@settings(max_examples=at_most(15))
@given(st.integers(1, 90), st.integers(1, 90))
def test_patches_are_squares_of_the_image_row_by_row(height, width):
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    processor = tiny_image_processor("kimi_k25")
    made = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    (_, rows, columns), *_ = made["image_grid_thw"].tolist()
    count = FAMILY.image_tokens(height, width, processor, {"max_patches": 256}, tiny_config("kimi_k25"))
    assert len(made["pixel_values"]) == rows * columns == 4 * count
    if scaled_size(height, width, 4, 256, 512) != (height, width):
        assert rows * columns <= 256 + 2 * (rows + columns)  # filled up to whole features
        return
    black = np.zeros((4 * rows, 4 * columns, 3))
    black[:height, :width] = pixels
    for place, patch in enumerate(made["pixel_values"]):
        row, column = 4 * (place // columns), 4 * (place % columns)
        expected = torch.from_numpy(black[row : row + 4, column : column + 4] / 127.5 - 1).permute(2, 0, 1).float()
        torch.testing.assert_close(patch, expected, atol=1e-5, rtol=0)


def test_a_checkpoint_without_a_pil_processor_gets_ours(tmp_path):
    path = write_checkpoint("kimi_k25", tmp_path)
    processor = load_image_processor(path)
    assert processor.backend == "pil"
    assert (processor.patch_size, processor.max_patches) == (4, 256)


def parts(path, *names, kinds=("weight", "bias")):
    return {f"{path}.{name}.{kind}" for name in names for kind in kinds}


def published_names(config):
    """Names of tensors in published checkpoints, written down from vLLM's reader of them."""
    text, experts = "language_model.model", config.text_config.n_routed_experts
    block = ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1")
    queries = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    attention = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    linear, single = ("gate_proj", "up_proj", "down_proj"), {"kinds": ("weight",)}
    found = {"language_model.lm_head.weight", f"{text}.embed_tokens.weight", f"{text}.norm.weight"}
    found |= {"vision_tower.patch_embed.pos_emb.weight", f"{text}.layers.1.mlp.gate.e_score_correction_bias"}
    found |= parts("vision_tower", "patch_embed.proj", "encoder.final_layernorm")
    found |= parts("mm_projector", "pre_norm", "proj.0", "proj.2")
    for layer in range(2):
        found |= parts(f"vision_tower.encoder.blocks.{layer}", *block)
        found |= parts(f"{text}.layers.{layer}", "input_layernorm", "post_attention_layernorm", **single)
        found |= parts(f"{text}.layers.{layer}.self_attn", *attention, **single)
    found |= parts(f"{text}.layers.0.mlp", *linear, **single) | parts(f"{text}.layers.1.mlp", "gate", **single)
    for path in (*(f"experts.{number}" for number in range(experts)), "shared_experts"):
        found |= parts(f"{text}.layers.1.mlp.{path}", *linear, **single)
    return found


def test_exports_have_the_names_and_settings_of_published_checkpoints_and_are_read_back(tmp_path):
    """Transformers 5.23 writes the layers of the language model as blocks, and more."""
    worker = ActorWorker(ActorConfig(write_checkpoint("kimi_k25", tmp_path / "first")), torch.device("cpu"))
    worker.save(tmp_path / "saved")
    worker.finish_save()
    path = tmp_path / "saved" / "huggingface"
    stored, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    assert stored.keys() == published_names(worker.module.model.config)
    tower = worker.module.model.model.vision_tower.layers[0]
    assert torch.equal(stored["vision_tower.encoder.blocks.0.norm1.weight"], tower.norm2.weight.to(torch.bfloat16))
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert (config["text_config"]["scoring_func"], config["text_config"]["topk_method"]) == ("sigmoid", "noaux_tc")
    again = ActorWorker(ActorConfig(str(path)), torch.device("cpu"))
    whole = FAMILY.model_class().from_pretrained(path, dtype=torch.float32)
    pairs = zip(worker.named_weights(), again.named_weights(), whole.state_dict().items(), strict=True)
    for (name, weight), (other, read), _ in pairs:
        assert name == other
        assert torch.equal(read, whole.state_dict()[name])
        torch.testing.assert_close(read, weight, atol=0, rtol=2**-8)


def test_exports_of_full_training_on_the_server_have_these_names_too(tmp_path):
    model, builder = tiny_model("kimi_k25"), mock.Mock()
    trainer = SimpleNamespace(model=model, family=FAMILY, weights=trainable_weights(model, FAMILY))
    base = SimpleNamespace(trainer=trainer, renderer=SimpleNamespace(builder=builder))
    TrainedWeights("kimi", base).export(tmp_path, torch.float32, at_once)
    assert load_file(tmp_path / "model.safetensors").keys() == published_names(model.config)
    read = FAMILY.model_class().from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in read.items())
    builder.save_pretrained.assert_called_once_with(tmp_path)


def test_settings_of_published_image_processors_are_read_and_written(tmp_path):
    path = write_checkpoint("kimi_k25", tmp_path)
    settings = {
        "in_patch_limit": 99,
        "patch_size": 4,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.5, 0.5, 0.4],
        "merge_kernel_size": [2, 2],
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 64,
        "in_patch_limit_each_frame": 55,
        "in_patch_limit_video": None,
        "temporal_merge_kernel_size": 4,
        "sample_fps": 2.0,
    }
    code = {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"auto_map": code, "media_proc_cfg": settings}))
    processor = load_image_processor(path)
    assert (processor.max_patches, processor.patch_size, processor.merge_size) == (99, 4, 2)
    assert (list(processor.image_mean), list(processor.image_std)) == (settings["image_mean"], settings["image_std"])
    assert processor.size["max_height"] == processor.size["max_width"] == 64
    processor.max_patches = 77
    processor.save_pretrained(tmp_path)
    written = json.loads(file.read_text())
    assert written["media_proc_cfg"] == settings | {"in_patch_limit": 77, "merge_kernel_size": 2}
    assert "auto_map" not in written
    assert load_image_processor(path).max_patches == 77


def test_limits_of_an_image_are_numbers_of_patches():
    processor = tiny_image_processor("kimi_k25")
    options = FAMILY.media_layout.processor_options
    assert options(processor, None, None) == {"max_patches": 256}
    assert options(processor, None, 1000) == {"max_patches": 62}
    with pytest.raises(InvalidConfig, match="min_pixels=64: images of this family are never enlarged"):
        options(processor, 64, None)
    with pytest.raises(InvalidConfig, match="max_pixels=15: must be at least 16, one patch"):
        options(processor, None, 15)
    with pytest.raises(InvalidMedia, match="height 0 and width 3 is empty"):
        FAMILY.image_tokens(0, 3, processor, {"max_patches": 9}, tiny_config("kimi_k25"))


def test_what_depends_on_grids_alone_is_computed_where_they_are():
    """As for grids in host memory beside a tower on a device."""
    model = tiny_model("kimi_k25")
    media = image_inputs(model.config, (4, 6), (8, 4))
    tower = model.get_submodule(FAMILY.vision_tower)
    found = FAMILY.tower_output(model, media, **grid_arguments(tower, media["image_grid_thw"]))
    assert torch.equal(found, FAMILY.tower_output(model, media))


def test_a_token_behind_the_vocabulary_is_not_banned():
    config = tiny_config("kimi_k25")
    config.video_token_id = config.text_config.vocab_size
    assert FAMILY.banned_ids(config) == (250, 252, 253)


def test_queries_that_are_not_compressed_are_refused():
    config = tiny_config("kimi_k25")
    config.text_config.q_lora_rank = None
    with pytest.raises(InvalidConfig, match="q_lora_rank=None"):
        FAMILY.check_supported(config)


def test_queries_without_their_keys_are_refused():
    """They are one tensor in vLLM, which would keep its old one."""
    model = tiny_model("kimi_k25")
    some = [(name, weight) for name, weight in model.named_parameters() if "layers.1.attn.k_proj.weight" not in name]
    with pytest.raises(ValueError, match=r"blocks\.1\.wqkv\.weight has only q, v"):
        list(FAMILY.rollout_weights(some, model.config))
