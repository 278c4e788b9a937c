"""vLLM beside the actor for families with recurrent layers. vLLM's kernel for the CPU computes in bfloat16 alone, so log-probs
agree within 0.05 on average, where those of other weights are further away.
"""

import pytest
import torch

from helpers.engines import SAMPLED, generate, start
from rollout.engine import Request
from rollout.responses import build_requests
from rollout.vllm.engine_requests import first_samples_first

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return start("qwen3_5", tmp_path_factory.mktemp("qwen3_5"), dtype="bfloat16")


def distance(setup, data):
    scored = setup.actor.log_probs(data)["old_log_probs"]
    mask = data["response_mask"].bool()
    assert mask.any(1).all()
    return float((data["rollout_log_probs"][mask] - scored[mask]).abs().mean())


def test_log_probs_are_the_actors_before_and_after_updates(both):
    data = generate(both, both.vllm, SAMPLED)
    assert distance(both, data) < 0.05
    assert both.vllm.differing_weights(both.actor.named_weights()) == []
    for _ in range(3):
        data["advantages"] = torch.randn(data["responses"].shape, generator=torch.Generator().manual_seed(0))
        both.actor.update(data, lambda outputs, rows: (-outputs.log_probs * rows["advantages"], {}))
    assert both.vllm.differing_weights(both.actor.named_weights())
    assert distance(both, data) > 0.1  # the update has moved the policy
    both.vllm.load_weights(both.actor.named_weights())
    assert both.vllm.differing_weights(both.actor.named_weights()) == []
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


def test_the_first_samples_of_prompts_come_first():
    prompts = [torch.tensor([1]), torch.tensor([2]), torch.tensor([3])]
    requests = [Request((), each, each, each) for each in prompts for _ in range(3)]
    assert first_samples_first(requests, 100) == [0, 3, 6, 1, 2, 4, 5, 7, 8]
    assert first_samples_first(requests, 6) == [0, 3, 1, 2, 4, 5, 6, 7, 8]
    assert first_samples_first(requests, 1) == list(range(9))


def test_requests_with_images_stay_in_the_order_of_prompts():
    """Prompts 1 and 3 have an image; vLLM gets the images as they were rendered: 1, 1, 1, 3, 3, 3."""
    prompts = [torch.tensor([number]) for number in range(5)]
    media = [{"image": [object()]} if number in (1, 3) else {} for number in range(5)]
    requests = [
        Request((), each, each, each, multi_modal_data=shown) for each, shown in zip(prompts, media) for _ in range(3)
    ]
    assert first_samples_first(requests, 100) == [0, 3, 4, 5, 6, 9, 10, 11, 12, 1, 2, 7, 8, 13, 14]
    for window in range(1, 16):
        order = first_samples_first(requests, window)
        assert sorted(order) == list(range(15))
        assert [place for place in order if requests[place].multi_modal_data] == [3, 4, 5, 9, 10, 11]
