"""vLLM beside the actor for families with recurrent layers. vLLM's kernel for the CPU computes in bfloat16 alone, so log-probs
agree within 0.05 on average, where those of other weights are further away.
"""

import pytest
import torch

from benchmarks.engine_weights import differing_weights
from helpers.engines import SAMPLED, generate, start
from helpers.shown_models import VLLM_HALF_TYPES
from rollout.responses import build_requests

pytestmark = pytest.mark.vllm


@pytest.fixture(
    scope="module",
    params=[VLLM_HALF_TYPES[0], *(pytest.param(each, marks=pytest.mark.long) for each in VLLM_HALF_TYPES[1:])],
)
def both(request, tmp_path_factory):
    return start(request.param, tmp_path_factory.mktemp(request.param), dtype="bfloat16")


def distance(setup, data):
    scored = setup.actor.log_probs(data)["old_log_probs"]
    mask = data["response_mask"].bool()
    assert mask.any(1).all()
    return float((data["rollout_log_probs"][mask] - scored[mask]).abs().mean())


def test_log_probs_are_the_actors_before_and_after_updates(both):
    data = generate(both, both.vllm, SAMPLED)
    assert distance(both, data) < 0.05
    assert differing_weights(both.vllm, both.actor.named_weights()) == []
    for _ in range(3):
        data["advantages"] = torch.randn(data["responses"].shape, generator=torch.Generator().manual_seed(0))
        both.actor.update(data, lambda outputs, rows: (-outputs.log_probs * rows["advantages"], {}))
    assert differing_weights(both.vllm, both.actor.named_weights())
    assert distance(both, data) > 0.1  # the update has moved the policy
    both.vllm.load_weights(both.actor.named_weights())
    assert differing_weights(both.vllm, both.actor.named_weights()) == []
    assert distance(both, generate(both, both.vllm, SAMPLED)) < 0.05


def test_samples_go_on_from_the_state_of_the_first_one(both):
    both.vllm.load_weights(both.actor.named_weights())  # which clears cached prefixes
    cache = both.vllm.llm.llm_engine.vllm_config.cache_config
    unit = getattr(cache, "prefix_match_unit", None) or cache.block_size  # of earlier versions
    requests = build_requests(both.prompts, SAMPLED)
    cached = {each.request: each.cached_tokens for each in both.vllm.generate(requests, SAMPLED)}
    shared = [(len(request.input_ids) - 1) // unit * unit for request in requests[:: SAMPLED.n]]
    assert [cached[place] for place in range(len(requests))] == [n for each in shared for n in (0, each, each)]
    assert unit > 16 or max(shared) >= 48
    assert distance(both, generate(both, both.vllm, SAMPLED)) < 0.05  # all from cached states
