"""vLLM beside the actor for families with sliding windows and images whose tokens see each other."""

from dataclasses import replace

import pytest
import torch

from dataproto.errors import InvalidPrompt
from helpers.engines import GREEDY, SAMPLED, generate, start
from helpers.shown_models import VLLM_TEXT_TYPES

pytestmark = [pytest.mark.vllm, pytest.mark.long]

WORDS = [{"prompt": "no picture", "images": []}, {"prompt": "longer than a window of tokens is", "images": []}]


@pytest.fixture(scope="module", params=VLLM_TEXT_TYPES)
def both(request, tmp_path_factory):
    return start(request.param, tmp_path_factory.mktemp(request.param))


def assert_same_as_actor(both, sampling):
    data = generate(both, both.vllm, sampling, both.builder(WORDS))
    scored = both.actor.log_probs(data)["old_log_probs"]
    mask = data["response_mask"].bool()
    assert mask.any(1).all()
    torch.testing.assert_close(data["rollout_log_probs"][mask], scored[mask], atol=1e-4, rtol=0)
    return data


def test_log_probs_of_text_are_the_actors_before_and_after_updates(both):
    data = assert_same_as_actor(both, replace(SAMPLED, max_tokens=12))
    data["advantages"] = torch.randn(data["responses"].shape, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        both.actor.update(data, lambda outputs, rows: (-outputs.log_probs * rows["advantages"], {}))
    assert both.vllm.differing_weights(both.actor.named_weights())
    both.vllm.load_weights(both.actor.named_weights())
    assert both.vllm.differing_weights(both.actor.named_weights()) == []
    assert_same_as_actor(both, replace(SAMPLED, max_tokens=12))
    both.vllm.load_weights(both.hf.model.named_parameters())


def test_images_are_refused_on_a_cpu(both):
    with pytest.raises(InvalidPrompt, match=r"row 0 .*causal attention within images.*use the hf engine, or a GPU"):
        generate(both, both.vllm, GREEDY)
    assert generate(both, both.hf, GREEDY)["response_mask"].any(1).all()
