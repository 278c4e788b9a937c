"""Every family on one device, by the kernels that run there, against Hugging Face's forward of each row alone on the CPU.

On a CUDA device (a few minutes; families that fail are named, and the others go on)::

    OMP_NUM_THREADS=1 python -m pytest -m long -k cuda -n 4 tests/workers/test_families_on_device.py

Rows with two images of unequal size, with one and with none, and samples that share a prompt, are one packed micro-batch of an
actor from a checkpoint. In float32 log-probs are within 5e-5 and gradients within 5e-4 of their norms. In bfloat16 both are about
as near to Hugging Face's float32 as its own bfloat16 forward of each row alone.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from dataproto import object_array
from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.batches import padded_log_probs
from helpers.layouts import TEMPERATURE, mixed_rows
from helpers.tiny_models import (
    FURTHER_TYPES,
    MODEL_TYPES,
    MOE_TYPES,
    TEXT_TYPES,
    rounding,
    tiny_config,
    tiny_model,
)
from workers.model.named_weights import float32_weights
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.loss_sums import LossSums

TYPES = list(dict.fromkeys((*MODEL_TYPES, *FURTHER_TYPES, "idefics3", *TEXT_TYPES)))
QUICK = (
    "qwen3_5_moe",
    "gemma3",
    "kimi_k25",
)  # a recurrence, experts, a window, images that see ahead, latent attention
DTYPES = ("float32", "bfloat16")
ALL_EXPERTS = {
    "num_experts_per_tok": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top_k_experts": ("num_experts",),
    "topk_group": ("n_group",),
}
"""Options of routers, and those that say how many there are."""


@pytest.fixture
def supported(model_type):
    """Leaves out a family that refuses this version of transformers."""
    try:
        family_of(model_type).check_supported(tiny_config(model_type))
    except InvalidConfig as refusal:
        pytest.skip(str(refusal))


def config_of(model_type, dtype):
    """In bfloat16 each token is sent to all experts: rounding would choose others."""
    config = tiny_config(model_type)
    if dtype == "bfloat16" and model_type in MOE_TYPES:
        text = config.get_text_config()
        for option, counts in ALL_EXPERTS.items():
            if hasattr(text, option):
                setattr(text, option, next(getattr(text, count) for count in counts if hasattr(text, count)))
    return config


def rows_of(model_type, dtype):
    """The config, and rows with advantages."""
    config = config_of(model_type, dtype)
    data = mixed_rows(config)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(5))
    return config, data


def loss_of(outputs, rows):
    return outputs.log_probs * rows["advantages"], {}


def in_half(media):
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in media.items()}


@cache
def row_by_row(model_type, dtype, computed_in):
    """Hugging Face's log-probs, and the gradients of their weighted sum."""
    config, data = rows_of(model_type, dtype)
    model = tiny_model(model_type, config=config)
    if computed_in == "bfloat16":
        exact = {id(weight) for weight in float32_weights(model, family_of(config))}
        for weight in model.parameters():
            weight.data = weight.data if id(weight) in exact else weight.data.bfloat16()
        data["multi_modal_inputs"] = object_array([in_half(media) for media in data["multi_modal_inputs"]])
    log_probs = padded_log_probs(model, data, TEMPERATURE)
    (log_probs * data["advantages"]).sum().backward()
    return log_probs.detach(), gradients_of(model)


def gradients_of(model):
    return {name: weight.grad.float().cpu() for name, weight in model.named_parameters() if weight.grad is not None}


def packed(model_type, dtype, device, folder):
    """An actor's log-probs, those of its update, and the gradients."""
    config, data = rows_of(model_type, dtype)
    tiny_model(model_type, config=config).save_pretrained(folder)
    actor = ActorWorker(ActorConfig(str(folder), dtype=dtype, temperature=TEMPERATURE), device)
    scored = actor.log_probs(data)["old_log_probs"]
    sums = LossSums("loss", data["response_mask"].float(), device)
    actor.model.run(data, loss_of, sums)
    return scored, sums.scores.cpu(), gradients_of(actor.module.model)


def size_of(part, gradients, exact):
    """The norm of a gradient's difference from ``exact``; without a gradient it is zero."""
    return float((gradients.get(part, torch.zeros(())) - exact[part]).norm())


def rms(difference: Tensor, mask: Tensor) -> float:
    return float(difference[mask].square().mean().sqrt())


@pytest.fixture
def exact_products(monkeypatch):
    """Convolutions of cuDNN compute in TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


on_cuda = [
    pytest.mark.long,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_devices = pytest.mark.parametrize(
    ("device", "model_type"),
    [
        *(
            pytest.param("cpu", each, id=f"cpu-{each}", marks=[pytest.mark.long] if each not in QUICK else [])
            for each in TYPES
        ),
        *(pytest.param("cuda", each, id=f"cuda-{each}", marks=on_cuda) for each in TYPES),
    ],
)


@on_devices
def test_packed_rows_in_float32_are_rows_alone(device, model_type, supported, exact_products, tmp_path):
    expected, gradients = row_by_row(model_type, "float32", "float32")
    scored, updated, found = packed(model_type, "float32", torch.device(device), tmp_path)
    assert (scored - expected).abs().max() < 5e-5
    assert (updated - expected).abs().max() < 5e-5
    assert expected.std() > 0.1
    assert found.keys() >= {name for name, gradient in gradients.items() if gradient.norm() > rounding(name)}
    for name, gradient in gradients.items():
        error = size_of(name, found, gradients)
        assert error <= 5e-4 * gradient.norm() + rounding(name), f"{name}: {error} of {gradient.norm()}"


@on_devices
def test_packed_rows_in_bfloat16_are_as_exact_as_rows_alone(device, model_type, supported, tmp_path):
    exact, gradients = row_by_row(model_type, "bfloat16", "float32")
    rounded, theirs = row_by_row(model_type, "bfloat16", "bfloat16")
    scored, updated, found = packed(model_type, "bfloat16", torch.device(device), tmp_path)
    mask = rows_of(model_type, "bfloat16")[1]["response_mask"] != 0
    allowed = 1.6 * rms(rounded - exact, mask) + 5e-4
    assert 0 < rms(scored - exact, mask) < allowed
    assert rms(updated - exact, mask) < allowed
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    wrong = []
    for name, gradient in gradients.items():
        error, rounding_error = size_of(name, found, gradients), size_of(name, theirs, gradients)
        if error > 2.5 * rounding_error + 5e-3 * gradient.norm() + 2e-4 * norm:
            wrong.append(f"{name}: {error:.1e} where rounding makes {rounding_error:.1e} of {gradient.norm():.1e}")
    assert wrong == []
