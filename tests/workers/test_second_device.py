"""Every family's forward and backward pass on a device that is not the host: no operation mixes the two.

The device is pretended (`helpers.second_device`), so the kernels are the CPU's; `test_families_on_device` runs a GPU's.
"""

from functools import cache

import pytest
import torch
import transformers

from dataproto.errors import InvalidConfig
from dataproto.transfer import move, move_readable, on_host
from dataproto.vlm import family_of
from helpers.forward_rows import forward_rows
from helpers.layouts import TEMPERATURE, mixed_rows
from helpers.routes import with_routes
from helpers.second_device import DEVICE, MOVES, MixedDevices, second_device
from helpers.tiny_models import (
    FURTHER_TYPES,
    GEMMA4_TYPES,
    MODEL_TYPES,
    TEXT_TYPES,
    rounding,
    tiny_config,
    tiny_model,
)
from workers.model.image_blocks import image_blocks
from workers.model.kept_features import KeptFeatures
from workers.model.packed_model import PackedVLM
from workers.model.pieces import Pieces
from workers.model.segment_attention import equal_lengths
from workers.parallel.tokens import SplitTokens
from workers.ranks.autograd_collectives import Peers
from workers.training.forward_pass import PreparedRows, needs_tower, rows_to_device
from workers.training.loss_sums import LossSums

CPU = torch.device("cpu")
TOWER_WAITS = {
    **dict.fromkeys(GEMMA4_TYPES, 2),  # the pooler selects patches by a mask, and so does its gradient
    "muse_glimmer": 2,  # the longest segment, in each layer of its tower
    "minicpmv4_6": 8,  # copies of places and bounds to the device, the longest image, and bounds for the kernel of the CPU
}
"""How often the host waits in a micro-batch: within the vision towers of transformers alone."""
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    TOWER_WAITS |= dict.fromkeys(("idefics3", "smolvlm"), 2)  # images of zeros are padding, and are taken out by a mask
TYPES = list(dict.fromkeys((*MODEL_TYPES, *FURTHER_TYPES, "idefics3", *TEXT_TYPES)))


def weighted(module, data, device):
    """The log-probs of one micro-batch, and the gradients of the sum of these times the advantages."""
    outputs = forward_rows(module, data, device, entropy=True)
    rows = rows_to_device(data, device)
    sums = LossSums("loss", data["response_mask"].float(), device)
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
@pytest.mark.slow
def test_a_pass_on_a_device_is_that_on_the_host(model_type):
    """GLM's tower indexed bounds of images, which lay on the host, by places on the device."""
    (expected, gradients), (scores, found), _ = passes(model_type)
    assert (scores - expected).abs().max() < 2e-5
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm() + rounding(name), name


@pytest.mark.parametrize("model_type", TYPES)
def test_the_host_waits_for_the_device_within_towers_of_transformers_alone(model_type):
    """Where it waits in each micro-batch, it cannot prepare the next one meanwhile."""
    waits = passes(model_type)[2]
    assert len(waits) <= TOWER_WAITS.get(model_type, 0), waits
    assert all(each in ("", MOVES) or each.startswith("transformers.") for each in waits)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "gemma3", "qwen3_vl_moe"])
def test_the_host_waits_neither_for_filled_up_rows_nor_for_recorded_experts_nor_for_kept_features(model_type):
    config = tiny_config(model_type)
    family, data = family_of(config), mixed_rows(config)
    module = PackedVLM(tiny_model(model_type, config=config), family, TEMPERATURE)
    module.kept = KeptFeatures(family, config, torch.float32)
    if module.routing_shape[0]:
        data, module.replays_routing = with_routes(config, data), True
    with second_device() as waits, torch.no_grad():
        module.to(DEVICE)
        waits.clear()
        needs_tower(module, [data])
        passes = [forward_rows(module, data, DEVICE, length=length).log_probs for length in (0, 400)]
        assert not waits
        assert module.kept._kept  # the second pass has used them
        torch.testing.assert_close(passes[1].cpu(), passes[0].cpu(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3"])
def test_the_host_waits_for_no_rows_that_ranks_share(model_type):
    """Rows are filled up where they lie on the host, so that their boundaries are known there."""
    config = tiny_config(model_type)
    module = PackedVLM(tiny_model(model_type, config=config), family_of(config), TEMPERATURE)
    module.tokens = SplitTokens(Peers("", 5, 1), Peers("", 7, 0))
    prepared = PreparedRows(module, mixed_rows(config))
    spans = prepared.media(module, CPU)[1]
    with second_device() as waits:
        rows = prepared.tokens(module, DEVICE)
        mine, _ = module.tokens.rows(rows, spans)
        assert mine.cu_seqlens is rows.cu_seqlens
        assert mine.input_ids.shape[-1] * 5 == rows.input_ids.shape[-1] > prepared.packed.input_ids.shape[-1]
        pieces = Pieces.of(mine.cu_seqlens, mine.key_cu_seqlens, mine.key_index)
        blocks = image_blocks(mine)
        assert pieces.taps(4)[0].device == pieces.levels[0].tokens.device == blocks.queries.device == DEVICE
        assert waits == []


def test_what_was_moved_is_read_without_a_wait_until_it_changes():
    with second_device() as waits:
        here = torch.arange(3)
        there, other = move_readable(here, DEVICE), move(here, DEVICE)
        assert on_host(there) is here is on_host(here)
        assert waits == []
        first = on_host(other)
        assert on_host(other) is first
        assert waits == [MOVES]  # once
        there.mul_(2)
        assert on_host(there).tolist() == [0, 2, 4]
        assert waits == [MOVES] * 2
        assert here.tolist() == first.tolist() == [0, 1, 2]


@torch.inference_mode()
def test_bounds_are_read_in_inference_mode():
    """Tensors of inference mode have no version, and raise where it is asked for."""
    assert on_host(move_readable(torch.arange(3), CPU)).tolist() == [0, 1, 2]
    assert move_readable(torch.arange(3), "meta").shape == (3,)
    bounds = torch.tensor([0, 2, 3])
    assert [group[:2] for group in equal_lengths(bounds, bounds)] == [(1, 1), (2, 2)]


def test_segments_are_grouped_once_until_their_bounds_change():
    bounds, keys = torch.tensor([0, 2, 3]), torch.tensor([0, 4, 5])
    found = equal_lengths(bounds, keys)
    assert equal_lengths(bounds, keys) is found
    assert [group[:2] for group in equal_lengths(bounds, bounds)] == [(1, 1), (2, 2)]
    bounds[1] = 1
    assert [(*group[:2], group[2].tolist(), group[3].tolist()) for group in equal_lengths(bounds, keys)] == [
        (1, 4, [0], [0, 1, 2, 3]),
        (2, 1, [1, 2], [4]),
    ]


def test_mixed_devices_are_refused_as_by_a_gpu():
    with second_device() as waits:
        here, there = torch.arange(3.0), move(torch.arange(3.0), DEVICE)
        places = move(torch.tensor([2, 0]), DEVICE)
        assert there.device == places.device == torch.ones(2, device=DEVICE).device == (there + 1).device == DEVICE
        for mixed in (lambda: here + there, lambda: here[places], lambda: torch.cat([here, there]), there.numpy):
            with pytest.raises((MixedDevices, TypeError)):
                mixed()
        assert waits == []
        assert (there * torch.tensor(2.0))[places.cpu()].cpu().tolist() == [4.0, 0.0]  # numbers and indices may be here
        assert there[there > 0].tolist() == [1.0, 2.0]
        assert float(there.sum()) == 3.0
        assert len(waits) == 6  # three copies to the host, indices from there, the size of a selection, a number
        assert torch.tensor(2.0, device=DEVICE).device == here.to(DEVICE).device == there[torch.tensor([0])].device
        there.copy_(here)
        assert len(waits) == 10  # copies to the device
        assert torch.zeros(3).copy_(there).tolist() == [0.0, 1.0, 2.0]
