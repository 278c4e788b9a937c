"""Half-precision copies of weights compared with a model in half precision."""

import copy

import pytest
import torch
from torch import nn

from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.forward_rows import forward_rows
from helpers.tiny_models import tiny_model
from workers.model.packed_model import PackedVLM, use_linear_patch_embedding
from workers.model.precision import HalfWeights
from workers.roles.actor import ActorConfig, ActorWorker

CPU = torch.device("cpu")


def rows_of(model):
    prompts = prompt_batch(model.config, [[(4, 6)], [], [(6, 6)]], texts=[4, 7, 5])
    return with_responses(model.config, prompts, lengths=[5, 1, 6], width=6)


def test_outputs_equal_a_bfloat16_model_and_gradients_accumulate_in_float32():
    model = tiny_model("qwen2_5_vl")
    data, family = rows_of(model), family_of(model.config)
    single, half = PackedVLM(copy.deepcopy(model), family, 1.0), PackedVLM(copy.deepcopy(model), family, 1.0)
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    expected = forward_rows(half, data, CPU).scores
    expected.sum().backward()
    with HalfWeights(single).replaced():
        for _ in range(2):
            found = forward_rows(single, data, CPU).scores
            found.sum().backward()
    assert torch.equal(found, expected)
    for (name, ours), theirs in zip(single.named_parameters(), half.parameters(), strict=True):
        assert ours.dtype == torch.float32, name
        if theirs.grad is not None:
            assert ours.grad.dtype == torch.float32
            assert torch.equal(ours.grad, 2 * theirs.grad.float()), name


def test_tied_weights_stay_tied_and_frozen_ones_frozen():
    module = nn.ModuleDict(
        {"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False), "frozen": nn.Linear(2, 2)}
    )
    module["head"].weight = module["embed"].weight
    module["frozen"].requires_grad_(False)
    weights = HalfWeights(module)
    with weights.replaced():
        assert module["head"].weight is module["embed"].weight
        assert module["head"].weight.dtype == torch.bfloat16
        module["head"](module["frozen"](module["embed"](torch.tensor([1])))).sum().backward()
    assert module["frozen"].weight.grad is None
    assert module["embed"].weight.grad is module["head"].weight.grad is not None
    module["frozen"].requires_grad_(True)  # a copy follows its parameter
    with torch.no_grad():
        module["frozen"].weight.fill_(3.0)
    with weights.replaced():
        module["frozen"](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        assert (module["frozen"].weight == 3).all()
    assert torch.equal(module["frozen"].weight.grad, torch.ones(2, 2))


def test_an_error_restores_the_parameters():
    layer = nn.Linear(2, 2)
    before = dict(layer.named_parameters())
    with pytest.raises(ZeroDivisionError), HalfWeights(layer).replaced():
        raise ZeroDivisionError
    assert all(after is before[name] for name, after in layer.named_parameters())


def test_an_actor_trains_in_half_precision(tmp_path):
    model = tiny_model("qwen2_5_vl")
    model.save_pretrained(tmp_path)
    actor = ActorWorker(ActorConfig(model_path=str(tmp_path), dtype="bfloat16", token_budget=40), CPU)
    before = {name: weight.clone() for name, weight in actor.named_weights()}
    metrics = actor.update(rows_of(model), lambda outputs, rows: (-outputs.log_probs, {}))
    assert 0 < metrics["actor/grad_norm"] < float("inf")
    for name, weight in actor.named_weights():
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, before[name]), name


@pytest.mark.parametrize("kernel", [(2, 2), (1, 2, 2)])
def test_patches_get_the_dtype_of_the_weights(kernel):
    """Kimi's tower leaves that to its caller, who cannot know it: FSDP casts weights as it gathers them."""
    convolution = {2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)](3, 4, kernel, stride=kernel).bfloat16()
    patches = torch.randn(5, 3, *kernel, generator=torch.Generator().manual_seed(0))
    expected = convolution(patches.bfloat16())
    use_linear_patch_embedding(nn.ModuleList([convolution]))
    torch.testing.assert_close(convolution(patches), expected)
