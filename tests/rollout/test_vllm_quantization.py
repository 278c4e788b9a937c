"""Weights in 8 bits in vLLM: what the hand-over gives, in bfloat16 on a CPU."""

import pytest
import torch

from benchmarks.engine_weights import differing_weights
from dataproto.errors import InvalidConfig
from helpers.engines import SAMPLED, generate, start
from rollout.engine import create_engine
from rollout.hf import HFEngine

pytestmark = [pytest.mark.vllm, pytest.mark.long]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """vLLM begins with weights of its own, and gets the actor's."""
    path = tmp_path_factory.mktemp("fp8")
    setup = start("qwen2_5_vl", path, quantization="fp8", dtype="bfloat16")
    setup.published = HFEngine(str(path / "engine"), dtype="bfloat16", device=torch.device("cpu"))
    setup.hf = HFEngine(str(path / "actor"), dtype="bfloat16", device=torch.device("cpu"))
    return setup


def weights_of(engine):
    return list(engine.model.named_parameters())


def test_weights_are_quantised_again_at_each_hand_over(setup):
    setup.vllm.load_weights(weights_of(setup.published))
    first = generate(setup, setup.vllm, SAMPLED)
    setup.vllm.load_weights(weights_of(setup.hf))
    between = generate(setup, setup.vllm, SAMPLED)
    assert not torch.equal(first["responses"], between["responses"])
    assert differing_weights(setup.vllm, weights_of(setup.hf)) == []
    setup.vllm.load_weights(weights_of(setup.published))
    again = generate(setup, setup.vllm, SAMPLED)
    assert torch.equal(again["responses"], first["responses"])
    assert torch.equal(again["rollout_log_probs"], first["rollout_log_probs"])
    assert differing_weights(setup.vllm, weights_of(setup.published)) == []


def test_weights_that_differ_by_more_than_rounding_are_named(setup):
    setup.vllm.load_weights(weights_of(setup.hf))
    changed = {name: weight.clone() for name, weight in weights_of(setup.hf)}
    changed["model.language_model.layers.1.self_attn.k_proj.weight"][3] *= 1.2
    assert differing_weights(setup.vllm, changed.items()) == ["language_model.model.layers.1.self_attn.qkv_proj.weight"]


def test_log_probs_are_near_those_of_the_policy_and_not_equal(setup):
    setup.vllm.load_weights(weights_of(setup.hf))
    data = generate(setup, setup.vllm, SAMPLED)
    actor = setup.actor.log_probs(data)["old_log_probs"]
    mask = data["response_mask"].bool()
    difference = (actor - data["rollout_log_probs"])[mask].abs().mean()
    assert 1e-3 < difference < 0.1


def test_the_tower_keeps_its_precision(setup):
    named = setup.vllm.llm.collective_rpc(lambda w: [(n, each.dtype) for n, each in w.get_model().named_parameters()])[
        0
    ]
    in_8_bits = {name for name, dtype in named if dtype == torch.float8_e4m3fn}
    assert any(name.endswith("qkv_proj.weight") for name in in_8_bits)
    assert not any(name.startswith("visual") for name in in_8_bits)


def test_an_unknown_quantisation_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="quantization='int3': choose one of"):
        create_engine("vllm", str(tmp_path), quantization="int3")
