"""Recurrent layers over packed rows against Hugging Face's own rule on each row alone, float32: outputs within 1e-5 absolute,
gradients within 1e-4 of their norm.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn.functional import conv1d, pad
from transformers import DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from dataproto.errors import MissingPackage, UnsupportedAttention
from dataproto.packing import fill_up, pack_rows
from dataproto.vlm import family_of
from helpers.checkpoints import write_checkpoint
from helpers.examples import at_most
from helpers.tiny_models import tiny_model
from workers.model import gated_delta_net
from workers.model.gated_delta_net import gated_delta_rule, packed_convolution, packed_delta_rule, use_packed_recurrence
from workers.model.named_weights import float32_weights, named_weights
from workers.model.pieces import Pieces, previous_tokens
from workers.model.precision import HalfWeights
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.optimizer import OptimizerConfig

HEADS, KEYS, VALUES = 2, 4, 3


def packed(groups, filled=0):
    """Rows of groups ``(prompt, [response, ...])`` of these lengths, packed with shared prompts, and each row's tokens in the
    packed sequence.
    """
    rows = [(prompt, response, place > 0) for prompt, responses in groups for place, response in enumerate(responses)]
    left, right = max(row[0] for row in rows), max(row[1] for row in rows)
    mask = torch.zeros(len(rows), left + right, dtype=torch.int64)
    for row, (prompt, response, _) in enumerate(rows):
        mask[row, left - prompt : left + response] = 1
    shared = torch.tensor([row[2] for row in rows])
    cells = torch.arange(mask.numel()).view(mask.shape)
    found = pack_rows(cells, mask, mask.cumsum(1) - 1, torch.zeros(len(rows), right), shares_prompt=shared)
    place_of = {int(cell): place for place, cell in enumerate(found.input_ids[0])}
    paths, leader = [], 0
    for row, (_, _, shares) in enumerate(rows):
        leader = leader if shares else row
        columns = mask[row].nonzero().squeeze(1).tolist()
        paths.append([place_of[int(cells[leader if shares and at < left else row, at])] for at in columns])
    return (fill_up(found, filled) if filled else found), paths


def inputs_of(rows, seed=0):
    generator, total = torch.Generator().manual_seed(seed), rows.input_ids.shape[1]

    def normal(*sizes):
        return torch.randn(total, HEADS, *sizes, generator=generator)

    decay, rate = -normal().abs() * 0.3, normal().sigmoid()
    return [x.requires_grad_() for x in (normal(KEYS), normal(KEYS), normal(VALUES), decay, rate)]


def pieces_of(rows):
    return Pieces(previous_tokens(rows.cu_seqlens, rows.key_cu_seqlens, rows.key_index))


def rows_alone(inputs, paths):
    """Hugging Face's rule, token after token, on each row."""
    out = torch.zeros_like(inputs[2])
    for path in paths:
        q, k, v, g, b = (x[path][None] for x in inputs)
        found, _ = torch_recurrent_gated_delta_rule(q, k, v, g, b, None, False, use_qk_l2norm_in_kernel=True)
        out = out.index_copy(0, torch.tensor(path), found[0])
    return out


lengths = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 12), min_size=1, max_size=3)), min_size=1, max_size=3
)


@settings(max_examples=at_most(40), deadline=None)
@given(groups=lengths, seed=st.integers(0, 5))
def test_the_rule_along_packed_rows_is_that_of_each_row_alone(groups, seed):
    rows, paths = packed(groups)
    inputs = inputs_of(rows, seed)
    found = packed_delta_rule(*inputs, pieces_of(rows))
    torch.testing.assert_close(found, rows_alone(inputs, paths), atol=1e-5, rtol=0)


@settings(max_examples=at_most(40), deadline=None)
@given(groups=lengths, width=st.integers(2, 5))
def test_the_convolution_along_packed_rows_is_that_of_each_row_alone(groups, width):
    rows, paths = packed(groups)
    x = torch.randn(rows.input_ids.shape[1], 3, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(3, width, generator=torch.Generator().manual_seed(2))
    found = packed_convolution(x, weight, *pieces_of(rows).taps(width))
    for path in paths:
        alone = conv1d(pad(x[path].t(), (width - 1, 0))[None], weight[:, None], groups=3)[0].t()
        torch.testing.assert_close(found[path], alone, atol=1e-6, rtol=0)


def test_gradients_of_long_rows_reach_a_shared_prompt():
    rows, paths = packed([(150, [70, 1, 200]), (3, [130])])
    inputs = inputs_of(rows)
    weight = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad((packed_delta_rule(*inputs, pieces_of(rows)) * weight).sum(), inputs)
    expected = torch.autograd.grad((rows_alone(inputs, paths) * weight).sum(), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def test_gradients_of_strong_decays_keep_their_digits():
    """Where nearly nothing is left of a state, decays have small gradients among large ones that cancel."""
    rows, paths = packed([(100, [60])])
    query, key, value, decay, rate = inputs_of(rows)
    inputs = [query, key, value, (decay * 40).detach().requires_grad_(), rate]
    weight = torch.randn(value.shape, generator=torch.Generator().manual_seed(3))
    (found,) = torch.autograd.grad((packed_delta_rule(*inputs, pieces_of(rows)) * weight).sum(), inputs[3:4])
    (expected,) = torch.autograd.grad((rows_alone(inputs, paths) * weight).sum(), inputs[3:4])
    strong = inputs[3] < -5
    assert (found - expected)[strong].norm() <= 1e-5 * expected[strong].norm()


def test_a_state_handed_on_is_the_state_of_the_whole():
    q, k, v, g, b = (x[None, :, :] for x in (y.detach() for y in inputs_of(packed([(90, [1])])[0])))
    zero = torch.zeros(1, HEADS, KEYS, VALUES)
    whole, final = gated_delta_rule(q, k, v, g, b, zero)
    first, state = gated_delta_rule(q[:, :37], k[:, :37], v[:, :37], g[:, :37], b[:, :37], zero)
    second, last = gated_delta_rule(q[:, 37:], k[:, 37:], v[:, 37:], g[:, 37:], b[:, 37:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(last, final, atol=1e-6, rtol=0)


def test_pieces_of_a_prompt_with_two_samples_by_hand():
    rows, _ = packed([(3, [2, 1])])  # packed: three tokens of the prompt, two and one of the responses
    pieces = pieces_of(rows)
    assert pieces.previous.tolist() == [-1, 0, 1, 2, 3, 2]
    first, second = pieces.levels
    assert (first.tokens.tolist(), first.lengths, first.starts) == ([0, 1, 2], [3], None)
    assert (second.tokens.tolist(), second.lengths, second.starts.tolist()) == ([3, 4, 5], [2, 1], [0, 0])
    assert second.bounds.tolist() == [0, 2, 3]
    assert second.bounds_on_device is second.bounds_on_device  # made once for all layers
    chosen, read = pieces.taps(3)
    assert chosen.tolist() == [5]  # tokens before the first are none in every row
    assert read.tolist() == [[1, 2, 5]]


def test_inert_segments_start_from_nothing():
    rows, paths = packed([(4, [2, 3])], filled=20)
    inputs = inputs_of(rows)
    found = packed_delta_rule(*inputs, pieces_of(rows))
    assert found.shape[0] == 20
    used = sorted({place for path in paths for place in path})
    torch.testing.assert_close(found[used], rows_alone(inputs, paths)[used], atol=1e-5, rtol=0)


def test_a_row_before_the_one_whose_prompt_it_shares_is_refused():
    with pytest.raises(UnsupportedAttention, match="which comes after it"):
        _ = Pieces(torch.tensor([3, 0, -1, 2])).levels


def test_pieces_are_made_once_for_all_layers():
    bounds = torch.tensor([0, 2, 5])
    assert Pieces.of(bounds, None, None) is Pieces.of(bounds, None, None)
    assert Pieces.of(bounds.clone(), None, None) is not Pieces.of(bounds, None, None)


def test_pieces_outlast_those_of_later_micro_batches():
    """A pipeline computes a layer again after other micro-batches; selective checkpointing raised where pieces were made anew."""
    first, later = torch.tensor([0, 2, 5]), torch.tensor([0, 3])
    pieces = Pieces.of(first, None, None)
    assert Pieces.of(later, None, None) is not pieces
    assert Pieces.of(first, None, None) is pieces
    kept = len(Pieces._made)
    del first, pieces
    assert len(Pieces._made) == kept - 1


def test_decays_stay_in_float32():
    model = tiny_model("qwen3_5")
    family = family_of(model)
    exact = float32_weights(model, family)
    assert len(exact) == 2
    with HalfWeights(model, exact).replaced():
        kinds = {name.rpartition(".")[2]: weight.dtype for name, weight in model.named_parameters()}
    assert kinds.pop("A_log") == kinds.pop("dt_bias") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
    sent = {name: weight.dtype for name, weight in named_weights(model, torch.bfloat16, family.in_float32)}
    assert {name.rpartition(".")[2] for name, kind in sent.items() if kind == torch.float32} == {"A_log", "dt_bias"}


def test_masks_and_caches_are_refused():
    model = tiny_model("qwen3_5")
    use_packed_recurrence(model, family_of(model))
    mixer = model.model.language_model.layers[0].linear_attn
    states, bounds = torch.zeros(1, 3, 64), torch.tensor([0, 3], dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 3, "max_length_k": 3}
    assert mixer(states, **packed).shape == states.shape
    cache, positions = DynamicCache(config=model.config.get_text_config()), torch.zeros(4, 1, 3, dtype=torch.int64)
    with pytest.raises(UnsupportedAttention, match="need cu_seq_lens_q"):
        mixer(states)
    with pytest.raises(UnsupportedAttention, match="take no mask or cache"):
        mixer(states, attention_mask=torch.ones(1, 3), **packed)
    with pytest.raises(UnsupportedAttention, match="take no mask or cache"):  # by the name that this transformers has
        family_of(model).decode(model, states, positions, cache=cache, **packed)


def test_weights_that_the_model_does_not_load_are_kept_by_an_export(tmp_path):
    source = Path(write_checkpoint("qwen3_5", tmp_path / "source")) / "model.safetensors"
    ahead = {"mtp.fc.weight": torch.randn(4, 8), "mtp.layers.0.input_layernorm.weight": torch.randn(8)}
    save_file(load_file(source) | ahead, source, {"format": "pt"})
    actor = ActorWorker(ActorConfig(str(source.parent), optimizer=OptimizerConfig(lr=1e-3)), torch.device("cpu"))
    actor.save(tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "huggingface" / "model.safetensors")
    assert written.keys() == load_file(source).keys()
    assert all(torch.equal(written[name], weight) for name, weight in ahead.items())


@pytest.mark.parametrize(
    ("device", "dtype", "by_kernels"),
    [
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
        ("cuda", torch.float32, False),  # they would compute its products in TF32
        ("cpu", torch.bfloat16, False),
    ],
)
def test_kernels_compute_half_precision_on_cuda_alone(monkeypatch, device, dtype, by_kernels):
    monkeypatch.setattr(gated_delta_net, "has_fla", lambda: True)
    assert (gated_delta_net._rule_for(device, dtype) is gated_delta_net._by_fla) == by_kernels


@pytest.mark.parametrize(
    ("triton", "capability", "installed", "refused"),
    [
        ("3.6.0", (9, 0), {"fla"}, True),
        ("3.6.0", (9, 0), {"fla", "tilelang"}, False),
        ("3.6.0", (9, 0), set(), False),  # the rule runs in plain torch
        ("3.6.0", (8, 0), {"fla"}, False),
        ("3.7.1", (9, 0), {"fla"}, False),
    ],
)
def test_kernels_without_gradients_are_refused_as_the_model_is_built(
    monkeypatch, triton, capability, installed, refused
):
    model = tiny_model("qwen3_5")
    family = family_of(model.config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(gated_delta_net, "version", lambda name: triton)
    monkeypatch.setattr(gated_delta_net, "find_spec", lambda name: name if name in installed else None)
    if refused:
        with pytest.raises(MissingPackage, match=r"Triton 3\.6\.0: pip install tilelang, or a torch from 2\.12"):
            use_packed_recurrence(model, family)
    else:
        use_packed_recurrence(model, family)
