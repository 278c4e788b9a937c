"""Ulysses sequence parallelism over two processes against one process in float32: log-probs and entropies within 1e-5 absolute,
each parameter's gradient within 1e-4 of its norm. All cases run in one start of the processes.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.nn.functional import all_reduce
from transformers import AttentionInterface

from dataproto.errors import InvalidConfig
from dataproto.packing import pack_rows
from dataproto.vlm import MediaSpans, family_of
from helpers.allocations import allocated, check_share
from helpers.forward_rows import forward_rows
from helpers.layouts import (
    CPU,
    config_with_heads,
    differences,
    joined,
    mixed_rows,
    one_image,
    run_pass,
    text_rows,
    turn_rows,
)
from helpers.processes import run_ranks
from helpers.tiny_models import MODEL_TYPES, image_inputs, rounding, tiny_config, tiny_model
from workers.model.attention import FLASH_KERNELS, packed_attention, use_packed_attention
from workers.model.kept_features import KeptFeatures
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel import parallelize
from workers.parallel.tokens import SplitTokens
from workers.parallel.ulysses import (
    UlyssesParallel,
    check_heads,
    key_value_repeats,
    key_value_share,
    ulysses_attention,
)
from workers.parallel.vision_split import SplitFeatures
from workers.ranks.autograd_collectives import (
    Peers,
    exchange,
    exchange_rows,
    gather_shared,
    gather_split,
    sum_and_split,
)
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks
from workers.training.forward_pass import needs_tower

TWO = Layout(sp=2)


def peers():
    return Peers.of(joined(TWO).group("sp"))


# What both ranks run


def equals_one_process(model_type, rows, heads=2, key_value_heads=1):
    config = config_with_heads(model_type, heads, key_value_heads)
    data = rows(config)
    found = run_pass(config, data, joined(TWO))
    return differences(found, run_pass(config, data)) if distributed.get_rank() == 0 else []


def attention_of_the_whole_sequence():
    """12 tokens in segments of 7 and 5, the second of which sees keys of the first."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 12, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(1, 12, 4, 8, generator=generator)
    bounds = {
        "cu_seq_lens_q": torch.tensor([0, 7, 12]),
        "cu_seq_lens_k": torch.tensor([0, 7, 15]),
        "key_index": torch.tensor([*range(7), 0, 1, 2, *range(7, 12)]),
    }
    module = torch.nn.Module()
    expected, _ = packed_attention(module, q, k, v, None, **bounds)
    (expected * weights).sum().backward()
    whole = [x.grad.clone() for x in (q, k, v)]
    me = peers()
    mine = slice(6 * me.rank, 6 * me.rank + 6)
    parts = [x.detach()[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    out, _ = ulysses_attention(module, *parts, None, peers=me, **bounds)
    (out * weights[:, mine]).sum().backward()
    assert out.shape == (1, 6, 4, 8)
    torch.testing.assert_close(out, expected[:, mine])
    for part, gradient in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, gradient[:, :, mine])


def collectives_by_hand():
    me = peers()
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])  # what rank 0 and rank 1 hold
    x = (one, two)[me.rank].clone().requires_grad_()
    weights = torch.tensor([10.0, 20.0, 30.0, 40.0])

    joined_up = gather_shared(x, me)
    assert joined_up.tolist() == [1, 2, 3, 4]
    (joined_up * weights).sum().backward()  # the same on both ranks, so nobody adds up
    assert x.grad.tolist() == ([10, 20], [30, 40])[me.rank]

    x.grad = None
    (gather_split(x, me) * weights * (me.rank + 1)).sum().backward()  # once on rank 0 and twice on rank 1
    assert x.grad.tolist() == ([30, 60], [90, 120])[me.rank]

    x.grad = None
    part = sum_and_split(x, me)
    assert part.tolist() == ([4], [6])[me.rank]
    (part * (5.0, 7.0)[me.rank]).sum().backward()
    assert x.grad.tolist() == [5, 7]

    x.grad = None
    sent, received = (([2, 0], [2, 1]), ([1, 1], [0, 1]))[me.rank]
    moved = exchange_rows(x, sent, received, me)  # rank 0 keeps both of its own
    assert moved.tolist() == ([1, 2, 3], [4])[me.rank]
    (moved * weights[: len(moved)]).sum().backward()
    assert x.grad.tolist() == ([10, 20], [30, 10])[me.rank]

    x.grad = None
    swapped = exchange(x, me)
    assert swapped.tolist() == ([1, 3], [2, 4])[me.rank]
    (swapped * weights[2 * me.rank : 2 * me.rank + 2]).sum().backward()
    assert x.grad.tolist() == ([10, 30], [20, 40])[me.rank]


def features_of_images_and_videos(model_type, counts):
    """Each rank gets the features that its tokens name. Their gradients are summed at the rank that computed them."""
    config = tiny_config(model_type)
    media = image_inputs(config, *[(4, 6), (8, 4), (2, 2)][: counts[0]]) if counts[0] else {}
    if counts[1]:
        media |= image_inputs(config, *[(3, 4, 4), (2, 6, 2)][: counts[1]], kind="video", seed=1)
    family, me = family_of(config), peers()
    models = [tiny_model(model_type) for _ in range(2)]
    whole = family.features(models[0], media)
    count, generator = len(whole), torch.Generator().manual_seed(2)
    first, second = torch.randperm(count, generator=generator)[: 2 * count // 3], torch.arange(count // 4, count)
    windows = [MediaSpans(torch.arange(len(named)), named) for named in (first, torch.cat([second, second[:1]]))]
    weights = [torch.randn(len(window), *whole.shape[1:], generator=generator) for window in windows]
    sum((whole[window.features] * weight).sum() for window, weight in zip(windows, weights, strict=True)).backward()

    split = SplitFeatures(family, me)
    held = split.encode(models[1], split.share(config, media, CPU))
    assert len(held.mine) == int((held.holders == me.rank).sum())
    assert (len(held.mine) < count) == (sum(counts) > 1 or me.rank != held.holders[0])
    features, places = split.deliver(held, windows)
    assert len(features) == len(windows[me.rank].features.unique())
    chosen = features[places.features]
    torch.testing.assert_close(chosen, whole[windows[me.rank].features], atol=1e-5, rtol=1e-5)
    (chosen * weights[me.rank]).sum().backward()
    towers = [[model.get_submodule(path) for path in (family.vision_tower, *family.mergers)] for model in models]
    theirs, ours = ([each for part in tower for each in part.named_parameters()] for tower in towers)
    for (name, expected), (_, found) in zip(theirs, ours, strict=True):
        assert (all_reduce(found.grad) - expected.grad).norm() <= 1e-4 * expected.grad.norm() + rounding(name)


def keeps_its_part_of_the_features():
    """Of a frozen tower, which runs once for two passes: each rank keeps what it has encoded."""
    config = tiny_config("qwen3_vl")
    data = mixed_rows(config)

    def module(ranks):
        found = PackedVLM(tiny_model("qwen3_vl"), family_of(config), temperature=1.0)
        for path in found.family.vision_parts:
            found.model.get_submodule(path).requires_grad_(False)
        parallelize(found, ranks, ModelConfig(freeze_vision=True))
        found.kept = KeptFeatures(found.family, config, torch.float32)
        return found

    ours, expected = module(joined(TWO)), forward_rows(module(Ranks()), data, CPU).log_probs
    for again in (False, True):
        assert needs_tower(ours, [data]) == [not again]
        torch.testing.assert_close(forward_rows(ours, data, CPU).log_probs, expected, atol=1e-5, rtol=0)
    kept = [held for _, held in ours.kept._kept.values()]
    here, every = sum(len(held.mine) for held in kept), sum(len(held.holders) for held in kept)
    assert 0 < here < every == int(all_reduce(torch.tensor(here)))


def keeps_the_chosen_kernel(flash):
    """Behind the all-to-all attention is computed by the kernel of this name, in the tower as without sp."""
    model = tiny_model("qwen2_5_vl")
    module = PackedVLM(model, family_of(model.config), temperature=1.0)
    use_packed_attention(model)
    UlyssesParallel(joined(TWO), ModelConfig(flash_attention=flash)).apply(module)
    registered = AttentionInterface()[model.model.language_model.config._attn_implementation]
    assert (registered.func, registered.keywords) == (ulysses_attention, {"flash": FLASH_KERNELS[flash]})
    assert model.model.visual.config._attn_implementation == "packed_flash_torch"


CASES = {
    **{
        f"mixed rows, {kind}": partial(equals_one_process, kind, mixed_rows) for kind in MODEL_TYPES if kind != "gemma4"
    },
    "key-value heads for all": partial(equals_one_process, "qwen2_5_vl", mixed_rows, heads=4, key_value_heads=2),
    "uneven key-value heads": partial(equals_one_process, "qwen3_vl", mixed_rows, heads=6, key_value_heads=3),
    "no image": partial(equals_one_process, "qwen3_vl", text_rows),
    "one image": partial(equals_one_process, "qwen3_vl", one_image),
    "images in later turns": partial(equals_one_process, "qwen2_5_vl", turn_rows),
}
CHECKS = {
    "attention": attention_of_the_whole_sequence,
    "collectives": collectives_by_hand,
    "torch's kernel": partial(keeps_the_chosen_kernel, "torch"),
    "another kernel": partial(keeps_the_chosen_kernel, "fa4"),
    "images and videos": partial(features_of_images_and_videos, "qwen3_vl", (3, 2)),
    "images and a video": partial(features_of_images_and_videos, "qwen2_5_vl", (2, 1)),
    "videos": partial(features_of_images_and_videos, "qwen2_vl", (0, 2)),
    "tiles": partial(features_of_images_and_videos, "internvl", (2, 0)),
    "tiles of a batch": partial(features_of_images_and_videos, "smolvlm", (2, 0)),
    "features of a frozen tower": keeps_its_part_of_the_features,
    "an image": partial(features_of_images_and_videos, "qwen3_vl_moe", (1, 0)),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    more = {"allocations": partial(allocated, "qwen3_vl", TWO)}
    return run_ranks(2, CASES | CHECKS | more, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_slices_equal_one_process(outcomes, case):
    assert outcomes[case] == [[], []]


@pytest.mark.parametrize("check", CHECKS)
def test_between_two_ranks(outcomes, check):
    assert outcomes[check] == [None, None]


def test_two_ranks_have_half_of_everything(outcomes):
    """Embeddings, states, features, logits: nothing as wide as these stands whole on a rank."""
    whole = allocated("qwen3_vl", Layout())
    for found in outcomes["allocations"]:
        assert not isinstance(found, str), found
        check_share(found, whole, 2)


# Without other processes


def test_a_rank_has_the_tokens_of_its_slice_and_the_media_of_its_part():
    ids = torch.arange(1, 8)[None]
    rows = pack_rows(ids, torch.ones_like(ids), torch.stack([ids, 10 * ids, ids, ids], 1), torch.ones(1, 2))
    spans = MediaSpans(torch.tensor([1, 2, 5]), torch.tensor([0, 1, 0]))
    found = [SplitTokens(Peers("", 3, rank), None).rows(rows, spans) for rank in range(3)]
    assert [mine.input_ids.tolist() for mine, _ in found] == [[[1, 2, 3]], [[4, 5, 6]], [[7, 0, 0]]]
    assert [mine.position_ids[1].tolist() for mine, _ in found] == [[[10, 20, 30]], [[40, 50, 60]], [[70, 0, 0]]]
    windows = [[(part.positions.tolist(), part.features.tolist()) for part in every] for _, every in found]
    assert windows == [[([1, 2], [0, 1]), ([2], [0]), ([], [])]] * 3
    assert all(mine.cu_seqlens.tolist() == [0, 7, 9] and mine.predictors is rows.predictors for mine, _ in found)
    found = [SplitTokens(Peers("", 2, sp), Peers("", 2, tp)).rows(rows, spans) for sp in range(2) for tp in range(2)]
    assert [mine.input_ids.tolist() for mine, _ in found] == [[[1, 2, 3, 4]]] * 2 + [[[5, 6, 7, 0]]] * 2
    windows = [[(part.positions.tolist(), part.features.tolist()) for part in every] for _, every in found]
    assert windows == [[([1], [0]), ([0], [1]), ([1], [0]), ([], [])]] * 4
    assert [SplitTokens(None, Peers("", 4, 0)).num_states(tokens) for tokens in (7, 8, 9)] == [2, 2, 3]


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_query_head_meets_its_own_key_value_head(key_value_heads, group):
    heads = key_value_heads * group
    for ranks in (ranks for ranks in range(1, heads + 1) if heads % ranks == 0):
        shares = [key_value_share(heads, key_value_heads, ranks, rank) for rank in range(ranks)]
        mine = heads // ranks
        assert len({len(share) for share in shares}) == 1
        assert mine % len(shares[0]) == 0
        for head in range(heads):  # as grouped attention finds it among a rank's own
            rank, local = divmod(head, mine)
            assert shares[rank][local // (mine // len(shares[0]))] == head // group
        assert (key_value_repeats(heads, key_value_heads, ranks) == 1) == (key_value_heads % ranks == 0)


def test_heads_that_do_not_divide_are_named():
    text = SimpleNamespace(num_attention_heads=28, linear_num_key_heads=4)
    check_heads(text, recurrent=False, sp=2, tp=7)
    with pytest.raises(
        InvalidConfig, match=r"layout.sp=4 x layout.tp=2 = 8 must divide the 28 query heads.*4, 7, 14, 28"
    ):
        check_heads(text, recurrent=False, sp=4, tp=2)
    with pytest.raises(InvalidConfig, match=r"layout.sp=2 x layout.tp=7 = 14 must divide the 4 key heads.*\[1, 2, 4\]"):
        check_heads(text, recurrent=True, sp=2, tp=7)
