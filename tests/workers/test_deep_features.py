"""Deep vision features by places against transformers' own method with a mask, to the bit."""

import pytest
import torch

from dataproto.vlm import MediaSpans, family_of
from helpers.tiny_models import tiny_model
from workers.model.packed_model import PackedVLM, add_level


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_level_by_places_is_that_by_a_mask(model_type, dtype):
    family, model = family_of(model_type), tiny_model(model_type)
    own = getattr(model.get_submodule(family.language_model), family.deep_method)
    draw = torch.Generator().manual_seed(1)
    places = torch.tensor([1, 2, 5])
    mask = torch.zeros(1, 7, dtype=torch.bool).index_fill(1, places, True)

    def result(add, where, *chosen):
        draw.manual_seed(1)
        states, features, grad = (
            torch.randn(*sizes, generator=draw).to(kind)
            for sizes, kind in (((1, 7, 4), dtype), ((3, 4), torch.float32), ((1, 7, 4), dtype))
        )
        inputs = states.requires_grad_(), features.requires_grad_()
        out = add(states, where, features)
        return out, *torch.autograd.grad(out, inputs, grad)

    for found, expected in zip(result(add_level, places), result(own, mask), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_the_packed_model_takes_places_and_all_tokens_of_a_stage():
    family, model = family_of("qwen3_vl"), tiny_model("qwen3_vl")
    module = PackedVLM(model, family, 1.0)
    spans = MediaSpans(torch.tensor([2, 0]), torch.tensor([1, 0]))
    levels = family.deep_layers(model.config)
    width = model.config.get_text_config().hidden_size
    features = torch.randn(2, 1 + levels, width, generator=torch.Generator().manual_seed(1))
    _, extras = module.merge(torch.tensor([[1, 2, 3]]), features, spans)
    decoder = model.get_submodule(family.language_model)
    add, states = getattr(decoder, family.deep_method), torch.zeros(1, 3, width)
    placed = add(states, extras["visual_pos_masks"], extras["deepstack_visual_embeds"][0])
    assert torch.equal(placed[0], torch.stack([features[0, 1], torch.zeros(width), features[1, 1]]))
    dense = family.dense_extras(placed)
    assert torch.equal(add(states, dense.get("visual_pos_masks"), dense["deepstack_visual_embeds"][0]), placed)
