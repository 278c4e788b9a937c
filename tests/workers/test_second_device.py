"""Every family's forward and backward pass on a device that is not the host: no operation mixes the two.

The device is pretended (`helpers.second_device`), so the kernels are the CPU's; `test_families_on_device` runs a GPU's.
"""

from functools import cache

import pytest
import torch

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.layouts import TEMPERATURE, mixed_rows
from helpers.second_device import DEVICE, MixedDevices, second_device
from helpers.tiny_models import (
    FURTHER_TYPES,
    GEMMA4_TYPES,
    HYBRID_TYPES,
    MODEL_TYPES,
    TEXT_TYPES,
    rounding,
    tiny_config,
    tiny_model,
)
from workers.model.packed_model import PackedVLM
from workers.training.forward_pass import forward_rows, rows_to_device
from workers.training.loss_sums import LossSums

CPU = torch.device("cpu")
CPU_KERNEL = "workers.model.segments.segment_attention"  # groups segments by their lengths; a GPU's kernels do not
WAITING = {
    **dict.fromkeys(HYBRID_TYPES, "workers.model.recurrent.pieces"),
    **dict.fromkeys(("gemma3", *GEMMA4_TYPES), "workers.model.segments.image_blocks"),
}
"""The module of ours that makes the host wait, in each micro-batch."""
WAITING_IN_TRANSFORMERS = ("qwen3_vl", "qwen3_vl_moe", "minicpmv4_6", *GEMMA4_TYPES)  # for selections by masks
TYPES = list(dict.fromkeys((*MODEL_TYPES, *FURTHER_TYPES, "idefics3", *TEXT_TYPES)))


def weighted(module, data, device):
    """The log-probs of one micro-batch, and the gradients of the sum of these times the advantages."""
    outputs = forward_rows(module, data, device, entropy=True)
    rows = rows_to_device(data, device)
    sums = LossSums("loss", data["response_mask"].float(), device, keep_scores=True)
    metrics = {"entropy": outputs.entropy, "entropy_max": outputs.entropy}
    sums.add(slice(0, len(data)), outputs.scores, outputs.log_probs * rows["advantages"], metrics).backward()
    return sums.scores, {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@cache
def passes(model_type):
    """The results of `weighted` on the CPU and on the second device, and what the host waited for there."""
    config = tiny_config(model_type)
    try:
        family_of(config).check_supported(config)
    except InvalidConfig as refusal:
        pytest.skip(str(refusal))
    data = mixed_rows(config)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(5))
    module = PackedVLM(tiny_model(model_type, config=config), family_of(config), TEMPERATURE)
    expected = weighted(module, data, CPU)
    module.zero_grad()
    with second_device() as waits:
        module.to(DEVICE)
        waits.clear()
        scores, gradients = weighted(module, data, DEVICE)
        during = list(waits)
        assert {each.device for each in (scores, *gradients.values())} == {DEVICE}
        found = scores.cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}
    return expected, found, during


@pytest.mark.parametrize("model_type", TYPES)
def test_a_pass_on_a_device_is_that_on_the_host(model_type):
    """GLM's tower indexed bounds of images, which lay on the host, by places on the device."""
    (expected, gradients), (scores, found), _ = passes(model_type)
    assert (scores - expected).abs().max() < 2e-5
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm() + rounding(name), name


@pytest.mark.parametrize("model_type", TYPES)
def test_the_host_waits_for_the_device_in_known_places_alone(model_type):
    """Where it waits in each micro-batch, it cannot prepare the next one meanwhile."""
    waits = passes(model_type)[2]
    assert CPU_KERNEL in waits
    ours = {each for each in waits if each.startswith("workers.")} - {CPU_KERNEL}
    assert ours <= {WAITING.get(model_type)}
    others = {each for each in waits if not each.startswith("workers.")}
    assert not others or model_type in WAITING_IN_TRANSFORMERS


def test_mixed_devices_are_refused_as_by_a_gpu():
    with second_device() as waits:
        here, there = torch.arange(3.0), torch.arange(3.0).to(DEVICE)
        places = torch.tensor([2, 0], device=DEVICE)
        assert there.device == places.device == torch.ones(2, device=DEVICE).device == (there + 1).device == DEVICE
        for mixed in (lambda: here + there, lambda: here[places], lambda: torch.cat([here, there]), there.numpy):
            with pytest.raises((MixedDevices, TypeError)):
                mixed()
        assert waits == []
        assert (there * torch.tensor(2.0))[places.cpu()].cpu().tolist() == [4.0, 0.0]  # numbers and indices may be here
        assert there[there > 0].tolist() == [1.0, 2.0]
        assert float(there.sum()) == 3.0
        assert len(waits) == 5  # three copies to the host, the size of a selection, a number
        assert torch.zeros(3).copy_(there).tolist() == [0.0, 1.0, 2.0]
