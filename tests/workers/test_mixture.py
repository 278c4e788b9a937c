"""Experts by grouped products against a loop over tokens, and recorded choices against that loop: values within 1e-5, gradients
within 1e-5 of their norms.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.functional import linear, silu

from dataproto.vlm import family_of
from helpers.examples import at_most
from helpers.routes import expert_shares, router_matrix
from helpers.tiny_models import MOE_TYPES, tiny_model
from workers.model.mixture import grouped_experts, pack_router, use_packed_experts, use_routes


def one_by_one(hidden, chosen, weights, gate_up, down):
    """Token after token, choice after choice."""
    out = 0.0 * hidden
    for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            if expert < len(gate_up):
                gate, up = linear(hidden[token], gate_up[expert]).chunk(2)
                made = share * linear(silu(gate) * up, down[expert])
                out = out.index_add(0, torch.tensor([token]), made[None])
    return out


@settings(max_examples=at_most(25))
@example(tokens=2, experts=1, choices=3, width=6, seed=274)  # whose terms cancel
@given(
    tokens=st.integers(1, 9),
    experts=st.integers(1, 5),
    choices=st.integers(1, 3),
    width=st.sampled_from([4, 6]),  # 6 floats are no multiple of 16 bytes
    seed=st.integers(0, 2**16),
)
def test_grouped_products_are_those_of_each_token(tokens, experts, choices, width, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, requires_grad=True)

    inputs = draw(tokens, 8), draw(tokens, choices), draw(experts, 2 * width, 8), draw(experts, 8, width)
    chosen = torch.randint(0, experts + 1, (tokens, choices), generator=generator)  # the last one is not there
    direction = torch.randn(tokens, 8, generator=generator)
    results = []
    for compute in (grouped_experts, one_by_one):
        hidden, weights, gate_up, down = inputs
        more = (silu,) if compute is grouped_experts else ()
        out = compute(hidden, chosen, weights, gate_up, down, *more)
        gradients = torch.autograd.grad(out, inputs, direction, allow_unused=True)
        results.append((out, [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]))
    (found, ours), (expected, theirs) = results
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for gradient, other in zip(ours, theirs, strict=True):
        assert (gradient - other).norm() <= 1e-5 * other.norm() + 2e-5  # terms of up to 30 may cancel


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_recorded_choices_get_the_weights_of_the_own_router(model_type):
    model, family = tiny_model(model_type), family_of(model_type)
    gate = family.routers(model)[0]
    hidden = torch.randn(5, router_matrix(gate).shape[1], generator=torch.Generator().manual_seed(1))
    logits, weights, chosen = gate(hidden)
    assert torch.equal(family.expert_weights(gate, logits, chosen), weights)  # to the last bit
    pack_router(gate, family)
    other = (chosen.flip(-1) + 1).remainder(4).to(torch.uint8)
    use_routes(gate, other, None)
    _, replayed, used = gate(hidden)
    assert used.tolist() == other.tolist()
    for token, experts in enumerate(other.tolist()):
        expected = torch.stack(expert_shares(gate, logits[token], experts)).float()
        torch.testing.assert_close(replayed[token], expected, atol=1e-6, rtol=0)
    replayed[:, 0].sum().backward()
    assert router_matrix(gate).grad.norm() > 1e-3  # through the weights of recorded experts


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_padding_is_sent_nowhere(model_type):
    family = family_of(model_type)
    gate = family.routers(tiny_model(model_type))[0]
    pack_router(gate, family)
    use_routes(gate, None, torch.tensor([True, False]))
    _, _, chosen = gate(torch.randn(2, router_matrix(gate).shape[1], generator=torch.Generator().manual_seed(1)))
    experts = len(router_matrix(gate))
    assert chosen[0].max() < experts
    assert chosen[1].tolist() == [experts, experts]


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_a_sparse_layer_never_waits_for_the_device(model_type):
    """Fake tensors have no values: what reads one on the host, such as how many tokens an expert gets, raises."""
    family = family_of(model_type)
    model = tiny_model(model_type)
    _, choices = use_packed_experts(model, family)
    router, experts = family.routers(model)[0], model.get_submodule(family.expert_layers(model)[0])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to(torch.bfloat16)
        states = torch.empty(9, 64, dtype=torch.bfloat16, requires_grad=True)
        for recorded in (None, torch.empty(9, choices, dtype=torch.uint8)):
            use_routes(router, recorded, torch.empty(9, dtype=torch.bool))
            _, weights, chosen = router(states)
            made = experts(states, chosen, weights.to(states.dtype))
            made.sum().backward()
            assert made.shape == states.shape
        with pytest.raises(DataDependentOutputException):
            chosen.tolist()
