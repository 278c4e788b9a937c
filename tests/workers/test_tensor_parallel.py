"""Tensor parallelism over two processes against one process in float32: log-probs and entropies within 1e-5 absolute, each
parameter's gradient within 1e-4 of its norm. All cases run in one start of the processes.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from dataproto.vlm.family import SoftCap
from helpers.forward_rows import forward_rows
from helpers.layouts import (
    CPU,
    config_with_heads,
    differences,
    joined,
    mixed_rows,
    odd_rows,
    one_image,
    run_pass,
    text_rows,
    turn_rows,
)
from helpers.processes import run_ranks
from helpers.tiny_models import MODEL_TYPES, tiny_model
from workers.model.logprobs import token_log_probs
from workers.model.model_config import ModelConfig
from workers.model.named_weights import named_weights
from workers.model.packed_model import PackedVLM
from workers.parallel import parallelize
from workers.parallel.compiling import MEANT
from workers.parallel.tensor import VocabularyEmbedding, partial_parameters, sum_gradients
from workers.ranks.autograd_collectives import Peers
from workers.ranks.layout import Layout
from workers.training.forward_pass import pack, sharing

TWO = Layout(tp=2)


def spread(config, **options):
    ranks = joined(TWO)
    module = PackedVLM(tiny_model(config.model_type, config=config), family_of(config), 1.0)
    parallelize(module, ranks, ModelConfig(**options))
    return module


# What both ranks run


def equals_one_process(model_type, rows, heads=2, key_value_heads=1, tied=False, biases=False):
    config = config_with_heads(model_type, heads, key_value_heads, tied)
    config.get_text_config().attention_bias = biases
    data = rows(config)
    found = run_pass(config, data, joined(TWO))
    return differences(found, run_pass(config, data)) if distributed.get_rank() == 0 else []


def log_probs_of_a_split_vocabulary(banned, temperature, chunk, compiled=False, cap=None):
    """24 words, 12 a rank; ``banned`` may be all of one rank's."""
    ranks = joined(TWO)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (9, 24))
    targets = torch.tensor([0, 11, 12, 23, 5, 13, 3, 22, 4])
    if len(banned) == 12:
        targets = targets % 12
    split = nn.Parameter(distribute_tensor(weight, ranks.submesh("tp"), [Shard(0)], src_data_rank=None))
    results = []
    for score, head in (
        (partial(token_log_probs, peers=Peers.of(ranks.group("tp"))), split),
        (token_log_probs, weight.clone().requires_grad_()),
    ):
        states = hidden.clone().requires_grad_()
        more = {"chunk_elements": chunk, "cap": cap, "compiled": compiled and head is split}
        log_probs, entropies = score(states, head, targets, temperature, banned, True, **more)
        (log_probs * torch.arange(9) + entropies * torch.arange(9).flip(0)).sum().backward()
        whole = head.grad.full_tensor() if isinstance(head.grad, DTensor) else head.grad
        results.append((log_probs.detach(), entropies.detach(), states.grad, whole))
        alone, nothing = score(states, head, targets, temperature, banned, False, cap=cap)
        assert nothing is None
        torch.testing.assert_close(alone, log_probs)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def log_probs_in_half_precision():
    """A backward pass within autocast, as of a layout of tp alone, has the gradients of one outside, to the last bit."""
    ranks = joined(TWO)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (9, 24))
    targets, found = torch.tensor([0, 11, 12, 23, 5, 13, 3, 22, 4]), []
    for within in (True, False):
        head = nn.Parameter(distribute_tensor(weight, ranks.submesh("tp"), [Shard(0)], src_data_rank=None))
        states = hidden.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log_probs, _ = token_log_probs(states, head, targets, peers=Peers.of(ranks.group("tp")))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=within):
            (log_probs * torch.arange(9)).sum().backward()
        found.append((log_probs.detach(), states.grad, head.grad.full_tensor()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def an_embedding_of_a_split_vocabulary():
    """The row of the padding token is not learnt, as in ``nn.Embedding``."""
    ranks = joined(TWO)
    whole = nn.Embedding(6, 4, padding_idx=4)
    nn.init.normal_(whole.weight, generator=torch.Generator().manual_seed(0))
    weight = distribute_tensor(whole.weight.detach(), ranks.submesh("tp"), [Shard(0)], src_data_rank=None)
    ours = VocabularyEmbedding(nn.Parameter(weight), whole, Peers.of(ranks.group("tp")))
    ids = torch.tensor([[0, 4, 3, 5, 0, 2]])
    mine = slice(3 * distributed.get_rank(), 3 * distributed.get_rank() + 3)
    for layer, tokens in ((whole, slice(None)), (ours, mine)):
        (layer(ids) * torch.arange(6.0)[None, tokens, None]).sum().backward()
    assert torch.equal(ours(ids), whole(ids)[:, mine])
    assert torch.equal(ours.weight.grad.full_tensor(), whole.weight.grad)


def a_scaled_embedding_in_half_precision():
    """Autocast leaves the weights in float32. The scale 3.1623 is 3.15625 in bfloat16."""
    ranks = joined(TWO)
    whole = Gemma3TextScaledWordEmbedding(6, 10, padding_idx=0, embed_scale=10**0.5).bfloat16()
    nn.init.normal_(whole.weight, generator=torch.Generator().manual_seed(0))
    weight = distribute_tensor(whole.weight.detach().float(), ranks.submesh("tp"), [Shard(0)], src_data_rank=None)
    ours = VocabularyEmbedding(nn.Parameter(weight), whole, Peers.of(ranks.group("tp")))
    ids = torch.tensor([[0, 4, 3, 5, 0, 2]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours(ids)
    assert found.dtype == torch.float32
    first = 3 * distributed.get_rank()
    assert torch.equal(found.bfloat16(), whole(ids)[:, first : first + 3])
    exact = whole.weight.float()[ids[:, first : first + 3]] * 3.15625
    assert torch.equal(found, exact)


def weights_are_split_and_come_back_whole():
    config = config_with_heads("qwen3_vl_moe", heads=4, key_value_heads=2, tied=True)
    module = spread(config)
    split = {name for name, weight in module.model.named_parameters() if isinstance(weight, DTensor)}
    layers = [f"model.language_model.layers.{layer}" for layer in range(2)]
    assert split == {
        *(f"{layer}.self_attn.{name}_proj.weight" for layer in layers for name in "qkvo"),
        *(f"{layer}.mlp.experts.{name}_proj" for layer in layers for name in ("gate_up", "down")),
        "model.language_model.embed_tokens.weight",
    }
    assert module.family.lm_head(module.model).weight is module.model.get_input_embeddings().weight
    summed = {id(parameter) for parameter in partial_parameters(module)}
    found = {name for name, weight in module.model.named_parameters() if id(weight) in summed}
    assert found == {name for name, _ in module.model.named_parameters()} - split
    whole = dict(tiny_model("qwen3_vl_moe", config=config).named_parameters())
    assert all(torch.equal(weight, whole[name]) for name, weight in named_weights(module.model))


def each_token_is_computed_once(model_type):
    """What is not split sees ceil(T / 2) tokens on each rank, but for the norms of single heads, which see a rank's heads."""
    config = config_with_heads(model_type, heads=4, key_value_heads=2)
    module, data = spread(config), odd_rows(config)
    packed = pack(module, data, sharing(module, data))
    part = -(-packed.input_ids.shape[-1] // 2)
    assert packed.input_ids.shape[-1] == 2 * part - 1
    decoder = module.model.get_submodule(module.family.language_model)
    seen = {}

    def count(name, part, args, output):
        seen[name] = (args[0] if args else output).numel() // config.text_config.hidden_size

    for name, layer in decoder.named_modules():
        if name.endswith(("norm", "mlp.gate", "mlp.experts")) and not name.endswith(("q_norm", "k_norm")):
            layer.register_forward_hook(partial(count, name))
    forward_rows(module, data, CPU)
    kinds = {"qwen3_vl": 2, "qwen3_vl_moe": 4, "glm4v": 4}
    assert len(seen) == 2 * kinds[model_type] + 1
    assert set(seen.values()) == {part}, seen


def what_is_asked_of_other_ranks(mode):
    """How often tokens are gathered and summed in a pass forward and backward."""
    config = config_with_heads("qwen2_5_vl", heads=2, key_value_heads=1)
    module = spread(config, activation_checkpointing=mode)
    module.train()
    asked = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            asked[function.name()] += 1
            return function(*args, **kwargs or {})

    with Count():
        forward_rows(module, text_rows(config), CPU).log_probs.sum().backward()
    return asked["_c10d_functional::all_gather_into_tensor"], asked["_c10d_functional::reduce_scatter_tensor"]


def compiled_layers_give_the_same(model_type, mode):
    """Layers compiled for one batch, and for another of another length; without graph breaks but around split experts."""
    config = config_with_heads(model_type, heads=4, key_value_heads=2)
    torch._dynamo.reset()
    counters.clear()
    wrong = []
    for rows in (mixed_rows, odd_rows):
        data = rows(config)
        found = run_pass(config, data, joined(TWO), activation_checkpointing=mode, compile=True)
        wrong += differences(found, run_pass(config, data))
    return wrong, [reason for reason in counters["graph_break"] if not MEANT.search(reason)]


def gradients_add_up_in_buckets():
    group = joined(TWO).group("tp")
    me = distributed.get_rank(group)
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 0, 2)] + [nn.Parameter(torch.zeros(1).half())]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 10 * me)
    frozen = nn.Parameter(torch.zeros(2))
    sum_gradients([*parameters, frozen], group, "cpu")
    assert [p.grad.tolist() for p in parameters] == [[10] * 3, [], [14] * 2, [16]]
    assert frozen.grad is None


def refusals():
    """What is said to a model that does not divide, and to adapters."""
    uneven = config_with_heads("qwen2_5_vl", heads=2, key_value_heads=1)
    uneven.text_config.intermediate_size = 97
    odd = config_with_heads("qwen3_vl", heads=3, key_value_heads=3)
    fine = config_with_heads("qwen3_vl", heads=2, key_value_heads=1)
    said = []
    for config, options in ((uneven, {}), (odd, {}), (fine, {"lora_rank": 2})):
        try:
            spread(config, **options)
        except InvalidConfig as error:
            said.append(str(error))
    return said


CASES = {
    **{
        f"mixed rows, {kind}": partial(equals_one_process, kind, mixed_rows) for kind in MODEL_TYPES if kind != "gemma4"
    },
    "key-value heads for all": partial(equals_one_process, "qwen2_5_vl", mixed_rows, heads=4, key_value_heads=2),
    "uneven key-value heads": partial(equals_one_process, "qwen3_vl", mixed_rows, heads=6, key_value_heads=3),
    "tied weights": partial(equals_one_process, "qwen2_vl", mixed_rows, tied=True),
    "no image": partial(equals_one_process, "qwen3_vl", text_rows),
    "one image": partial(equals_one_process, "qwen2_5_vl", one_image),
    "images in later turns": partial(equals_one_process, "qwen3_vl", turn_rows),
    **{
        f"an odd number of tokens, {kind}": partial(equals_one_process, kind, odd_rows)
        for kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "internvl")
    },
    "biases": partial(equals_one_process, "qwen3_vl", odd_rows, biases=True),
}
CHECKS = {
    "log-probs": partial(log_probs_of_a_split_vocabulary, (2, 20), 0.7, None),
    "log-probs in chunks": partial(log_probs_of_a_split_vocabulary, (), 1.0, 48),
    "log-probs without half the words": partial(log_probs_of_a_split_vocabulary, tuple(range(12, 24)), 1.3, 24),
    "log-probs in bfloat16": log_probs_in_half_precision,
    "embedding": an_embedding_of_a_split_vocabulary,
    "scaled embedding in bfloat16": a_scaled_embedding_in_half_precision,
    "weights": weights_are_split_and_come_back_whole,
    "sums": gradients_add_up_in_buckets,
    **{f"tokens, {kind}": partial(each_token_is_computed_once, kind) for kind in ("qwen3_vl", "qwen3_vl_moe", "glm4v")},
}
MODES = {mode: partial(what_is_asked_of_other_ranks, mode) for mode in ("none", "selective", "full")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_ranks(2, CASES | CHECKS | MODES | {"refusals": refusals}, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_halves_equal_one_process(outcomes, case):
    assert outcomes[case] == [[], []]


@pytest.mark.parametrize("check", CHECKS)
def test_between_two_ranks(outcomes, check):
    assert outcomes[check] == [None, None]


def test_sums_are_kept_and_gathers_made_again(outcomes):
    """Two layers: forward two of each in a layer, a sum of the embedding, one gather before the head and one in it; backward,
    what mirrors those but the last two, which are summed otherwise or stay.
    """
    gathers, sums = outcomes["none"][0]
    assert sums == 1 + 4 + 4
    assert outcomes["selective"] == [(gathers + 4, sums)] * 2
    full = sums + 2  # attention's; nothing needs the MLP's again
    assert outcomes["full"] == [(gathers + 4, full)] * 2


@pytest.mark.long
def test_split_layers_can_be_compiled(tmp_path):
    modes = {"qwen2_5_vl": "none", "qwen3_vl": "selective", "qwen3_vl_moe": "full"}
    cases = {f"{kind}, {mode}": partial(compiled_layers_give_the_same, kind, mode) for kind, mode in modes.items()}
    for case, outcome in run_ranks(2, cases, tmp_path, timeout=600).items():
        assert outcome == [([], [])] * 2, case


@pytest.mark.long
def test_a_split_head_can_be_compiled(tmp_path):
    """Chunks of 1, 4 and all of the 9 tokens, half of the vocabulary banned or a few words, a capped head."""
    settings = [
        ((), 1.0, 48, None),
        ((0, 11, 12), 0.7, 12, None),
        ((), 0.7, None, SoftCap(3.0)),
        ((3, 20), 1.3, None, SoftCap(3.0, 0.4)),
    ]
    cases = {
        str(each): partial(log_probs_of_a_split_vocabulary, *each[:3], compiled=True, cap=each[3]) for each in settings
    }
    for case, outcome in run_ranks(2, cases, tmp_path, timeout=600).items():
        assert outcome == [None] * 2, case


def test_what_cannot_be_split_is_named(outcomes):
    for said in outcomes["refusals"]:
        assert len(said) == 3, said
        assert (
            "layout.tp=2 does not divide dimension 0 of the parameter (97, 64) of model.language_model.layers.0"
            in said[0]
        )
        assert "must divide the 3 query heads" in said[1]
        assert "adapters are not split" in said[2]
