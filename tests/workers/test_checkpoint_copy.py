"""Checkpoints copied file by file in another dtype: the same values, of which never more than one file is in memory."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dataproto.errors import CheckpointError
from dataproto.vlm import family_of
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import CLASSES
from workers.weights import sharded_export
from workers.weights.sharded_export import copy_weights

LIMIT = 70_000  # bytes of a file


def stored(folder):
    return {
        name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"])
def test_a_copy_is_what_from_pretrained_makes_of_the_checkpoint(tmp_path, model_type):
    path = Path(write_checkpoint(model_type, tmp_path / "model"))
    family, before = family_of(model_type), stored(path)
    copy_weights(str(path), family, tmp_path / "copy", torch.bfloat16)
    for file in path.glob("*.json"):
        (tmp_path / "copy" / file.name).write_text(file.read_text())
    copied = stored(tmp_path / "copy")
    assert copied.keys() == before.keys()
    exact = [name for name in copied if copied[name].dtype == torch.float32]
    assert bool(exact) == bool(family.float32_weights)
    for name, tensor in copied.items():
        assert torch.equal(tensor, before[name] if name in exact else before[name].bfloat16()), name
    ours, theirs = (
        getattr(transformers, CLASSES[model_type][1]).from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        for folder in (tmp_path / "copy", path)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.slow
def test_one_file_is_in_memory_at_a_time(tmp_path, monkeypatch):
    path = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    whole = sum(tensor.numel() * 2 for tensor in stored(path).values())
    largest = max(tensor.numel() * 2 for tensor in stored(path).values())
    alive, sizes = [], []

    def save(tensors, file, metadata):
        gc.collect()
        assert not any(each() is not None for each in alive)  # what the file before held
        alive[:] = [weakref.ref(tensor) for tensor in tensors.values()]
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors.values()))
        save_file(tensors, file, metadata)

    monkeypatch.setattr(sharded_export, "FILE_BYTES", LIMIT)
    monkeypatch.setattr(sharded_export, "save_file", save)
    copy_weights(path, family_of("qwen2_5_vl"), tmp_path / "copy", torch.bfloat16)
    assert sum(sizes) == whole > 3 * LIMIT
    assert max(sizes) <= max(LIMIT, largest)
    files = sorted(file.name for file in (tmp_path / "copy").glob("*.safetensors"))
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) == len(sizes)
    assert index["metadata"]["total_size"] == whole
    for file in files:
        with safe_open(tmp_path / "copy" / file, "pt") as opened:
            assert {index["weight_map"][name] for name in opened.keys()} == {file}  # noqa: SIM118


def test_a_checkpoint_that_lacks_weights_is_refused_by_their_names(tmp_path):
    path = Path(write_checkpoint("qwen2_5_vl", tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if "q_proj.weight" in name)
    del tensors[name]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights of its model: .*q_proj"):
        copy_weights(str(path), family_of("qwen2_5_vl"), tmp_path / "copy", torch.bfloat16)
    assert not (tmp_path / "copy").exists()
