"""Checkpoints that are read by parts: equal to ``from_pretrained`` to the bit, and no tensor larger than a rank's part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dataproto.errors import CheckpointError, InvalidConfig
from helpers.tiny_models import CLASSES, tiny_config, tiny_model
from rollout.hf import HFEngine
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.ranks.mesh import Ranks
from workers.roles.critic import CriticConfig, CriticWorker
from workers.training.loading import load_packed

CPU = torch.device("cpu")


def write(model_type: str, path: Path, tied: bool = False) -> Path:
    """A checkpoint without a tokenizer."""
    config = tiny_config(model_type)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    tiny_model(model_type, config=config).save_pretrained(path)
    return path


def change(path: Path, names: Any) -> None:
    """Rewrites the weights: ``names`` from tensors by name to tensors by name."""
    file = path / "model.safetensors"
    save_file(
        {name: value.contiguous().clone() for name, value in names(load_file(file)).items()}, file, {"format": "pt"}
    )


def loaded(path: Path, **options: Any) -> PackedVLM:
    """The model in one process, through the loader of all roles."""
    config = ModelConfig(**options)
    object.__setattr__(config, "model_path", str(path))
    return load_packed(config, CPU, Ranks(), True, lambda model, family: PackedVLM(model, family, 1.0))[0]


def check_equal(module: PackedVLM, path: Path) -> None:
    """Parameters and buffers, those that no checkpoint holds too, are those of ``from_pretrained``."""
    model_type = module.family.model_type
    expected = getattr(transformers, CLASSES[model_type][1]).from_pretrained(path, dtype=torch.float32)
    for kind in ("named_parameters", "named_buffers"):
        found = dict(getattr(module.model, kind)(remove_duplicate=False))
        wanted = dict(getattr(expected, kind)(remove_duplicate=False))
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
    assert expected.generation_config.to_dict() == module.model.generation_config.to_dict()
    ties = {name: id(value) for name, value in module.model.named_parameters(remove_duplicate=False)}
    assert len(set(ties.values())) == len(list(expected.parameters()))


IN_THE_GATE = {("qwen2_5_vl", True), ("qwen3_vl", False), ("internvl", False), ("glm4v", False)}


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [
        pytest.param(name, tied, marks=() if (name, tied) in IN_THE_GATE else pytest.mark.long)
        for name in CLASSES
        for tied in (False, True)
    ],
)
def test_a_model_is_that_of_from_pretrained(tmp_path, model_type, tied):
    path = write(model_type, tmp_path, tied)
    check_equal(loaded(path), path)


def test_names_of_older_checkpoints_are_known(tmp_path):
    path = write("qwen2_5_vl", tmp_path)
    change(path, lambda found: {name.replace("model.visual.", "visual."): value for name, value in found.items()})
    change(
        path, lambda found: {name.replace("model.language_model.", "model."): value for name, value in found.items()}
    )
    assert {"visual.blocks.0.norm1.weight", "model.layers.0.mlp.up_proj.weight"} <= load_file(
        path / "model.safetensors"
    ).keys()
    check_equal(loaded(path), path)


def test_experts_that_are_stored_one_by_one_are_stacked(tmp_path):
    path = write("qwen3_5_moe", tmp_path)
    assert any(".experts.3.gate_proj.weight" in name for name in load_file(path / "model.safetensors"))
    check_equal(loaded(path), path)


def test_experts_with_rows_and_columns_swapped_are_turned(tmp_path):
    path = write("qwen3_vl_moe", tmp_path)
    straight = loaded(path).state_dict()
    change(
        path,
        lambda found: {name: value.transpose(1, 2) if ".experts." in name else value for name, value in found.items()},
    )
    module = loaded(path)
    check_equal(module, path)
    assert all(torch.equal(value, straight[name]) for name, value in module.state_dict().items())


def test_files_of_an_index_are_read(tmp_path):
    path = write("qwen2_5_vl", tmp_path / "whole")
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(path)
    model.save_pretrained(tmp_path / "index", max_shard_size="100KB")
    assert len(list((tmp_path / "index").glob("*.safetensors"))) > 2
    check_equal(loaded(tmp_path / "index"), path)


def test_weights_that_a_checkpoint_lacks_are_initialised_alike(tmp_path, caplog):
    path = write("qwen3", tmp_path)
    absent = "model.layers.0.mlp.up_proj.weight"
    change(path, lambda found: {name: value for name, value in found.items() if name != absent})
    first = loaded(path)
    assert f"lacks weights, which are initialised: {absent}" in caplog.text
    torch.rand(7)  # of a generator in another state
    second = loaded(path)
    weight = first.model.get_parameter(absent)
    assert torch.equal(weight, second.model.get_parameter(absent))
    assert 0.01 < weight.std() < 0.03  # the config's initializer_range is 0.02


@pytest.mark.parametrize("tied", [False, True])
def test_a_reward_model_is_no_policy(tmp_path, tied):
    """A head that the checkpoint lacks was random, in a teacher too; one that is tied is the embedding."""
    path = write("qwen3", tmp_path, tied)
    score = {"score.weight": torch.ones(1, 8)}
    change(path, lambda found: {name: value for name, value in found.items() if name != "lm_head.weight"} | score)
    if tied:
        check_equal(loaded(path), path)
        return
    with pytest.raises(CheckpointError, match="lacks lm_head, the language-model head, as a reward model"):
        loaded(path)
    with pytest.raises(CheckpointError, match="lacks lm_head"):
        loaded(path, lora_rank=2)
    CriticWorker(CriticConfig(str(path)), CPU)  # which needs none


@pytest.mark.parametrize("same", [True, False])
def test_weights_that_are_tied_and_stored_twice_are_tied_if_they_are_equal(tmp_path, same, caplog):
    path = write("qwen2", tmp_path, tied=True)
    embedding = "model.embed_tokens.weight"
    change(path, lambda found: found | {"lm_head.weight": found[embedding] + (0 if same else 1)})
    module = loaded(path)
    check_equal(module, path)
    assert (module.model.lm_head.weight is module.model.get_parameter(embedding)) == same
    assert ("they are not tied" in caplog.text) != same


def test_a_head_that_is_stored_in_the_place_of_the_embedding_is_both(tmp_path):
    path = write("qwen2", tmp_path, tied=True)
    change(path, lambda found: {name.replace("model.embed_tokens", "lm_head"): value for name, value in found.items()})
    check_equal(loaded(path), path)


def test_what_is_not_used_is_said(tmp_path, caplog):
    path = write("qwen3", tmp_path)
    change(path, lambda found: found | {"model.other.weight": torch.ones(2), "a.rotary_emb.inv_freq": torch.ones(2)})
    check_equal(loaded(path), path)
    assert "not used: model.other.weight\n" in caplog.text


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("no weights", CheckpointError, "holds no weights"),
        ("cut", CheckpointError, "cannot be read"),
        ("no file", CheckpointError, r"lacks \['model-1.safetensors'\]"),
        ("shape", CheckpointError, r"its weight lm_head.weight is \(3, 64\), and .* is \(256, 64\)"),
        ("quantized", InvalidConfig, "quantized"),
        ("float8", InvalidConfig, r"model.layers.0.mlp.up_proj.weight is of type F8_E4M3, and its scale"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_named(tmp_path, damage, error, message):
    path = write("qwen3", tmp_path)
    file = path / "model.safetensors"
    if damage == "no weights":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "no file":
        file.unlink()
        index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-1.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    elif damage == "shape":
        change(path, lambda found: found | {"lm_head.weight": torch.zeros(3, 64)})
    elif damage == "float8":
        name = "model.layers.0.mlp.up_proj.weight"
        change(
            path, lambda found: found | {name: found[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1)}
        )
    else:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(error, match=message):
        loaded(path)


@pytest.mark.parametrize("read", [loaded, lambda path: HFEngine(str(path), device=CPU)], ids=["actor", "engine"])
def test_a_checkpoint_with_a_quantized_part_is_refused(tmp_path, read):
    """As Kimi K2.5 is published. All of its projections were initialised, with a warning."""
    path = write("kimi_k25", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}
    (path / "config.json").write_text(json.dumps(config))
    change(
        path,
        lambda found: {name.replace("_proj.weight", "_proj.weight_packed"): value for name, value in found.items()},
    )
    with pytest.raises(
        InvalidConfig, match=r"quantized weights \(text_config of its config says so\), which are not read"
    ):
        read(path)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_an_engine_refuses_weights_whose_scales_it_would_leave_out(tmp_path, stored):
    path, name = write("qwen3", tmp_path), "model.layers.0.mlp.up_proj.weight"
    change(path, lambda found: found | {name: found[name].to(stored), f"{name}_scale_inv": torch.ones(1)})
    with pytest.raises(InvalidConfig, match=rf"{name} is of type (F8_E4M3|I8), and its scale"):
        HFEngine(str(path), device=CPU)
