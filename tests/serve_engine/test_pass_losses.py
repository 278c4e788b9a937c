"""Losses of passes are the published formulas, over dense and sparse targets."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dataproto.chunks import EncodedTextChunk
from dataproto_server.backend import Datum, Pass, SparseRows
from dataproto_server.engine import adapter_trainer
from dataproto_server.engine.datum_losses import DATUM_LOSSES
from helpers.served_models import (
    ADAM,
    chunks,
    engine_of,
    gradients,
    length,
    new_model,
    rows,
    run_pass,
)

DTYPES = {"target_tokens": np.int64, "weights": np.float32}


@pytest.mark.parametrize("loss", DATUM_LOSSES)
def test_a_loss_is_its_formula_of_the_log_probs(engine, loss):
    new_model(engine, "m")
    data = rows(engine, loss, seed=2)
    if loss in ("ppo", "cispo"):  # a threshold for each token
        for datum in data:
            count = len(datum.inputs["target_tokens"])
            datum.inputs["clip_low_threshold"] = np.linspace(0.2, 0.9, count, dtype=np.float32)
            datum.inputs["clip_high_threshold"] = np.linspace(1.1, 1.5, count, dtype=np.float32)
    found = run_pass(engine, "m", data, loss)
    total = 0.0
    for output, datum in zip(found.outputs, data, strict=True):
        p, given = torch.from_numpy(output["logprobs"]), {k: torch.from_numpy(v) for k, v in datum.inputs.items()}
        if loss == "cross_entropy":
            total -= (p * given["weights"]).sum().item()
            continue
        learned = (given["logprobs"] != 0) | (given["advantages"] != 0)
        thresholds = {name: given[name] for name in given if name.startswith("clip")}
        tokens = DATUM_LOSSES[loss][0](p, given["logprobs"], given["advantages"], **thresholds)
        total += tokens[learned].sum().item()
    assert found.metrics == {"loss:sum": pytest.approx(total, rel=1e-5)}


def test_clipping_of_cispo_is_one_sided_by_default(engine):
    new_model(engine, "m")
    data = rows(engine, "cispo", seed=2)
    default = run_pass(engine, "m", data, "cispo").metrics["loss:sum"]
    same = run_pass(engine, "m", data, "cispo", loss_config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0})
    other = run_pass(engine, "m", data, "cispo", loss_config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    assert default == same.metrics["loss:sum"] != other.metrics["loss:sum"]


def test_several_targets_a_token_dense_or_sparse(engine):
    """Distillation: K targets with weights; sparse arrays are the same, and the loss is the sum over targets."""
    new_model(engine, "m")
    prompt = chunks(engine, "see", (24, 16), "angle")
    count, random = length(engine, prompt), np.random.default_rng(0)
    targets = random.integers(1, 250, (count, 5)) * (random.random((count, 5)) < 0.4)
    weights = (targets > 0) * random.random((count, 5)).astype(np.float32)
    dense = run_pass(engine, "m", [Datum(prompt, {"target_tokens": targets, "weights": weights})])
    first = {name: gradient.clone() for name, gradient in gradients(engine, "m").items()}
    engine.optim_step("m", replace(ADAM, learning_rate=0.0))
    sparse = run_pass(engine, "m", [Datum(prompt, {"target_tokens": csr(targets), "weights": csr(weights)})])
    values = dense.outputs[0]["logprobs"]
    assert values.shape == (count, 5)
    assert np.array_equal(values, sparse.outputs[0]["logprobs"])
    assert dense.metrics["loss:sum"] == pytest.approx(-(values * weights).sum(), rel=1e-5)
    assert all(torch.equal(first[name], gradient) for name, gradient in gradients(engine, "m").items())


def test_targets_are_counted_over_all_rows_of_a_pass(path):
    """Empty sparse arrays too: a few bytes of them stand for any number of zeros."""
    engine = engine_of(path, max_targets=20)
    new_model(engine, "m")
    prompt = [EncodedTextChunk([5])]
    empty = SparseRows(np.zeros(0, np.int64), np.zeros(2, np.int64), np.zeros(0, np.int64), (1, 10))
    datum = Datum(prompt, {"target_tokens": empty, "weights": replace(empty, values=np.zeros(0, np.float32))})
    (failed,) = engine.passes([Pass("m", [datum] * 3, "cross_entropy")])
    assert failed.category == "user"
    assert "row 2: loss_fn_inputs['target_tokens'] has shape (1, 10), but the pass has room for 0" in failed.message
    found = run_pass(engine, "m", [datum, datum])
    assert [output["logprobs"].shape for output in found.outputs] == [(1, 10)] * 2


def test_a_row_with_many_targets_makes_no_other_wider(engine, monkeypatch):
    """Each row's targets go through the head at their own width, in one pass and in others beside it."""
    for name in ("m", "other"):
        new_model(engine, name)
    counts, compute = [], adapter_trainer.adapted_log_probs

    def recorded(states, weight, places, targets, *rest):
        counts.append(len(targets))
        return compute(states, weight, places, targets, *rest)

    monkeypatch.setattr(adapter_trainer, "adapted_log_probs", recorded)
    wide = Datum([EncodedTextChunk([5])], {name: np.ones((1, 1000), t) for name, t in DTYPES.items()})
    long = Datum(chunks(engine, "abcdef"), {name: np.ones((6, 1), t) for name, t in DTYPES.items()})
    mixed = engine.passes([Pass(name, [wide, long, long], "cross_entropy") for name in ("m", "other")])
    assert counts == [1000 + 12] * 2
    for datum, output in zip((wide, long, long), mixed[0].outputs, strict=True):
        alone = run_pass(engine, "m", [datum], forward_only=True).outputs[0]["logprobs"]
        np.testing.assert_allclose(output["logprobs"], alone, atol=1e-5, rtol=0)


def test_log_probs_are_computed_at_the_listed_targets_alone(engine, monkeypatch):
    """Of 6 x 250 places 3 are listed, one as a target and a weight, one as a weight (its target is 0), one as a target.

    Each of the 6 tokens has one log-prob more: that of the token 0, which stands at the places that are not listed.
    """
    new_model(engine, "m")
    counts, compute = [], adapter_trainer.adapted_log_probs

    def recorded(states, weight, places, targets, *rest):
        counts.append(len(targets))
        return compute(states, weight, places, targets, *rest)

    targets, weights = np.zeros((6, 250), np.int64), np.zeros((6, 250), np.float32)
    targets[2, 100], weights[2, 100], weights[4, 7], targets[5, 249] = 9, 0.5, 2.0, 11
    prompt = chunks(engine, "abcdef")
    dense = run_pass(engine, "m", [Datum(prompt, {"target_tokens": targets, "weights": weights})])
    expected = gradients(engine, "m")
    engine.optim_step("m", replace(ADAM, learning_rate=0.0))
    monkeypatch.setattr(adapter_trainer, "adapted_log_probs", recorded)
    sparse = run_pass(engine, "m", [Datum(prompt, {"target_tokens": csr(targets), "weights": csr(weights)})])
    assert counts == [3 + 6]
    np.testing.assert_allclose(sparse.outputs[0]["logprobs"], dense.outputs[0]["logprobs"], atol=1e-6, rtol=0)
    assert sparse.metrics["loss:sum"] == pytest.approx(dense.metrics["loss:sum"], rel=1e-6)
    for name, gradient in gradients(engine, "m").items():
        torch.testing.assert_close(gradient, expected[name])
    mixed = run_pass(engine, "m", [Datum(prompt, {"target_tokens": targets, "weights": csr(weights)})])
    assert mixed.metrics["loss:sum"] == pytest.approx(dense.metrics["loss:sum"], rel=1e-6)
    assert counts[1:] == [6 * 250]


def csr(array):
    starts = np.concatenate([[0], np.cumsum((array != 0).sum(1))])
    return SparseRows(array[array != 0], starts, np.nonzero(array)[1], array.shape)


def test_a_loss_of_the_client_is_cross_entropy_with_its_gradient(engine):
    """As the SDK's forward_backward_custom does: weights are minus the derivative by the log-probs. Within 1e-6."""
    new_model(engine, "m")
    data = rows(engine, "cross_entropy", seed=4)
    run_pass(engine, "m", data)
    built_in = {name: gradient.clone() for name, gradient in gradients(engine, "m").items()}
    engine.optim_step("m", replace(ADAM, learning_rate=0.0))
    forward = run_pass(engine, "m", data, forward_only=True)
    assert all(gradient is None for gradient in gradients(engine, "m").values())
    custom = []
    for datum, output in zip(data, forward.outputs, strict=True):
        p = torch.from_numpy(output["logprobs"]).requires_grad_()
        (-p * torch.from_numpy(datum.inputs["weights"])).sum().backward()
        custom.append(Datum(datum.chunks, {**datum.inputs, "weights": -p.grad.numpy()}))
    run_pass(engine, "m", custom)
    for name, gradient in gradients(engine, "m").items():
        torch.testing.assert_close(gradient, built_in[name], atol=1e-6, rtol=0)
