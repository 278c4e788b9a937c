"""Adapters of many tenants over one frozen model: how they begin, what each step does, and that their rows go together."""

import json

import pytest
import torch

from dataproto_server.backend import Datum, LoraSpec, Pass, SampleRequest, Sampling, Snapshot
from dataproto_server.engine import InProcessEngine
from helpers.served_models import BASE, chunks, gradients, length, new_model, random_inputs, rows, run_pass, train
from rollout.adapter_layers import Route
from rollout.adapters import CONFIG_FILE
from rollout.hf.adapter_engine import AdapterDecoder
from workers.model.model_config import AdamParams


def matrices_of(engine, name: str) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in engine._models[name].matrices.items()}


def test_a_seed_gives_an_adapter_and_another_seed_another_one(engine):
    for name, seed in (("one", 1), ("again", 1), ("other", 2), ("none", None)):
        new_model(engine, name, seed=seed)
    found = {name: matrices_of(engine, name) for name in ("one", "again", "other", "none")}
    for name, value in found["one"].items():
        assert torch.equal(value, found["again"][name])
        if "lora_A" in name:
            assert not torch.equal(value, found["other"][name])
            assert not torch.equal(value, found["none"][name])
        else:
            assert not value.any()


@pytest.mark.parametrize("rank", [1, 3, 16, 64])
def test_an_adapter_of_any_rank_is_scaled_by_32_over_the_rank(engine, tmp_path, rank):
    new_model(engine, "m", rank)
    train(engine, "m", rows(engine, "cross_entropy", seed=1))
    engine.export("m", tmp_path)
    settings = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert (settings["r"], settings["lora_alpha"]) == (rank, 32)
    assert engine._models["m"].adapter.config.scaling == 32 / rank
    for name, matrix in matrices_of(engine, "m").items():
        assert matrix.shape[0 if "lora_A" in name else 1] == rank


@pytest.mark.slow
def test_each_tenant_steps_as_torch_does_with_its_own_settings(engine):
    """AdamW over its own gradients, clipped by their own norm, at steps of its own."""
    settings = {
        "clipped": AdamParams(1e-2, grad_clip_norm=1e-3, eps=1e-4),
        "decayed": AdamParams(3e-3, 0.8, 0.99, eps=1e-6, weight_decay=0.3),
        "seldom": AdamParams(1e-3, eps=1e-6, grad_clip_norm=1e6),
    }
    copies, rules = {}, {}
    for seed, (name, adam) in enumerate(settings.items()):
        new_model(engine, name, rank=2 ** (1 + seed), seed=seed)
        copies[name] = {key: torch.nn.Parameter(value) for key, value in matrices_of(engine, name).items()}
        betas = adam.beta1, adam.beta2
        rules[name] = torch.optim.AdamW(
            copies[name].values(), adam.learning_rate, betas, adam.eps, adam.weight_decay, foreach=False
        )
    for step in range(3):
        engine.passes([Pass(name, rows(engine, "cross_entropy", seed=step), "cross_entropy") for name in settings])
        for name, adam in settings.items():
            if name == "seldom" and step == 1:  # its gradients add up
                continue
            for key, gradient in gradients(engine, name).items():
                copies[name][key].grad = None if gradient is None else gradient.clone()
            if adam.grad_clip_norm:
                norm = torch.nn.utils.clip_grad_norm_(copies[name].values(), adam.grad_clip_norm)
                assert (norm > adam.grad_clip_norm) == (name == "clipped")
            rules[name].step()
            engine.optim_step(name, adam)
    for name, expected in copies.items():
        for key, value in matrices_of(engine, name).items():
            torch.testing.assert_close(value, expected[key].detach(), atol=1e-6, rtol=1e-5)


def test_the_rows_of_all_tenants_are_one_pass_over_the_base_in_the_order_of_their_adapters(engine, monkeypatch):
    names, trainer = ("a", "b", "c", "d"), engine.base("tiny").trainer
    for rank, name in enumerate(names, start=1):
        new_model(engine, name, rank)
    decode, routed = trainer.packed.decode, trainer.router.routed
    calls, routes = [], []
    monkeypatch.setattr(trainer.packed, "decode", lambda *given: calls.append(1) or decode(*given))
    monkeypatch.setattr(trainer.router, "routed", lambda runs: routes.append(Route.of(runs)) or routed(runs))
    passes = [
        Pass(name, rows(engine, "cross_entropy", seed=seed), "cross_entropy") for seed in (1, 2) for name in names
    ]
    engine.passes(passes)
    assert len(calls) == 1
    assert [adapter for adapter, _ in routes[0].runs] == [engine._models[name].adapter for name in names]
    assert sum(size for _, size in routes[0].runs) <= sum(
        length(engine, datum.chunks) for each in passes for datum in each.data
    )


def test_samples_of_any_adapters_and_of_the_base_are_decoded_together(engine, tmp_path, monkeypatch):
    prompt = chunks(engine, "see", (24, 16))
    for name, rank in (("small", 2), ("large", 8)):
        new_model(engine, name, rank)
        (tmp_path / name).mkdir()
        engine.export(name, tmp_path / name)
    snapshots = {name: Snapshot("tiny", tmp_path / name) for name in ("small", "large")} | {"base": BASE}
    decoded, advance = [], AdapterDecoder.advance
    monkeypatch.setattr(
        AdapterDecoder,
        "advance",
        lambda self, batch, tokens: decoded.append(len(batch.rows)) or advance(self, batch, tokens),
    )
    for name in ("small", "base", "large"):
        engine.submit(SampleRequest(name, snapshots[name], prompt, 2, Sampling(max_tokens=5, seed=1, stop=[])))
    done = {}
    while len(done) < 3:
        done |= engine.poll()
    assert decoded == [6] * 4  # the first tokens come with the prompts
    engine.forget()


def test_names_of_one_checkpoint_share_its_frozen_weights(path):
    engine = InProcessEngine({"one": path, "other": path}, device=torch.device("cpu"))
    base = engine.base("one")
    assert engine.base("other") is base
    model = base.trainer.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    sampled = dict(base.sampler.model.named_parameters())
    shared = [name for name, each in model.named_parameters() if name in sampled]
    assert shared
    assert all(sampled[name].data_ptr() == model.get_parameter(name).data_ptr() for name in shared)
    prompt = chunks(engine, "see", (24, 16), name="one")
    data = [Datum(prompt, random_inputs(length(engine, prompt, name="one"), "cross_entropy"))]
    for name in ("one", "other"):
        engine.create(name, name, LoraSpec(4))
        run_pass(engine, name, data)
        engine.optim_step(name, AdamParams(1e-2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
