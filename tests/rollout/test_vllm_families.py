"""vLLM's tokens and log-probs for every family: those of the Hugging Face engine and of the actor, before and after updates."""

import pytest
import torch

from helpers.engines import GREEDY, RESTRICTED, SAMPLED, generate, start

pytestmark = pytest.mark.vllm

FAMILIES = ("qwen3_vl_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # vLLM keeps the groups of the first in a process


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return start(request.param, tmp_path_factory.mktemp(request.param))


def assert_same_as_actor(setup, sampling):
    data = generate(setup, setup.vllm, sampling)
    scored = setup.actor.log_probs(data)["old_log_probs"]
    mask = data["response_mask"].bool()
    assert mask.any(1).all()
    torch.testing.assert_close(data["rollout_log_probs"][mask], scored[mask], atol=1e-4, rtol=0)
    return data


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, RESTRICTED], ids=["greedy", "sampled", "restricted"])
def test_tokens_are_those_of_the_hf_engine(family, sampling):
    ours, theirs = (generate(family, engine, sampling) for engine in (family.vllm, family.hf))
    assert torch.equal(ours["responses"], theirs["responses"])
    assert torch.equal(ours["response_mask"], theirs["response_mask"])
    torch.testing.assert_close(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=2e-5, rtol=0)


def test_log_probs_are_the_actors_before_and_after_updates(family):
    assert_same_as_actor(family, RESTRICTED)
    assert family.vllm.differing_weights(family.actor.named_weights()) == []
    data = assert_same_as_actor(family, SAMPLED)
    for _ in range(3):
        data["advantages"] = torch.randn(data["responses"].shape, generator=torch.Generator().manual_seed(0))
        family.actor.update(data, lambda outputs, rows: (-outputs.log_probs * rows["advantages"], {}))
        old = set(family.vllm.differing_weights(family.actor.named_weights()))
        assert any("visual" in name for name in old)
        assert any("layers.0" in name for name in old)
        family.vllm.load_weights(family.actor.named_weights())
        assert family.vllm.differing_weights(family.actor.named_weights()) == []
        data = assert_same_as_actor(family, SAMPLED)  # the same images: nothing old may come out of a cache
    family.vllm.load_weights(family.hf.model.named_parameters())
