"""Tensor parallelism over two processes against one process in float32: log-probs and entropies within 1e-5 absolute, each
parameter's gradient within 1e-4 of its norm. All cases run in one start of the processes.
"""

from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.layouts import config_with_heads, differences, joined, mixed_rows, one_image, run_pass, text_rows
from helpers.processes import run_ranks
from helpers.tiny_models import MODEL_TYPES, tiny_model
from workers.engine_config import EngineConfig, LoraConfig
from workers.layout import Layout
from workers.logprobs import token_log_probs
from workers.packed import PackedVLM
from workers.parallel import parallelize
from workers.parallel.collectives import Peers
from workers.parallel.tensor import VocabularyEmbedding, partial_parameters, sum_gradients
from workers.parallel.vocabulary import split_token_log_probs
from workers.weights import named_weights

TWO = Layout(tp=2)


def spread(config, **options):
    ranks = joined(TWO)
    module = PackedVLM(tiny_model(config.model_type, config=config), family_of(config), 1.0)
    parallelize(module, ranks, EngineConfig(**options))
    return module


# What both ranks run


def equals_one_process(model_type, rows, heads=2, key_value_heads=1, tied=False):
    config = config_with_heads(model_type, heads, key_value_heads, tied)
    data = rows(config)
    found = run_pass(config, data, joined(TWO))
    return differences(found, run_pass(config, data)) if distributed.get_rank() == 0 else []


def log_probs_of_a_split_vocabulary(banned, temperature, chunk):
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
        (partial(split_token_log_probs, peers=Peers.of(ranks.group("tp"))), split),
        (token_log_probs, weight.clone().requires_grad_()),
    ):
        states = hidden.clone().requires_grad_()
        log_probs, entropies = score(states, head, targets, temperature, banned, True, chunk_elements=chunk)
        (log_probs * torch.arange(9) + entropies * torch.arange(9).flip(0)).sum().backward()
        whole = head.grad.full_tensor() if isinstance(head.grad, DTensor) else head.grad
        results.append((log_probs.detach(), entropies.detach(), states.grad, whole))
        alone, nothing = score(states, head, targets, temperature, banned, False)
        assert nothing is None
        torch.testing.assert_close(alone, log_probs)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def an_embedding_of_a_split_vocabulary():
    """The row of the padding token is not learnt, as in ``nn.Embedding``."""
    ranks = joined(TWO)
    whole = nn.Embedding(6, 4, padding_idx=4)
    nn.init.normal_(whole.weight, generator=torch.Generator().manual_seed(0))
    weight = distribute_tensor(whole.weight.detach(), ranks.submesh("tp"), [Shard(0)], src_data_rank=None)
    ours = VocabularyEmbedding(nn.Parameter(weight), 4, Peers.of(ranks.group("tp")))
    ids = torch.tensor([[0, 4, 3, 5, 0, 2]])
    mine = slice(3 * distributed.get_rank(), 3 * distributed.get_rank() + 3)
    for layer, tokens in ((whole, slice(None)), (ours, mine)):
        (layer(ids) * torch.arange(6.0)[None, tokens, None]).sum().backward()
    assert torch.equal(ours(ids), whole(ids)[:, mine])
    assert torch.equal(ours.weight.grad.full_tensor(), whole.weight.grad)


def weights_are_split_and_come_back_whole():
    config = config_with_heads("qwen3_vl_moe", heads=4, key_value_heads=2, tied=True)
    module = spread(config)
    split = {name for name, weight in module.model.named_parameters() if isinstance(weight, DTensor)}
    layers = [f"model.language_model.layers.{layer}" for layer in range(2)]
    assert split == {
        *(f"{layer}.self_attn.{name}_proj.weight" for layer in layers for name in "qkvo"),
        "model.language_model.embed_tokens.weight",
    }
    assert module.family.lm_head(module.model).weight is module.model.get_input_embeddings().weight
    summed = {id(parameter) for parameter in partial_parameters(module)}
    found = {name for name, weight in module.model.named_parameters() if id(weight) in summed}
    assert found == {name for name, _ in module.model.named_parameters()} - split
    whole = dict(tiny_model("qwen3_vl_moe", config=config).named_parameters())
    assert all(torch.equal(weight, whole[name]) for name, weight in named_weights(module.model))


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
    for config, options in ((uneven, {}), (odd, {}), (fine, {"lora": LoraConfig()})):
        try:
            spread(config, **options)
        except InvalidConfig as error:
            said.append(str(error))
    return said


CASES = {
    **{f"mixed rows, {kind}": partial(equals_one_process, kind, mixed_rows) for kind in MODEL_TYPES},
    "key-value heads for all": partial(equals_one_process, "qwen2_5_vl", mixed_rows, heads=4, key_value_heads=2),
    "uneven key-value heads": partial(equals_one_process, "qwen3_vl", mixed_rows, heads=6, key_value_heads=3),
    "tied weights": partial(equals_one_process, "qwen2_vl", mixed_rows, tied=True),
    "no image": partial(equals_one_process, "qwen3_vl", text_rows),
    "one image": partial(equals_one_process, "qwen2_5_vl", one_image),
}
CHECKS = {
    "log-probs": partial(log_probs_of_a_split_vocabulary, (2, 20), 0.7, None),
    "log-probs in chunks": partial(log_probs_of_a_split_vocabulary, (), 1.0, 48),
    "log-probs without half the words": partial(log_probs_of_a_split_vocabulary, tuple(range(12, 24)), 1.3, 24),
    "embedding": an_embedding_of_a_split_vocabulary,
    "weights": weights_are_split_and_come_back_whole,
    "sums": gradients_add_up_in_buckets,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_ranks(2, CASES | CHECKS | {"refusals": refusals}, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_halves_equal_one_process(outcomes, case):
    assert outcomes[case] == [[], []]


@pytest.mark.parametrize("check", CHECKS)
def test_between_two_ranks(outcomes, check):
    assert outcomes[check] == [None, None]


def test_what_cannot_be_split_is_named(outcomes):
    for said in outcomes["refusals"]:
        assert len(said) == 3, said
        assert (
            "layout.tp=2 does not divide dimension 0 of the parameter (97, 64) of model.language_model.layers.0"
            in said[0]
        )
        assert "must divide the 3 query heads" in said[1]
        assert "adapters are not split" in said[2]
