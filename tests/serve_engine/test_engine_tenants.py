"""Many models of one base: mixed passes are each alone, mistakes stay with their pass, checkpoints continue bit for bit."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from dataproto.chunks import EncodedTextChunk
from dataproto.errors import CheckpointError, InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.served_models import ADAM, chunks, length, new_model, png, random_inputs, run_pass, sample, train
from recipes.algorithms.datum_losses import DATUM_LOSSES
from recipes.serve.backend import OPTIMIZER_FILE, Datum, Failure, LoraSpec, Pass, SampleRequest, Sampling, SparseRows
from recipes.serve.engine import EngineOptions, InProcessEngine, engine_from_json, samplers
from recipes.serve.link import failure_of
from recipes.serve.link.engine_process import EngineProcess
from rollout.adapters import read_adapter
from rollout.adapters.adapter_files import WEIGHTS_FILE
from workers.adapters import adapter_trainer

CPU = torch.device("cpu")
DTYPES = {"target_tokens": np.int64, "weights": np.float32}
TENANTS = {"a": (4, "cross_entropy"), "b": (8, "ppo"), "c": (8, "dro"), "d": (16, "cispo")}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def engine_of(path, **options):
    return InProcessEngine({"tiny": path}, EngineOptions(**options) if options else None, device=CPU)


@pytest.fixture(scope="module")
def shared(path):
    return engine_of(path)


@pytest.fixture
def engine(shared):
    """An engine without models."""
    yield shared
    for name in list(shared._models):
        shared.release(name)


def rows(engine, loss, seed):
    """Two rows of unequal length, one with two images."""
    prompts = [chunks(engine, "see", (24, 16), "angle", (16, 16)), chunks(engine, f"Find the angle {seed}")]
    return [
        Datum(prompt, random_inputs(length(engine, prompt), loss, seed=10 * seed + number))
        for number, prompt in enumerate(prompts)
    ]


def weights(engine, model, directory):
    directory.mkdir()
    engine.export(model, directory)
    return load_file(directory / WEIGHTS_FILE)


def gradients(engine, model):
    return {name: matrix.grad for name, matrix in engine._models[model].trained.matrices.items()}


@pytest.mark.slow
@pytest.mark.parametrize("token_budget", [16_384, 60])
def test_tenants_together_are_each_alone(path, token_budget, tmp_path):
    """Ranks 4, 8, 8, 16 and four losses: log-probs, losses and gradients within 1e-5 at every step."""
    together, alone = engine_of(path, token_budget=token_budget), engine_of(path)
    for engine in (together, alone):
        for seed, (name, (rank, _)) in enumerate(TENANTS.items()):
            new_model(engine, name, rank, seed=seed)
    adam = replace(ADAM, eps=1e-6)  # at 1e-12 the first steps would be as large for rounding errors as for gradients
    for step in range(3):
        passes = [
            Pass(name, rows(together, loss, seed=4 * step + number), loss)
            for number, (name, (_, loss)) in enumerate(TENANTS.items())
        ]
        mixed, single = together.passes(passes), [alone.passes([each])[0] for each in passes]
        for one, other in zip(mixed, single, strict=True):
            assert one.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], abs=1e-4)
            for mine, theirs in zip(one.outputs, other.outputs, strict=True):
                np.testing.assert_allclose(mine["logprobs"], theirs["logprobs"], atol=1e-5, rtol=0)
        for name in TENANTS:
            for key, gradient in gradients(together, name).items():
                torch.testing.assert_close(gradient, gradients(alone, name)[key], atol=1e-5, rtol=1e-4)
            norms = [engine.optim_step(name, adam)["grad_norm"] for engine in (together, alone)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-4)
            assert norms[0] > 0
    for name in TENANTS:
        found, expected = weights(together, name, tmp_path / f"t{name}"), weights(alone, name, tmp_path / f"a{name}")
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=0)


def test_equal_calls_give_equal_bits(path, tmp_path):
    found = []
    for number in range(2):
        engine = engine_of(path)
        for name, (rank, _) in TENANTS.items():
            new_model(engine, name, rank, seed=3)
        for step in range(2):
            engine.passes([Pass(name, rows(engine, loss, step), loss) for name, (_, loss) in TENANTS.items()])
            for name in TENANTS:
                engine.optim_step(name, ADAM)
        found.append([weights(engine, name, tmp_path / f"{name}{number}") for name in TENANTS])
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


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


def test_gradients_add_up_until_a_step(engine):
    for name in ("halves", "whole"):
        new_model(engine, name, seed=1)
    data = rows(engine, "cross_entropy", seed=4)
    for datum in data:
        run_pass(engine, "halves", [datum])
    run_pass(engine, "whole", data)
    for key, gradient in gradients(engine, "whole").items():
        torch.testing.assert_close(gradients(engine, "halves")[key], gradient, atol=1e-5, rtol=1e-4)
    before = {name: matrix.detach().clone() for name, matrix in engine._models["whole"].trained.matrices.items()}
    clipped = engine.optim_step("whole", replace(ADAM, grad_clip_norm=1e-6))
    assert clipped["grad_norm"] > 1
    assert clipped["lr"] == ADAM.learning_rate
    moved = [not torch.equal(before[name], m) for name, m in engine._models["whole"].trained.matrices.items()]
    assert any(moved)
    assert engine.optim_step("whole", ADAM)["grad_norm"] == 0  # no gradients are left


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"attn"}),
        ({"train_attn": False}, {"mlp", "head"}),
        ({"train_attn": False, "train_mlp": False}, {"head"}),
    ],
)
def test_only_the_chosen_layers_are_trained(engine, spec, kinds):
    new_model(engine, "m", **spec)
    run_pass(engine, "m", rows(engine, "cross_entropy", seed=1))
    found = gradients(engine, "m")
    assert {"head" if "lm_head" in key else "attn" if "attn" in key else "mlp" for key in found} == kinds
    assert all(gradient.abs().sum() > 0 for key, gradient in found.items() if "lora_B" in key)


WRONG = [
    ("gspo", {}, {}, "loss 'gspo' has no public formula"),
    ("stable_reinforce", {}, {}, "'stable_reinforce' has no public formula"),
    ("hinge", {}, {}, "'hinge' is unknown: choose one of cross_entropy"),
    ("dro", {"kl_coeff": 1.0}, {}, "has no option 'kl_coeff': it has beta"),
    ("dro", {"beta": "much"}, {}, "beta='much' is not a finite number"),
    ("ppo", {"clip_low_threshold": 2.0}, {}, "must be 0 <= low <= high"),
    (
        "ppo",
        {},
        {"sequence_ratio_mask": np.ones(6, np.float32)},
        "['sequence_ratio_mask'] is not read by the loss 'ppo'",
    ),
    ("ppo", {}, {"advantages": None}, "lack 'advantages'"),
    ("ppo", {}, {"advantages": np.full(6, np.nan, np.float32)}, "['advantages'][0] is not finite"),
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
        {"weights": SparseRows(np.ones(1, np.float32), np.array([0, 1]), np.array([9]), (6, 2**40))},
        "the pass has room for 16777210 more targets (--max-targets)",
    ),
    (
        "cross_entropy",
        {},
        {"weights": SparseRows(np.ones(1, np.float32), np.array([0] * 6 + [1]), np.array([9]), (6, 3))},
        "its indices are out of range",
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
    next(iter(engine._models["m"].trained.matrices.values())).data.fill_(math.inf)
    data = rows(engine, "cross_entropy", seed=1)
    failed, fine = engine.passes([Pass("m", data, "cross_entropy"), Pass("other", data, "cross_entropy")])
    assert "logits of the model are not finite" in failed.message
    assert math.isfinite(fine.metrics["loss:sum"])


def test_a_pass_that_cannot_be_computed_is_the_servers_fault(engine, monkeypatch):
    for name in ("m", "other"):
        new_model(engine, name)
    data, trainer = rows(engine, "cross_entropy", seed=1), engine.base("tiny").trainer
    mine, compute = engine._models["m"].trained.adapter, trainer.log_probs

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


def test_saved_and_loaded_is_uninterrupted_bit_for_bit(path, tmp_path):
    whole, parts = engine_of(path), engine_of(path)
    for engine in (whole, parts):
        new_model(engine, "m", 8, seed=2)
        train(engine, "m", rows(engine, "cross_entropy", seed=1), steps=2)
    (tmp_path / "saved").mkdir()
    parts.save("m", tmp_path / "saved")
    later = engine_of(path)
    new_model(later, "m", 8, seed=9)
    run_pass(later, "m", rows(later, "cross_entropy", seed=3))  # gradients that loading drops
    later.load("m", tmp_path / "saved", optimizer=True)
    for engine in (whole, later):
        train(engine, "m", rows(engine, "cross_entropy", seed=2), steps=2)
    expected, found = weights(whole, "m", tmp_path / "a"), weights(later, "m", tmp_path / "b")
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    later.load("m", tmp_path / "saved", optimizer=False)
    train(later, "m", rows(later, "cross_entropy", seed=2), steps=2)
    fresh = weights(later, "m", tmp_path / "c")
    assert not all(torch.equal(fresh[key], value) for key, value in expected.items())


def test_a_checkpoint_of_another_kind_is_refused_and_changes_nothing(engine, tmp_path):
    new_model(engine, "m", 8)
    train(engine, "m", rows(engine, "cross_entropy", seed=1))
    (tmp_path / "saved").mkdir()
    engine.save("m", tmp_path / "saved")
    new_model(engine, "smaller", 4)
    with pytest.raises(CheckpointError, match=r"rank=8.*not of.*rank=4"):
        engine.load("smaller", tmp_path / "saved", optimizer=True)
    before = weights(engine, "m", tmp_path / "before")
    content = (tmp_path / "saved" / OPTIMIZER_FILE).read_bytes()
    (tmp_path / "saved" / OPTIMIZER_FILE).write_bytes(content[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=f"{OPTIMIZER_FILE} is damaged"):
        engine.load("m", tmp_path / "saved", optimizer=True)
    (tmp_path / "saved" / OPTIMIZER_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {OPTIMIZER_FILE}"):
        engine.load("m", tmp_path / "saved", optimizer=True)
    after = weights(engine, "m", tmp_path / "after")
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_weights_that_are_not_finite_are_not_saved(engine, tmp_path):
    """After a step with a huge learning rate. The message names the model, and the fault is the client's."""
    new_model(engine, "m", 8)
    run_pass(engine, "m", rows(engine, "cross_entropy", seed=1))
    engine.optim_step("m", replace(ADAM, learning_rate=1e39))
    for write in (engine.save, engine.export):
        with pytest.raises(CheckpointError, match=r"model 'm': .*lora_\w\.weight is not finite") as caught:
            write("m", tmp_path)
        assert failure_of(caught.value).category == "user"
    assert not list(tmp_path.iterdir())


def test_a_snapshot_does_not_follow_its_model(path, tmp_path):
    engine = engine_of(path, max_samplers=1)
    new_model(engine, "m", 8)
    prompt = chunks(engine, "see", (24, 16))
    data = rows(engine, "cross_entropy", seed=1)
    found = []
    for step in range(2):
        train(engine, "m", data)
        (tmp_path / str(step)).mkdir()
        engine.export("m", tmp_path / str(step))
        engine.open_sampler(str(step), "tiny", tmp_path / str(step))
        found.append(sample(engine, str(step), prompt, prompt_logprobs=True).prompt_logprobs[1:])
    assert not np.allclose(found[0], found[1], atol=1e-3)
    again = sample(engine, "0", prompt, prompt_logprobs=True).prompt_logprobs[1:]  # read from its files again
    np.testing.assert_array_equal(again, found[0])


def test_a_sampler_of_a_snapshot_that_was_just_written_reads_no_file(path, tmp_path, monkeypatch):
    """Wherever its directory has moved; a file that has changed since is read, and refused."""
    engine = engine_of(path)
    new_model(engine, "m")
    data = rows(engine, "cross_entropy", seed=1)
    train(engine, "m", data)
    (tmp_path / "new").mkdir()
    engine.export("m", tmp_path / "new", sampled=True)
    (tmp_path / "new").rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    read = []
    monkeypatch.setattr(samplers, "read_adapter", lambda *given: read.append(given[0]) or read_adapter(*given))
    train(engine, "m", data)  # the snapshot stays as it was
    for number, name in enumerate(("old", "copy")):
        engine.open_sampler(name, "tiny", tmp_path / name)
        assert len(read) == number
    one, other = (sample(engine, name, data[0].chunks) for name in ("old", "copy"))
    assert (one.samples[0].logprobs == other.samples[0].logprobs).all()
    (tmp_path / "new").mkdir()
    engine.export("m", tmp_path / "new", sampled=True)
    file = tmp_path / "new" / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="is damaged"):
        engine.open_sampler("damaged", "tiny", tmp_path / "new")


def test_written_weights_are_kept_for_samplers_alone_within_their_number_and_until_a_reset(path, tmp_path):
    engine = engine_of(path, max_samplers=2)
    process = EngineProcess(engine, tmp_path / "socket")
    process.listener.close()

    def call(method, **arguments):
        return process._called(None, method, arguments)

    def export(model, name, **options):
        (tmp_path / name).mkdir()
        call("export", model_id=model, directory=tmp_path / name, **options)

    for name in "abc":
        call("create", model_id=name, base_model="tiny", lora=LoraSpec(4, seed=0))
    kept = engine._samplers._adapters
    export("a", "named")
    assert not kept
    for name in ("first", "second"):  # of one model
        export("a", name, sampled=True)
    assert len(kept) == 1
    call("open_sampler", sampler_id="s", base_model="tiny", adapter=tmp_path / "second")
    assert list(kept) == ["s"]
    for name in "bc":
        export(name, name, sampled=True)
    assert [getattr(key, "model_id", key) for key in kept] == ["b", "c"]
    call("reset")
    assert not kept


def test_limits_and_names(path, tmp_path):
    engine = engine_of(path, max_models=1, max_lora_rank=8, max_context_length=20)
    (model,) = engine.describe().models
    assert (model.name, model.tokenizer, model.max_context_length, model.max_lora_rank) == ("tiny", path, 20, 8)
    assert "cispo" in engine.describe().losses
    for spec, name, message in (
        (None, "tiny", "full_finetuning"),
        (LoraSpec(9), "tiny", "rank=9: must be from 1 to max_lora_rank=8"),
        (LoraSpec(4), "huge", "base model 'huge' is unknown: choose one of tiny"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            engine.create("m", name, spec)
    new_model(engine, "m")
    for name, message in (("m", "exists already"), ("n", "1 models are trained already")):
        with pytest.raises(InvalidConfig, match=message):
            new_model(engine, name)
    (failed,) = engine.passes([Pass("m", [Datum(chunks(engine, "a" * 21), {})], "cross_entropy")])
    assert "row 0: 21 tokens exceed the model's context of 20 tokens" in failed.message
    engine.release("m")
    engine.release("m")
    with pytest.raises(InvalidConfig, match="model 'm' is unknown"):
        engine.optim_step("m", ADAM)
    with pytest.raises(CheckpointError, match="lacks adapter_model"):
        engine.open_sampler("s", "tiny", tmp_path)
    with pytest.raises(InvalidConfig, match="max_models=0"):
        EngineOptions(max_models=0)


def test_no_limit_applies_to_what_is_replayed(path):
    """A model is made at full slots, of any rank, and a pass is computed whatever its length and number of targets.

    A pass beside it that has not been computed before is refused.
    """
    engine = engine_of(path, max_models=1, max_lora_rank=4, max_context_length=3, max_targets=5)
    engine.create("early", "tiny", LoraSpec(8), replayed=True)
    engine.create("late", "tiny", LoraSpec(8), replayed=True)
    new = Pass("late", rows(engine, "cross_entropy", seed=1), "cross_entropy")
    failed, fine = engine.passes([new, replace(new, replayed=True)])
    assert "exceed the model's context of 3 tokens" in failed.message
    assert math.isfinite(fine.metrics["loss:sum"])
    with pytest.raises(InvalidConfig, match=r"2 models are trained already.*--max-models"):
        new_model(engine, "n")


def test_gradients_are_added_without_memory(engine):
    """An operation that makes a new tensor fails, as all do when memory is full; so no part of a pass can be left behind."""

    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            if any(each.alias_info is None for each in operation._schema.returns):
                raise torch.OutOfMemoryError(str(operation))
            return operation(*arguments, **(options or {}))

    new_model(engine, "m")
    trained = engine._models["m"].trained
    ones = [[torch.ones_like(matrix) for matrix in trained.matrices.values()] for _ in range(2)]
    with Full():
        for each in ones:
            trained.add_gradients([None, *each[1:]])
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


def test_samples_are_drawn_between_the_parts_of_a_pass(path):
    """The result of the pass is the same bit for bit."""
    engine, undisturbed = engine_of(path, token_budget=10), engine_of(path, token_budget=10)
    for each in (engine, undisturbed):
        new_model(each, "m")
    data = [each for seed in range(3) for each in rows(engine, "cross_entropy", seed=seed)]
    engine.open_sampler("base", "tiny", None)
    engine.submit(SampleRequest("r", "base", data[1].chunks, 2, Sampling(max_tokens=3, stop=[])))
    calls, finished = [], []

    def between():
        calls.append(1)
        finished.extend(engine.poll())

    (found,) = engine.passes([Pass("m", data, "cross_entropy")], between=between)
    (expected,) = undisturbed.passes([Pass("m", data, "cross_entropy")])
    assert len(calls) == len(data) - 1  # each row is longer than the budget, and a part of its own
    assert [len(each.tokens) for each in finished[0].samples] == [3, 3]
    assert found.metrics == expected.metrics
    for name, gradient in gradients(engine, "m").items():
        other = gradients(undisturbed, "m")[name]
        assert (gradient is None and other is None) or torch.equal(gradient, other)


def test_a_process_gets_its_engine_from_json(path):
    engine = engine_from_json(json.dumps({"models": {"tiny": path, "a/hub": None}, "max_models": 3}))
    assert engine.paths == {"tiny": path, "a/hub": "a/hub"}
    assert engine.options == EngineOptions(max_models=3)
    for text, message in (("[]", "cannot be read"), ('{"models": {}, "speed": 1}', "speed"), ("{}", "models")):
        with pytest.raises(InvalidConfig, match=message):
            engine_from_json(text)


def test_the_program_of_the_document_runs(path, tmp_path, monkeypatch):
    document = Path(__file__).parents[2] / "docs" / "adapters.md"
    program = document.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("figure.png").write_bytes(png(40, 32))
    names = {}
    exec(program.replace("path/to/checkpoint", path).replace("max_tokens=64", "max_tokens=4"), names)
    assert [set(result.metrics) for result in names["results"]] == [{"loss:sum"}] * 2
    assert len(names["done"][0].samples) == 4
