"""vLLM decides which tokens are computed when; that must not change what is sampled."""

import pytest
import torch

from helpers.engines import generate, start
from rollout.engine import SamplingParams

pytestmark = pytest.mark.vllm


def test_prompts_read_in_parts_and_requests_put_off_sample_the_same(tmp_path, monkeypatch):
    """Steps shorter than a prompt, and a KV cache too small for all: vLLM throws tokens away and computes some again."""
    setup = start("qwen2_5_vl", tmp_path, kv_cache_bytes=1 << 19, max_num_batched_tokens=48)
    scheduler = setup.vllm.engine.engine_core.engine_core.scheduler
    put_off, put_one_off = [], scheduler._preempt_request

    def record(request, *rest, **options):
        put_off.append(request.num_tokens - request.num_prompt_tokens)
        return put_one_off(request, *rest, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", record)
    sampling = SamplingParams(n=8, temperature=0.8, max_tokens=60, seed=1)
    ours, theirs = (generate(setup, engine, sampling) for engine in (setup.vllm, setup.hf))
    assert int(setup.prompts["attention_mask"].sum(1).max()) > 48
    assert max(put_off) > 0
    assert torch.equal(ours["responses"], theirs["responses"])
    torch.testing.assert_close(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=2e-5, rtol=0)
