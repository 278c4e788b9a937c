"""Adapters of the actor in vLLM: the samples of merged weights, and log-probs of the actor, for dense families."""

import pytest
import torch

from benchmarks.engine_weights import differing_of_worker
from dataproto.errors import InvalidConfig
from helpers.engines import GREEDY, SAMPLED
from helpers.lora_rollouts import bytes_of, largest_difference, lora_actor, rollout_for, take
from helpers.shown_models import VLLM_TYPES
from helpers.tiny_models import MOE_TYPES, OMNI_TYPES

pytestmark = pytest.mark.vllm

OTHERS = sorted({*VLLM_TYPES} - {"qwen2_5_vl", *MOE_TYPES, *OMNI_TYPES})
FAMILIES = ["qwen2_5_vl", *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)]


@pytest.fixture(scope="module", params=FAMILIES)
def setup(request, tmp_path_factory):
    setup = lora_actor(request.param, tmp_path_factory.mktemp("adapted"))
    size = {"max_model_len": 400, "kv_cache_bytes": 1 << 26, "max_num_seqs": 16}
    setup.worker = rollout_for(setup, "vllm", image_options=setup.builder.image_options, **size)
    return setup


def test_adapters_give_the_samples_of_merged_weights_and_the_base_is_sent_once(setup):
    """Tokens are equal to those of the Hugging Face engine with merged weights, log-probs within 2e-5."""
    worker, merged = setup.worker, rollout_for(setup, lora_rank=0)
    base, adapter = bytes_of(setup.actor.base_weights()), bytes_of(setup.actor.adapter_weights())
    for sent in ({"base_weights": base, "adapter_weights": adapter}, {"adapter_weights": adapter}):
        for sampling in (SAMPLED, GREEDY):
            ours, theirs = (each.generate(setup.prompts, sampling) for each in (worker, merged))
            assert torch.equal(ours["responses"], theirs["responses"])
            torch.testing.assert_close(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=2e-5, rtol=0)
            if sampling is SAMPLED:
                assert take(worker.sent) == sent
                assert largest_difference(setup, ours) < 2e-5
        assert take(worker.sent) == {}
        setup.change()
        for each in (worker, merged):
            each.mark_stale()
    assert differing_of_worker(worker) == []
    setup.change()
    assert {name.rpartition(".")[2] for name in differing_of_worker(worker)} >= {"qkv_proj", "down_proj"}


@pytest.mark.parametrize("setup", ["qwen2_5_vl"], indirect=True)
def test_an_adapter_that_does_not_fit_is_refused_by_name(setup):
    engine = setup.worker.engine
    wide = [(name, torch.cat([each, each], int(".lora_B." in name))) for name, each in setup.actor.adapter_weights()]
    with pytest.raises(InvalidConfig, match="above the engine's lora_rank: 18 rows of A, room for 9"):
        engine.load_adapter(wide)
    name = "model.visual.blocks.0.attn.proj"
    pair = [(f"{name}.lora_A.weight", torch.zeros(3, 4)), (f"{name}.lora_B.weight", torch.zeros(4, 3))]
    with pytest.raises(InvalidConfig, match=r"no linear layer 'visual.blocks.0.attn.proj' for an adapter"):
        engine.load_adapter(pair)
    engine.load_adapter([])
    data = rollout_for(setup, lora_rank=0).generate(setup.prompts, GREEDY)  # of adapters, which this engine has no more
    setup.worker.sharding.stale = False
    assert not torch.equal(setup.worker.generate(setup.prompts, GREEDY)["rollout_log_probs"], data["rollout_log_probs"])
