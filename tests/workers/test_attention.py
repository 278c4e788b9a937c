"""Packed attention compared with one sdpa call for each segment."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from dataproto.errors import UnsupportedAttention
from dataproto.vlm.family import grid_arguments
from helpers.tiny_models import MROPE_TYPES, image_inputs, tiny_model
from workers.model import attention
from workers.model.attention import packed_attention, use_packed_attention
from workers.model.segment_attention import Segments, segment_attention, segment_sdpa


def by_segment(q, k, v, bounds, causal):
    outs = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        segment = (x[:, :, start:stop] for x in (q, k, v))
        outs.append(scaled_dot_product_attention(*segment, is_causal=causal, enable_gqa=True))
    return torch.cat(outs, dim=2).transpose(1, 2)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.booleans(), st.integers(0, 10), st.sampled_from([8, 5]))
def test_equals_one_call_for_each_segment_with_gradients(lengths, causal, seed, width):
    """Values may be narrower than keys."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    q = torch.randn(1, 4, total, 8, generator=generator, requires_grad=True)
    k, v = (torch.randn(1, 2, total, size, generator=generator, requires_grad=True) for size in (8, width))
    module = nn.Module()
    module.is_causal = causal
    out, _ = packed_attention(module, q, k, v, None, cu_seq_lens_q=torch.tensor(bounds))
    expected = by_segment(q, k, v, bounds, causal)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)

    weights = torch.randn(out.shape, generator=generator)
    ours = torch.autograd.grad((out * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([8, 5]),
)
def test_the_operator_of_compiled_layers_has_the_same_values_and_gradients(lengths, causal, width):
    queries, keys = torch.tensor([(q, q + more) for q, more in lengths]).T
    cu_q, cu_k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (queries, keys))
    q = torch.randn(int(cu_q[-1]), 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(int(cu_k[-1]), 2, size, dtype=torch.float64, requires_grad=True) for size in (8, width))
    ours = segment_attention(q, k, v, cu_q, cu_k, 0.3, causal)
    plain = segment_sdpa(q, k, v, Segments(cu_q, cu_k, None, None, causal), 0.3)
    torch.testing.assert_close(ours, plain)
    if len(q):
        weights = torch.randn_like(plain)
        grads = [torch.autograd.grad((out * weights).sum(), (q, k, v), allow_unused=True) for out in (ours, plain)]
        torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_the_operator_passes_opcheck():
    q = torch.randn(5, 4, 8, requires_grad=True)
    k, v = (torch.randn(5, 2, 8, requires_grad=True) for _ in range(2))
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    found = torch.library.opcheck(segment_attention, (q, k, v, bounds, bounds, None, True))
    assert set(found.values()) == {"SUCCESS"}


@given(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 10))
def test_segments_that_share_a_prompt_equal_whole_rows(prompt, responses, seed):
    generator = torch.Generator().manual_seed(seed)
    total = prompt + sum(responses)
    q = torch.randn(1, 4, total, 8, generator=generator, requires_grad=True)
    k, v = (torch.randn(1, 2, total, 8, generator=generator, requires_grad=True) for _ in range(2))
    keys, starts = [], [prompt, *(prompt + torch.tensor(responses).cumsum(0)).tolist()]
    for start, stop in zip(starts, starts[1:], strict=False):
        keys.append([*range(prompt), *range(start, stop)])
    cu_q = torch.tensor([0, starts[1], *starts[2:]])
    cu_k = torch.tensor([0, *torch.tensor([len(each) for each in keys]).cumsum(0).tolist()])
    index = torch.tensor([place for each in keys for place in each])
    out, _ = packed_attention(
        nn.Module(), q, k, v, None, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k, key_index=index, is_causal=True
    )
    for number, each in enumerate(keys):
        rows = scaled_dot_product_attention(*(x[:, :, each] for x in (q, k, v)), is_causal=True, enable_gqa=True)
        mine = each if number == 0 else each[prompt:]
        torch.testing.assert_close(out[:, mine], rows.transpose(1, 2)[:, len(each) - len(mine) :], atol=1e-6, rtol=0)


@pytest.mark.parametrize("model_type", MROPE_TYPES)
def test_towers_accept_precomputed_grid_arguments(model_type):
    model = tiny_model(model_type)
    tower, media = model.model.visual, image_inputs(model.config, (4, 6), (8, 4), (6, 6))
    told = tower(media["pixel_values"], grid_thw=None, **grid_arguments(tower, media["image_grid_thw"]))
    found = tower(media["pixel_values"], grid_thw=media["image_grid_thw"])
    assert torch.equal(told.pooler_output, found.pooler_output)


@pytest.mark.parametrize("model_type", MROPE_TYPES)
def test_a_tower_makes_one_call_a_layer(model_type, monkeypatch):
    model = tiny_model(model_type)
    media = image_inputs(model.config, (4, 6), (8, 4), (6, 6))
    expected = model.model.visual(media["pixel_values"], grid_thw=media["image_grid_thw"]).pooler_output
    use_packed_attention(model)
    calls = []
    attend = attention.segment_sdpa
    monkeypatch.setattr(attention, "segment_sdpa", lambda *args: calls.append(len(args[3].cu_q) - 1) or attend(*args))
    found = model.model.visual(media["pixel_values"], grid_thw=media["image_grid_thw"]).pooler_output
    blocks = [8, 3] if model_type == "qwen2_5_vl" else [3, 3]  # 2 + 2 + 4 windows of 2 x 2 features in the first block
    assert calls == blocks
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_unsupported_arguments_are_refused():
    q = torch.zeros(1, 1, 2, 4)
    bounds = torch.tensor([0, 2])
    with pytest.raises(UnsupportedAttention, match="no mask"):
        packed_attention(nn.Module(), q, q, q, torch.ones(1, 1, 2, 2), cu_seq_lens_q=bounds)
    with pytest.raises(UnsupportedAttention, match="sliding windows or image blocks in causal layers alone"):
        packed_attention(nn.Module(), q, q, q, None, cu_seq_lens_q=bounds, sliding_window=4, is_causal=False)
    with pytest.raises(UnsupportedAttention, match="cu_seq_lens_q"):
        packed_attention(nn.Module(), q, q, q, None)
