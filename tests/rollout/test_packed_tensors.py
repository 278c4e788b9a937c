"""Packed tensors and the files that are written of them."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from rollout.adapters.packed_tensors import PART_BYTES, pack, pack_by_kind, write_packed

LARGE = PART_BYTES // 4 + 7  # numbers of more than one part


def test_a_file_of_packed_tensors_has_them_all_and_the_digest_that_was_returned(tmp_path):
    tensors = {
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "count": torch.tensor(7),
        "large": torch.randn(LARGE),
        "step": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }
    file = tmp_path / "packed.safetensors"
    digest = write_packed(pack_by_kind(tensors), file, {"format": "pt"})
    found = load_file(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_packed_does_not_follow_its_tensors(dtype):
    weights = {"a": torch.randn(2, 3), "b": torch.randn(4)}
    before = {name: tensor.to(dtype, copy=True) for name, tensor in weights.items()}
    packed = pack(weights, dtype)
    for tensor in weights.values():
        tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in packed.on_host().tensors().items())
