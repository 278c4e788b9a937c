"""Many models of one base: mixed passes are each alone, gradients add up, limits hold, equal calls give equal bits."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dataproto.errors import InvalidConfig
from dataproto_server.backend import Datum, LoraSpec, Pass, PassResult, SampleRequest, Sampling, Snapshot
from dataproto_server.config import EngineOptions
from dataproto_server.engine import engine_from_json
from helpers.served_models import ADAM, BASE, chunks, engine_of, gradients, new_model, png, rows, run_pass, weights

TENANTS = {"a": (4, "cross_entropy"), "b": (8, "ppo"), "c": (8, "dro"), "d": (16, "cispo")}


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


def test_gradients_add_up_until_a_step(engine):
    for name in ("halves", "whole"):
        new_model(engine, name, seed=1)
    data = rows(engine, "cross_entropy", seed=4)
    for datum in data:
        run_pass(engine, "halves", [datum])
    run_pass(engine, "whole", data)
    for key, gradient in gradients(engine, "whole").items():
        torch.testing.assert_close(gradients(engine, "halves")[key], gradient, atol=1e-5, rtol=1e-4)
    before = {name: matrix.detach().clone() for name, matrix in engine._models["whole"].matrices.items()}
    clipped = engine.optim_step("whole", replace(ADAM, grad_clip_norm=1e-6))
    assert clipped["grad_norm"] > 1
    assert clipped["lr"] == ADAM.learning_rate
    moved = [not torch.equal(before[name], m) for name, m in engine._models["whole"].matrices.items()]
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


def test_limits_and_names(path, tmp_path):
    engine = engine_of(path, max_models=1, max_lora_rank=8, max_context_length=20)
    (model,) = engine.describe()
    assert (model.name, model.tokenizer, model.max_context_length) == ("tiny", path, 20)
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
    engine.submit(SampleRequest("r", Snapshot("tiny", tmp_path), chunks(engine, "a"), 1, Sampling(1)))
    (failed,) = engine.poll().values()
    assert failed.message.startswith("CheckpointError in the server")
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


def test_samples_are_drawn_between_the_parts_of_a_pass(path):
    """The result of the pass is the same bit for bit."""
    engine, undisturbed = engine_of(path, token_budget=10), engine_of(path, token_budget=10)
    for each in (engine, undisturbed):
        new_model(each, "m")
    data = [each for seed in range(3) for each in rows(engine, "cross_entropy", seed=seed)]
    engine.submit(SampleRequest("r", BASE, data[1].chunks, 2, Sampling(max_tokens=3, stop=[])))
    calls, finished = [], []

    def between():
        calls.append(1)
        finished.extend(engine.poll().values())

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


def test_the_program_of_the_document_runs(path, tmp_path, monkeypatch):
    document = Path(__file__).parents[2] / "docs" / "adapters.md"
    program = document.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("figure.png").write_bytes(png(40, 32))
    names = {}
    exec(program.replace("path/to/checkpoint", path).replace("max_tokens=64", "max_tokens=4"), names)
    assert [set(result.metrics) for result in names["results"]] == [{"loss:sum"}] * 2
    assert len(names["done"]["first"].samples) == 4


def test_a_new_adapter_takes_the_place_of_a_model_in_a_pass_and_leaves_it_as_it_is(engine):
    passes = [Pass(name, rows(engine, "cross_entropy", seed), "cross_entropy") for seed, name in enumerate("ab")]
    for name in "ab":
        new_model(engine, name)
    engine.passes(passes)
    expected = gradients(engine, "b")
    engine.optim_step("a", ADAM)
    engine.release("b")
    new_model(engine, "b")
    _, result = engine.passes([replace(passes[0], stand_in=("tiny", LoraSpec(4)), replayed=True), passes[1]])
    assert isinstance(result, PassResult)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(engine, "b").items())
    assert not any(gradient is not None for gradient in gradients(engine, "a").values())
