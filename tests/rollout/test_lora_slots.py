"""Slots of vLLM's adapters that are written at once, against those that vLLM writes layer by layer."""

import copy

import pytest
import torch
from torch import nn

from rollout.vllm.lora_engine import SlotWrites

pytestmark = pytest.mark.vllm

SLOTS, RANK, INPUTS = 2, 8, 6
SIZES = (12, 4, 4)


@pytest.fixture
def layer(request):
    """A layer of vLLM with adapters in all slots, without what it adapts: of these outputs, which are one matrix or several."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    sizes = request.param
    kind = MergedColumnParallelLinearWithLoRA if len(sizes) > 1 else BaseLinearLayerWithLoRA
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.tp_size, made.n_slices, made.output_sizes = 1, len(sizes), sizes
    made.lora_a_stacked = tuple(torch.ones(SLOTS, 1, RANK, INPUTS) for _ in sizes)
    made.lora_b_stacked = tuple(torch.ones(SLOTS, 1, size, RANK) for size in sizes)
    return made


def pairs(rank, sizes):
    return torch.randn(rank, INPUTS), torch.randn(sum(sizes), rank)


def given(rank, *sizes):
    """What vLLM passes for layers of several matrices, of which some have no adapter."""
    found = [(None, None) if each is None else pairs(rank, each) for each in sizes]
    return [down for down, _ in found], [up for _, up in found]


@pytest.mark.parametrize(
    ("layer", "matrices"),
    [
        ((SIZES[0],), lambda: pairs(RANK, SIZES[:1])),
        ((SIZES[0],), lambda: pairs(4, SIZES[:1])),
        (SIZES, lambda: given(RANK, *((size,) for size in SIZES))),
        (SIZES, lambda: given(4, SIZES[:1], None, SIZES[2:])),
        (SIZES, lambda: given(4, SIZES[:2], SIZES[2:])),
    ],
    ids=["whole", "smaller", "several", "one without", "one for two"],
    indirect=["layer"],
)
def test_slots_are_those_that_vllm_writes(layer, matrices):
    other, (downs, ups) = copy.deepcopy(layer), matrices()
    writes = SlotWrites([other])
    layer.set_lora(1, downs, ups)
    other.set_lora(1, downs, ups)
    assert all(bool((slots == 1).all()) for slots in (*other.lora_a_stacked, *other.lora_b_stacked))
    for _ in range(2):  # the second time there is nothing to write
        writes.write()
        assert_same(other, layer)
    for each in (layer, other):
        each.reset_lora(0)
    writes.write()
    assert_same(other, layer)


def assert_same(one, other):
    for mine, theirs in zip((*one.lora_a_stacked, *one.lora_b_stacked), (*other.lora_a_stacked, *other.lora_b_stacked)):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("layer", [(SIZES[0],)], indirect=True)
def test_layers_that_do_more_than_copy_write_for_themselves(layer):
    layer.tp_size = 2
    SlotWrites([layer])
    layer.reset_lora(0)
    assert not any(bool(slots[0].any()) for slots in (*layer.lora_a_stacked, *layer.lora_b_stacked))


@pytest.mark.parametrize("layer", [(SIZES[0],)], indirect=True)
def test_what_cannot_be_written_is_not_tried_again(layer):
    writes, (down, up) = SlotWrites([layer]), pairs(RANK, SIZES[:1])
    layer.set_lora(0, torch.randn(RANK + 1, INPUTS), up)
    with pytest.raises(RuntimeError):
        writes.write()
    layer.set_lora(1, down, up)
    writes.write()
    assert torch.equal(layer.lora_b_stacked[0][1, 0], up)
