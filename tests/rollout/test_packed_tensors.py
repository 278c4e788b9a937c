"""Packed tensors and the files that are written of them."""

import hashlib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.packed_tensors import PART_BYTES, PackedTensors, pack, pack_by_kind, write_packed

LARGE = PART_BYTES // 4 + 7  # numbers of more than one part
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Copies(TorchDispatchMode):
    """Counts the calls that copy."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "copy" in str(function)
        return function(*args, **(kwargs or {}))


def test_small_tensors_are_packed_by_one_call():
    weights = {str(number): torch.randn(3, number) for number in range(50)}
    with Copies() as copies:
        packed = pack(weights, torch.bfloat16)
    assert copies.count == 1
    assert all(torch.equal(found, weights[name].bfloat16()) for name, found in packed.tensors().items())


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_of_packed_tensors_has_them_all_and_the_digest_that_was_returned(tmp_path, device):
    tensors = {
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "count": torch.tensor(7),
        "large": torch.randn(LARGE),
        "step": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }
    file = tmp_path / "packed.safetensors"
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    digest = write_packed(pack_by_kind(placed), file, {"format": "pt"})
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


@pytest.mark.parametrize(("free", "stays"), [(251, True), (250, False)])
def test_copies_that_are_to_be_written_stay_on_a_device_that_has_room(monkeypatch, free, stays):
    on_device, on_host = replace(pack({"a": torch.ones(3)}), filled=object()), pack({"a": torch.ones(3)})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    monkeypatch.setattr(PackedTensors, "on_host", lambda self: on_host)
    assert on_device.for_writing() is (on_device if stays else on_host)
