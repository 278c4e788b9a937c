"""Choosing FlashAttention 4 by name. ``python benchmarks/attention.py`` compares its results on a GPU."""

import os

import pytest
import torch
from torch.autograd import grad

from dataproto.errors import InvalidConfig
from helpers.tiny_models import tiny_model
from recipes.demo.tiny_model import make_tiny_model
from workers.model import flash_attention4 as flash4
from workers.model.attention import FLASH_KERNELS, use_packed_attention
from workers.model.segment_attention import Segments
from workers.roles.actor import ActorConfig, ActorWorker

STORED = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")]


@pytest.fixture
def _installed(monkeypatch, tmp_path):
    monkeypatch.setattr(flash4, "installed_version", lambda name: "4.0.0b36")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in STORED:
        monkeypatch.setenv(name, "")  # restores it afterwards
        monkeypatch.delenv(name)


def test_it_is_refused_if_it_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(flash4, "installed_version", lambda name: None)
    with pytest.raises(InvalidConfig, match="needs the package flash-attn-4: pip install"):
        ActorWorker(ActorConfig(str(make_tiny_model(tmp_path / "model")), flash_attention="fa4"))


@pytest.mark.parametrize(
    ("name", "capability", "accepted"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), False),
        ("NVIDIA L40S", (8, 9), False),
        ("NVIDIA H200", (9, 0), True),
        ("NVIDIA B200", (10, 0), True),
        ("NVIDIA B300", (10, 3), True),
        ("NVIDIA Thor", (11, 0), True),
        ("NVIDIA GeForce RTX 5090", (12, 0), False),
        ("NVIDIA GB10", (12, 1), False),
        ("a GPU of the future", (13, 0), False),
    ],
)
@pytest.mark.usefixtures("_installed")
def test_a_gpu_without_kernels_is_refused_by_name(monkeypatch, name, capability, accepted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    if accepted:
        return flash4.check_usable()
    number = ".".join(map(str, capability))
    with pytest.raises(
        InvalidConfig, match=rf"no kernels for {name} \(compute capability {number}\): .*set it to 'torch'"
    ):
        flash4.check_usable()


@pytest.mark.usefixtures("_installed")
def test_compiled_kernels_are_stored_for_the_next_run(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flash4.check_usable()
    assert [os.environ[name] for name in STORED] == ["1", str(tmp_path / "dataproto" / "flash_attention4")]
    for name, value in zip(STORED, ("0", "elsewhere"), strict=True):
        monkeypatch.setenv(name, value)
    flash4.check_usable()
    assert [os.environ[name] for name in STORED] == ["0", "elsewhere"]


@pytest.mark.usefixtures("_installed")
def test_kernels_of_one_gpu_are_not_read_on_another(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    folders = set()
    for capability in ((9, 0), (10, 0), (10, 3)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        flash4.check_usable()
        folders.add(os.environ.pop(STORED[1]))
    assert folders == {str(tmp_path / "dataproto" / "flash_attention4" / name) for name in ("sm90", "sm100", "sm103")}


@pytest.mark.usefixtures("_installed")
def test_no_kernels_are_stored_where_files_cannot_be_written_or_locked(monkeypatch, tmp_path):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    flash4.check_usable()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(flash4, "flock", no_locks)
    flash4.check_usable()
    assert not {*STORED} & os.environ.keys()


@pytest.mark.usefixtures("_installed")
def test_two_models_in_one_process_use_different_kernels():
    first, second = tiny_model("qwen2_5_vl"), tiny_model("qwen2_5_vl")
    use_packed_attention(first)
    use_packed_attention(second, "fa4")
    for model, name in ((first, "packed_flash_torch"), (second, "packed_flash_fa4")):
        assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {name}


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(16, 16, 80), (28, 4, 128), (16, 16, 72)])
def test_heads_are_padded_to_sizes_with_right_gradients(heads, key_heads, width, monkeypatch):
    given = []
    kernel = flash4.flash_attention_4
    monkeypatch.setattr(flash4, "flash_attention_4", lambda q, *args: given.append(q.shape[-1]) or kernel(q, *args))
    q = torch.empty(600, heads, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    k, v = (
        torch.empty(700, key_heads, width, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2)
    )
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    out = flash4.attend(q, k, v, Segments(bounds, bounds, 400, 500, causal=True), None)
    assert given == [-(-width // 32) * 32]
    assert out.shape == (600, heads, width)
    assert [each.shape for each in grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(("longest", "width"), [(64, 32), (400, 256)])
def test_short_segments_and_wide_heads_use_the_kernel_of_torch(monkeypatch, longest, width):
    monkeypatch.setattr("workers.model.attention.torch_flash", lambda q, *args: q)
    q = torch.zeros(2 * longest, 2, width)
    bounds = torch.tensor([0, longest, 2 * longest], dtype=torch.int32)
    assert FLASH_KERNELS["fa4"](q, q, q, Segments(bounds, bounds, longest, longest, causal=False), None) is q
