"""Sliding windows, images whose tokens see each other, and shared prompts, compared with plain attention under masks of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dataproto.packing import pack_rows
from workers.model.attention import packed_attention
from workers.model.image_blocks import BlockSegments, image_blocks, joined_backward, joined_forward
from workers.model.segment_attention import Segments, segment_attention, segment_sdpa

PROMPT, HEADS, KEY_HEADS, SIZE = 12, 4, 2, 8
pieces = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=2
)  # words, and an image's tokens
windows = st.sampled_from([None, 1, 2, 3, 5, 40])


def types_of(parts):
    return [kind for words, image in parts for kind in [0] * words + [1] * image] + [0]


def packed_rows(prompt, responses):
    """Samples of one prompt; types of its tokens and of the responses'."""
    width = max(map(len, responses))
    types = torch.zeros(len(responses), PROMPT + width, dtype=torch.int64)
    mask = torch.zeros_like(types)
    for row, response in enumerate(responses):
        own = torch.tensor([*prompt, *response])
        place = slice(PROMPT - len(prompt), PROMPT + len(response))
        types[row, place], mask[row, place] = own, 1
    shared = torch.arange(len(responses)) > 0
    return pack_rows(types, mask, mask.cumsum(1) - 1, mask[:, PROMPT:], types, shared)


def visible(types, window):
    """``(L, L)`` as Hugging Face's mask functions say it: within the window, and before the token or in its image."""
    blocks, number = [], 0
    for place, kind in enumerate(types):
        number += kind == 1 and (place == 0 or types[place - 1] != 1)
        blocks.append(number if kind == 1 else 0)
    return torch.tensor(
        [
            [(k <= q or blocks[q] == blocks[k] > 0) and (window is None or k > q - window) for k in range(len(types))]
            for q in range(len(types))
        ]
    )


def row_by_row(q, k, v, prompt, responses, window):
    """The output of every packed token, from whole rows."""
    begin, outs = len(prompt), []
    for row, response in enumerate(responses):
        places = [*range(len(prompt)), *range(begin, begin + len(response))]
        begin += len(response)
        queries, keys, values = (x[places].transpose(0, 1) for x in (q, k, v))
        keys, values = (x.repeat_interleave(HEADS // KEY_HEADS, 0) for x in (keys, values))
        scores = (queries @ keys.transpose(1, 2) * SIZE**-0.5).masked_fill(
            ~visible([*prompt, *response], window), -torch.inf
        )
        out = (scores.softmax(-1) @ values).transpose(0, 1)
        outs.append(out if row == 0 else out[len(prompt) :])
    return torch.cat(outs)


def drawn(rows, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, SIZE), (KEY_HEADS, SIZE), (KEY_HEADS, SIZE))
    return [
        torch.randn(rows.input_ids.shape[1], *size, generator=generator, dtype=dtype, requires_grad=True)
        for size in sizes
    ]


def assert_same(outs, inputs, seed, **tolerance):
    torch.testing.assert_close(*outs)
    weights = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(seed), dtype=outs[0].dtype)
    torch.testing.assert_close(*(torch.autograd.grad((out * weights).sum(), inputs) for out in outs), **tolerance)


@given(pieces, st.lists(pieces, min_size=1, max_size=3), windows, st.integers(0, 9))
@settings(max_examples=60)
def test_windows_and_images_of_packed_rows_are_those_of_each_row_alone(prompt, responses, window, seed):
    prompt, responses = types_of(prompt)[:PROMPT], [types_of(parts) for parts in responses]
    prompt[-1] = 0
    rows = packed_rows(prompt, responses)
    inputs = drawn(rows, seed)
    expected = row_by_row(*inputs, prompt, responses, window)
    blocks = image_blocks(rows)
    assert (blocks is None) == all("1, 1" not in str(types) for types in (prompt, *responses))
    out, _ = packed_attention(
        nn.Module(),
        *(x.transpose(0, 1)[None] for x in inputs),
        None,
        cu_seq_lens_q=rows.cu_seqlens,
        cu_seq_lens_k=rows.key_cu_seqlens,
        key_index=rows.key_index,
        sliding_window=window,
        image_blocks=blocks,
    )
    assert_same([out[0], expected], inputs, seed)


def plain_scores(q, k, bounds, scale, window):
    """``(H, T, K)`` in segments, with flash attention's window, and k repeated for the heads of q."""
    cu_q, cu_k, *_ = bounds
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for begin_q, end_q, begin_k, end_k in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        for place in range(int(begin_q), int(end_q)):
            own = int(end_k - (end_q - place))
            first = int(begin_k) if window[0] < 0 else max(own - window[0], int(begin_k))
            last = int(end_k) if window[1] < 0 else min(own + window[1] + 1, int(end_k))
            seen[place, first:last] = True
    return scores.masked_fill(~seen, -torch.inf)


def plain_forward(q, k, v, bounds, scale, window):
    scores = plain_scores(q, k, bounds, scale, window)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


def plain_backward(grad, q, k, v, out, lse, bounds, scale, window):
    """As kernels compute it: probabilities from the log-sum-exps that are given, which may be those of more keys."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    probs = (plain_scores(q, k, bounds, scale, window) - lse[..., None]).exp()
    to_probs = torch.einsum("qhd,khd->hqk", grad, values)
    to_scores = probs * (to_probs - (grad * out).sum(-1).t()[..., None]) * scale
    found = (
        torch.einsum("hqk,khd->qhd", to_scores, keys),
        torch.einsum("hqk,qhd->khd", to_scores, q),
        torch.einsum("hqk,qhd->khd", probs, grad),
    )
    return found[0], *(x.unflatten(1, (-1, groups)).sum(2) for x in found[1:])


@given(pieces, st.lists(pieces, min_size=1, max_size=2), windows, st.integers(0, 9))
@settings(max_examples=30)
def test_two_passes_of_a_causal_kernel_join_to_attention_with_images(prompt, responses, window, seed):
    """What runs on CUDA, with a plain kernel in the place of flash attention's."""
    prompt = [0, 1, 1, 1, *types_of(prompt)][:PROMPT]
    prompt[-1] = 0
    rows = packed_rows(prompt, [types_of(parts) for parts in responses])
    blocks = image_blocks(rows)
    inputs = drawn(rows, seed)
    places = slice(None) if rows.key_index is None else rows.key_index
    bounds = rows.cu_seqlens, rows.key_cu_seqlens
    keyed = [inputs[0], *(x[places].detach().requires_grad_() for x in inputs[1:])]
    expected = segment_sdpa(*keyed, Segments(*bounds, None, None, True, window, blocks.ahead), 0.3)
    at = BlockSegments((*bounds, rows.max_length, rows.key_max_length), 0.3, window, blocks)
    with torch.no_grad():
        out, lse = joined_forward(plain_forward, *keyed, at)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    with torch.no_grad():
        ours = joined_backward(plain_backward, grad, *keyed, out, lse, at)
    torch.testing.assert_close(ours, torch.autograd.grad((expected * grad).sum(), keyed))


@pytest.mark.parametrize("window", [None, 3])
def test_the_operator_of_compiled_layers_has_the_same_values_and_gradients(window):
    rows = packed_rows([0, 1, 1, 1, 0, 0], [[0, 0, 1, 1, 0], [0], [0, 0, 0]])
    inputs = drawn(rows, 0)
    keyed = [inputs[0], *(x[rows.key_index].detach().requires_grad_() for x in inputs[1:])]
    bounds, kept = (rows.cu_seqlens, rows.key_cu_seqlens), (True, window, image_blocks(rows).ahead)
    plain = segment_sdpa(*keyed, Segments(*bounds, None, None, *kept), 0.3)
    outs = [segment_attention(*keyed, *bounds, 0.3, *kept), plain]
    assert_same(outs, keyed, 1, atol=1e-6, rtol=1e-6)
