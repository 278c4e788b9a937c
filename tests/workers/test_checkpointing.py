"""Activation checkpointing changes what is kept, and nothing else."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.forward_rows import forward_rows
from helpers.tiny_models import EACH_TYPE, tiny_model
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel import activation_checkpointing as checkpointing
from workers.parallel import parallelize
from workers.ranks.mesh import Ranks

CPU = torch.device("cpu")


def select_rows(model):
    """Two images of unequal size, none, one with two samples."""
    prompts = prompt_batch(model.config, [[(4, 6), (8, 4)], [], [(6, 6)]], texts=[4, 7, 5])[[0, 1, 2, 2]]
    return with_responses(model.config, prompts, lengths=[5, 1, 6, 2], width=6)


def run(module, data):
    """Log-probs, gradients, and how many numbers were kept for the backward pass."""
    module.train()
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.update({x.data_ptr(): x.numel()}) or x, lambda x: x):
        log_probs = forward_rows(module, data, CPU).scores
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0))
    (log_probs * weights).sum().backward()
    gradients = {name: p.grad for name, p in module.model.named_parameters() if p.grad is not None}
    return log_probs.detach(), gradients, sum(kept.values())


def in_mode(model, mode):
    module = PackedVLM(copy.deepcopy(model), family_of(model.config), temperature=0.8)
    parallelize(module, Ranks(), ModelConfig(activation_checkpointing=mode))
    return module


@pytest.mark.parametrize("model_type", EACH_TYPE)
def test_the_same_numbers_and_names(model_type):
    model = tiny_model(model_type)
    data = select_rows(model)
    plain = run(in_mode(model, "none"), data)
    for mode in ("selective", "full"):
        module = in_mode(model, mode)
        found = run(module, data)
        torch.testing.assert_close(found[0], plain[0], atol=1e-5, rtol=0)
        assert found[1].keys() == plain[1].keys()
        for name, gradient in plain[1].items():
            assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
        assert [name for name, _ in module.model.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.slow
def test_full_keeps_less_and_selective_computes_no_product_again():
    model = tiny_model("qwen2_5_vl")
    data, kept, work = select_rows(model), {}, {}
    for mode in ("none", "selective", "full"):
        with FlopCounterMode(display=False) as counter:
            *_, kept[mode] = run(in_mode(model, mode), data)
        work[mode] = counter.get_total_flops()
    assert kept["full"] < kept["none"]
    assert work["selective"] == work["none"] < work["full"]


def test_without_gradients_nothing_is_checkpointed():
    calls = []
    forward = checkpointing.Checkpointed(lambda x: calls.append(x) or x * x, selective=False)
    with torch.no_grad():
        assert forward(torch.ones(1)).item() == 1
    x = torch.ones(1, requires_grad=True)
    forward(x).backward()
    assert len(calls) == 3  # once without gradients, once with, once again for the backward pass
