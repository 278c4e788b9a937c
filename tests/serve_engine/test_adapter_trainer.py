"""Log-probs under an adapted head against the plain formula, and how rows become parts."""

import pytest
import torch

from dataproto_server.engine.adapter_trainer import AdapterTrainer, ScoredRow, adapted_log_probs
from helpers.checkpoints import write_checkpoint
from rollout.adapters import AdapterConfig
from rollout.prompts import PlacedSequence
from workers.model.named_weights import float32_weights

VOCABULARY, HIDDEN = 50, 8


def leaf(*shape, seed):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.requires_grad_()


@pytest.mark.parametrize("chunk_elements", [None, 3 * VOCABULARY])
@pytest.mark.parametrize("adapted", [True, False])
def test_log_probs_and_their_gradient_equal_the_formula(chunk_elements, adapted):
    states, weight = leaf(10, HIDDEN, seed=0), leaf(VOCABULARY, HIDDEN, seed=1)
    pair = (leaf(4, HIDDEN, seed=2), leaf(VOCABULARY, 4, seed=3)) if adapted else None
    targets = torch.randint(0, VOCABULARY, (10, 3), generator=torch.Generator().manual_seed(4))
    targets[0] = 7  # one token several times
    merged = weight if pair is None else weight + 0.5 * pair[1] @ pair[0]
    expected = (states @ merged.t()).log_softmax(1).gather(1, targets)
    chosen = torch.rand(10, 3, generator=torch.Generator().manual_seed(6)) < 0.5  # some states predict nothing
    places, expected = chosen.nonzero()[:, 0], expected[chosen]
    found = adapted_log_probs(states, weight, places, targets[chosen], pair, 0.5, chunk_elements)
    torch.testing.assert_close(found, expected)
    slope, wanted = leaf(len(places), seed=5).detach(), [states, weight, *(pair or ())]
    for one, other in zip(
        torch.autograd.grad((found * slope).sum(), wanted),
        torch.autograd.grad((expected * slope).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def trainer(path):
    return AdapterTrainer(path, torch.device("cpu"), 10)


def row(length, adapter):
    ids = torch.arange(length)
    return ScoredRow(
        PlacedSequence(ids, torch.zeros(length, dtype=torch.int8), (), position_ids=ids), adapter, ids, ids
    )


def test_rows_of_an_adapter_lie_together_and_parts_keep_the_budget(trainer):
    one, two = (trainer.new_adapter(AdapterConfig(2), seed) for seed in (0, 1))
    rows = [row(4, one), row(4, None), row(3, one), row(12, two), row(2, None)]
    assert trainer.parts(rows) == [[0, 2], [1, 4], [3]]
    assert trainer.parts([]) == []


def test_rows_do_not_depend_on_the_others_of_a_part(trainer):
    one, two = (trainer.new_adapter(AdapterConfig(2), seed) for seed in (0, 1))
    for adapter in (one, two):
        for _, matrix in adapter.named_parameters():
            matrix.data.normal_(std=0.1, generator=torch.Generator().manual_seed(int(adapter is one)))
    rows = [row(4, one), row(3, two), row(5, None)]
    together = trainer.log_probs(rows)
    for each, found in zip(rows, together, strict=True):
        torch.testing.assert_close(trainer.log_probs([each])[0], found, atol=1e-5, rtol=0)
    assert (together[0][:3] - trainer.log_probs([row(4, two)])[0][:3]).abs().max() > 1e-3


def test_gradients_belong_to_the_adapters_of_the_rows(trainer):
    one, two = (trainer.new_adapter(AdapterConfig(2), seed) for seed in (0, 1))
    rows = [row(4, one), row(3, two), row(8, one)]
    found = trainer.run(rows, lambda numbers, values: torch.stack([each.sum() for each in values]).sum())
    alone = trainer.run([rows[0], rows[2]], lambda numbers, values: torch.stack([each.sum() for each in values]).sum())
    ones, twos = (set(trainer.trained(each)) for each in (one, two))
    assert set(found) == ones | twos
    assert set(alone) == ones
    for matrix in ones:
        torch.testing.assert_close(found[matrix], alone[matrix], atol=1e-6, rtol=1e-5)
    assert all(matrix.grad is None for _, matrix in one.named_parameters())


@pytest.mark.slow
def test_layers_that_are_computed_again_have_the_adapters_of_the_rows(path, trainer):
    other = AdapterTrainer(path, torch.device("cpu"), 10, activation_checkpointing=True)
    found = []
    for each in (trainer, other):
        one, two = (each.new_adapter(AdapterConfig(2), seed) for seed in (0, 1))
        rows = [row(4, one), row(3, two), row(8, one)]
        gradients = each.run(rows, lambda numbers, values: torch.stack([value.sum() for value in values]).sum())
        found.append([gradients[matrix] for adapter in (one, two) for matrix in each.trained(adapter)])
    for again, kept in zip(*found, strict=True):
        torch.testing.assert_close(again, kept, atol=1e-6, rtol=1e-5)


def test_weights_that_are_used_in_float32_are_not_rounded(tmp_path, monkeypatch):
    """On CUDA, where the base computes in bfloat16: decays of recurrent layers are those of the actor and of vLLM."""
    monkeypatch.setattr("dataproto_server.engine.adapter_trainer.compute_dtype", lambda *_: torch.bfloat16)
    base = AdapterTrainer(write_checkpoint("qwen3_5", tmp_path), torch.device("cpu"))
    exact = {id(weight) for weight in float32_weights(base.model, base.family)}
    assert len(exact) == 2
    for weight in base.model.parameters():
        assert weight.dtype == (torch.float32 if id(weight) in exact else torch.bfloat16)
