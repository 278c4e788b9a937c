"""A pass that is wrong or cannot be computed fails alone, and adds no gradient."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dataproto.errors import InvalidConfig
from dataproto_server.backend import Datum, Failure, Pass, SparseRows
from dataproto_server.engine.datum_losses import DATUM_LOSSES
from helpers.served_models import (
    ADAM,
    chunks,
    gradients,
    length,
    new_model,
    random_inputs,
    rows,
    run_pass,
)

WRONG = [
    ("gspo", {}, {}, "loss 'gspo' has no public formula"),
    ("stable_reinforce", {}, {}, "'stable_reinforce' has no public formula"),
    ("hinge", {}, {}, "'hinge' is unknown: choose one of cross_entropy"),
    ("dro", {"kl_coeff": 1.0}, {}, "has no option 'kl_coeff': it has beta"),
    ("dro", {"beta": "much"}, {}, "beta='much' is not a finite number"),
    ("dro", {"beta": 1e38}, {}, "the loss of rows [0] is not finite"),
    ("dro", {"beta": 1e300}, {}, "beta=1e+300 is beyond 3.40282e+38, the largest number of float32"),
    ("ppo", {"clip_high_threshold": 1e300}, {}, "clip_high_threshold=1e+300 is beyond 3.40282e+38"),
    ("ppo", {"clip_low_threshold": 2.0}, {}, "must be 0 <= low <= high"),
    (
        "ppo",
        {},
        {"sequence_ratio_mask": np.ones(6, np.float32)},
        "['sequence_ratio_mask'] is not read by the loss 'ppo'",
    ),
    ("ppo", {}, {"advantages": None}, "lack 'advantages'"),
    ("ppo", {}, {"advantages": np.full(6, np.nan, np.float32)}, "['advantages'][0] is not finite"),
    ("ppo", {}, {"mask": np.full(6, np.nan, np.float32)}, "['mask'][0] is not finite"),
    ("ppo", {}, {"clip_high_threshold": np.full(6, np.inf, np.float32)}, "['clip_high_threshold'][0] is not finite"),
    ("importance_sampling", {}, {"logprobs": np.full(6, -np.inf, np.float32)}, "['logprobs'][0] is not finite"),
    ("importance_sampling", {}, {"logprobs": np.full(6, -1e38, np.float32)}, "the loss of rows [1] is not finite"),
    (
        "importance_sampling",
        {},
        {"advantages": np.full(6, 3e38, np.float32)},
        "the gradient of rows 0 to 1 together is not finite",
    ),
    ("dro", {}, {"logprobs": np.full(6, 1e38, np.float32)}, "the loss of rows [1] is not finite"),
    ("cispo", {}, {"advantages": np.full(6, 1e36, np.float32)}, "of rows 0 to 1 together is not finite"),
    ("cross_entropy", {}, {"weights": np.full(6, np.nan, np.float32)}, "['weights'][0] is not finite"),
    ("cross_entropy", {}, {"weights": np.full(6, 3e38, np.float32)}, "the loss of rows [1] is not finite"),
    (
        "cross_entropy",
        {},
        {"weights": np.full(6, 1e36, np.float32)},
        "the gradient of rows 0 to 1 together is not finite",
    ),
    ("ppo", {}, {"advantages": np.ones(5, np.float32)}, "has shape (5,), but its model input has 6 tokens"),
    ("ppo", {}, {"target_tokens": np.zeros((6, 2), np.int64)}, "only cross_entropy takes several targets"),
    (
        "cross_entropy",
        {},
        {"target_tokens": np.full(6, 10**6)},
        "target_tokens'][0] = 1000000 is no token of the model",
    ),
    ("cross_entropy", {}, {"target_tokens": np.zeros(6, np.float32)}, "is float32, not int64"),
    ("cross_entropy", {}, {"weights": np.ones((6, 2), np.float32)}, "has shape (6, 2), but 'target_tokens' (6,)"),
    (
        "cross_entropy",
        {},
        {"weights": SparseRows(np.ones(1, np.float32), np.array([0] * 6 + [1]), np.array([9]), (6, 2**40))},
        "the pass has room for 16777210 more targets (--max-targets)",
    ),
]


@pytest.mark.parametrize(("loss", "config", "inputs", "message"), WRONG)
def test_a_wrong_pass_fails_alone_and_adds_no_gradient(engine, loss, config, inputs, message):
    for name in ("m", "other"):
        new_model(engine, name)
    prompt = chunks(engine, "abcdef")
    assert length(engine, prompt) == 6
    good = Datum(prompt, random_inputs(6, "cross_entropy", seed=1))
    given = {**random_inputs(6, loss if loss in DATUM_LOSSES else "cross_entropy", seed=2), **inputs}
    datum = Datum(prompt, {name: value for name, value in given.items() if value is not None})
    first = (
        good
        if loss == "cross_entropy"
        else Datum(prompt, random_inputs(6, loss if loss in DATUM_LOSSES else "ppo", seed=3))
    )
    failed, fine = engine.passes(
        [Pass("m", [first, datum] if not config else [datum], loss, config), Pass("other", [good], "cross_entropy")]
    )
    assert isinstance(failed, Failure)
    assert failed.category == "user"
    assert message in failed.message
    assert math.isfinite(fine.metrics["loss:sum"])
    assert all(gradient is None for gradient in gradients(engine, "m").values())
    assert any(gradient is not None for gradient in gradients(engine, "other").values())


def test_a_target_without_a_log_prob_gives_zero(engine):
    new_model(engine, "m")
    prompt = chunks(engine, "abcdef")
    inputs = {"target_tokens": np.array([5, -100, 7, 10**6, 9, 1]), "weights": np.float32([1, 0, 1, 0, 1, 1])}
    found = run_pass(engine, "m", [Datum(prompt, inputs)]).outputs[0]["logprobs"]
    assert (found == 0).tolist() == [False, True, False, True, False, False]


def test_a_model_that_is_not_finite_fails_by_name(engine):
    new_model(engine, "m")
    new_model(engine, "other")
    next(iter(engine._models["m"].matrices.values())).data.fill_(math.inf)
    data = rows(engine, "cross_entropy", seed=1)
    failed, fine = engine.passes([Pass("m", data, "cross_entropy"), Pass("other", data, "cross_entropy")])
    assert "logits of the model are not finite" in failed.message
    assert math.isfinite(fine.metrics["loss:sum"])


def overflowing(engine, *weights: float) -> list[Datum]:
    """Rows with these weights of all tokens. From about 1e19 on the norm of the gradient is infinite, and the loss is not."""
    prompt = chunks(engine, "abcdef")
    targets = np.arange(5, 5 + length(engine, prompt))
    return [
        Datum(prompt, {"target_tokens": targets, "weights": np.full(len(targets), weight, np.float32)})
        for weight in weights
    ]


def test_a_row_whose_gradient_is_not_finite_fails_its_pass_by_name_and_no_other(engine):
    for name in ("m", "other", "m alone", "other alone"):
        new_model(engine, name)
    fine, mine = overflowing(engine, 1, 2), rows(engine, "cross_entropy", seed=1)
    bad = overflowing(engine, 1, 1, 1, 1e30, 1)
    given = [("m", fine), ("m", bad), ("other", mine)]
    first, failed, last = engine.passes([Pass(name, data, "cross_entropy") for name, data in given])
    assert failed.category == "user"
    assert failed.message.startswith(
        "the gradient of rows 0 to 4 together is not finite, so the pass adds none; check logprobs"
    )
    alone = engine.passes([Pass("m alone", fine, "cross_entropy"), Pass("other alone", mine, "cross_entropy")])
    assert (first.metrics, last.metrics) == (alone[0].metrics, alone[1].metrics)
    for name in ("m", "other"):
        expected = gradients(engine, f"{name} alone")
        for place, gradient in gradients(engine, name).items():
            assert (gradient is None) == (expected[place] is None)
            assert gradient is None or torch.equal(gradient, expected[place])
    assert engine.optim_step("m", ADAM)["skipped_steps"] == 0


def test_rows_whose_gradients_are_not_finite_together_fail_their_pass(engine):
    new_model(engine, "m")
    run_pass(engine, "m", overflowing(engine, 1))
    most = 1.5e19 / engine.optim_step("m", ADAM)["grad_norm"]  # the norm of one row
    (failed,) = engine.passes([Pass("m", overflowing(engine, most, most), "cross_entropy")])
    assert failed.message.startswith("the gradient of rows 0 to 1 together is not finite")
    assert all(gradient is None for gradient in gradients(engine, "m").values())
    before = [matrix.clone() for matrix in engine._models["m"].matrices.values()]
    for _ in range(2):  # each pass could be a step
        run_pass(engine, "m", overflowing(engine, most))
    skipped = engine.optim_step("m", ADAM)
    assert (skipped["grad_norm"], skipped["skipped_steps"]) == (math.inf, 1)
    assert all(map(torch.equal, before, engine._models["m"].matrices.values()))


def test_a_pass_that_is_computed_again_is_not_checked_for_its_gradient(engine):
    """On a GPU its sum may be a little larger than the first time; what has been done is done again."""
    new_model(engine, "m")
    run_pass(engine, "m", overflowing(engine, 1e30), replayed=True)
    assert engine.optim_step("m", ADAM)["skipped_steps"] == 1


def test_a_loss_that_is_not_finite_fails_its_pass_by_the_row(engine):
    new_model(engine, "m")
    prompt = chunks(engine, "abcdef")
    inputs = {
        old: {
            "target_tokens": np.arange(5, 5 + length(engine, prompt)),
            "logprobs": np.full(length(engine, prompt), old, np.float32),
            "advantages": np.ones(length(engine, prompt), np.float32),
        }
        for old in (-5, -500)
    }
    data = [Datum(prompt, inputs[old]) for old in (-5, -5, -500, -5)]
    (failed,) = engine.passes([Pass("m", data, "importance_sampling")])
    assert failed.message == "the loss of rows [2] is not finite; check logprobs, advantages and weights"


def test_a_pass_that_cannot_be_computed_is_the_servers_fault(engine, monkeypatch):
    for name in ("m", "other"):
        new_model(engine, name)
    data, trainer = rows(engine, "cross_entropy", seed=1), engine.base("tiny").trainer
    mine, compute = engine._models["m"].adapter, trainer.log_probs

    def fail(rows):
        if any(row.adapter is mine for row in rows):
            raise RuntimeError("out of memory")
        return compute(rows)

    monkeypatch.setattr(trainer, "log_probs", fail)
    failed, fine = engine.passes([Pass("m", data, "cross_entropy"), Pass("other", data, "cross_entropy")])
    assert failed.category == "server"
    assert "RuntimeError in the server, incident" in failed.message
    assert "out of memory" not in failed.message
    assert math.isfinite(fine.metrics["loss:sum"])
    assert any(gradient is not None for gradient in gradients(engine, "other").values())


# Checkpoints


def test_gradients_are_added_without_memory(engine):
    """An operation that makes a new tensor fails, as all do when memory is full; so no part of a pass can be left behind."""

    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            if any(each.alias_info is None for each in operation._schema.returns):
                raise torch.OutOfMemoryError(str(operation))
            return operation(*arguments, **(options or {}))

    new_model(engine, "m")
    trained = engine._models["m"]
    _, *matrices = trained.matrices.values()
    ones = [{matrix: torch.ones_like(matrix) for matrix in matrices} for _ in range(2)]
    with Full():
        for each in ones:
            trained.add_gradients(each)
    first, *others = gradients(engine, "m").values()
    assert first is None
    assert all(bool((gradient == 2).all()) for gradient in others)


def test_a_pass_that_cannot_be_read_fails_alone(engine):
    """An error that is not the client's is told without its text."""
    for name in ("m", "other"):
        new_model(engine, name)
    data = rows(engine, "cross_entropy", seed=1)
    wrong = [Pass("m", [Datum([object()], data[0].inputs)], "cross_entropy")]
    wrong.append(Pass("m", [Datum(data[0].chunks, None)], "cross_entropy"))
    refused, failed, fine = engine.passes([*wrong, Pass("other", data, "cross_entropy")])
    assert refused.category == "user"
    assert "object" in refused.message
    assert failed.category == "server"
    assert re.fullmatch(r"\w+Error in the server, incident \w{8}: its log has more", failed.message)
    assert math.isfinite(fine.metrics["loss:sum"])
    assert any(gradient is not None for gradient in gradients(engine, "other").values())
    assert all(gradient is None for gradient in gradients(engine, "m").values())


def test_an_update_that_would_divide_0_by_0_is_refused():
    """At its first step one matrix of an adapter has no gradient, since the other one is 0."""
    for eps in (0.0, 1e-46):  # which float32 has as 0
        with pytest.raises(InvalidConfig, match=f"eps={eps}: must be at least 1.17549e-38"):
            replace(ADAM, eps=eps)
