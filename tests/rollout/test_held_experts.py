"""The comparison of the experts that vLLM holds with those that it should hold."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.engine_weights import _held, equal_in_fp8, reorders_experts, same_experts

GATE_AND_UP = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))
CHANGED = {
    "gate and up": GATE_AND_UP.roll(4, 1),
    "rows": GATE_AND_UP.flip(1),
    "columns": GATE_AND_UP.flip(2),
    "transposed": GATE_AND_UP.transpose(1, 2).reshape(3, 8, 6),
    "one expert": torch.cat([GATE_AND_UP[:2], GATE_AND_UP[2:].flip(1)]),
}


@pytest.mark.parametrize("same", [torch.equal, equal_in_fp8])
@pytest.mark.parametrize("changed", CHANGED)
def test_experts_in_another_order_are_not_the_same(changed, same):
    assert same_experts(GATE_AND_UP.clone(), GATE_AND_UP, same, reordered=False)
    assert not same_experts(CHANGED[changed], GATE_AND_UP, same, reordered=False)
    assert same_experts(CHANGED[changed], GATE_AND_UP, same, reordered=True)  # where vLLM packs them


@pytest.mark.parametrize("reordered", [False, True])
def test_filled_experts_are_compared_without_their_zeros(reordered):
    filled = nn.functional.pad(GATE_AND_UP, (0, 2, 0, 1))
    assert same_experts(filled, GATE_AND_UP, torch.equal, reordered)
    assert not same_experts(filled.roll(1, 0), GATE_AND_UP, torch.equal, reordered)  # of another expert
    assert not same_experts(filled * 1.5, GATE_AND_UP, torch.equal, reordered)
    assert not same_experts(GATE_AND_UP, filled, torch.equal, reordered)
    assert not same_experts(filled[:2], GATE_AND_UP, torch.equal, reordered)


def test_rounding_is_that_of_an_output_channel():
    """The smallest step of a channel of small weights is not that of a channel of large ones."""
    wanted = torch.ones(1, 2, 4)
    wanted[0, 0] = 1e7
    held = wanted.clone()
    held[0, 1] = 0
    assert not same_experts(held, wanted, equal_in_fp8, reordered=False)


@pytest.mark.parametrize(
    ("device", "kernel", "expected"),
    [("meta", "TRITON", False), ("meta", "FLASHINFER_CUTLASS", True), ("cpu", "CPU", True)],
)
@pytest.mark.parametrize("attribute", ["unquantized_backend", "fp8_backend"])
def test_which_kernels_reorder_experts(device, kernel, expected, attribute):
    layer = nn.Linear(2, 2, device=device)
    layer.quant_method = SimpleNamespace(**{attribute: SimpleNamespace(name=kernel)})
    assert reorders_experts(layer) == expected


def test_quantised_experts_are_held_with_a_scale_for_each_output_channel():
    scale = GATE_AND_UP.abs().amax(-1, keepdim=True) / 448
    layer = nn.Module()
    layer.quant_method = SimpleNamespace(uses_meta_device=True)
    layer.w13_weight = nn.Parameter((GATE_AND_UP / scale).to(torch.float8_e4m3fn), requires_grad=False)
    layer.w13_weight_scale = nn.Parameter(scale)
    held = _held(layer, "experts.w13_weight")
    assert same_experts(held, GATE_AND_UP, equal_in_fp8, reordered=False)
    assert not same_experts(held, CHANGED["gate and up"], equal_in_fp8, reordered=False)
