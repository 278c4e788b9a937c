"""vLLM beside the actor for families with sliding windows and images whose tokens see each other."""

from dataclasses import replace

import pytest
import torch

from benchmarks.engine_weights import differing_weights
from dataproto.errors import InvalidPrompt
from helpers.engines import GREEDY, SAMPLED, generate, start
from helpers.shown_models import VLLM_WINDOWED_TYPES
from helpers.tiny_models import WINDOW
from helpers.whole_images import READ_WHOLE, with_whole_images
from rollout.responses import build_requests
from rollout.vllm.prompt_rendering import longest_image, longest_run

pytestmark = [pytest.mark.vllm, pytest.mark.long]

WORDS = [{"prompt": "no picture", "images": []}, {"prompt": "longer than a window of tokens is", "images": []}]


@pytest.fixture(scope="module", params=VLLM_WINDOWED_TYPES)
def both(request, tmp_path_factory):
    setup = start(request.param, tmp_path_factory.mktemp(request.param), **READ_WHOLE)
    mutual = setup.builder.family.mutual_images(setup.builder.config) is not None
    assert setup.vllm.prompts.longest_image == (0 if mutual else None)  # on a CPU, whose kernels are causal
    with_whole_images(setup.vllm)
    return setup


def assert_same_as_actor(both, sampling, prompts=None):
    data = generate(both, both.vllm, sampling, both.builder(WORDS) if prompts is None else prompts)
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
    assert differing_weights(both.vllm, both.actor.named_weights())
    both.vllm.load_weights(both.actor.named_weights())
    assert differing_weights(both.vllm, both.actor.named_weights()) == []
    assert_same_as_actor(both, replace(SAMPLED, max_tokens=12))


def test_samples_of_prompts_with_images_are_those_of_the_hf_engine_and_the_actor(both):
    """Images of Gemma 4 are longer than the window."""
    longest = max(map(longest_run, both.prompts["mm_token_type_ids"]))
    assert longest == 4 if both.builder.family.model_type == "gemma3" else longest > WINDOW
    for engine in (both.hf, both.vllm):
        engine.load_weights(both.actor.named_weights())
    for sampling in (GREEDY, SAMPLED):
        ours, theirs = (generate(both, engine, sampling) for engine in (both.vllm, both.hf))
        assert torch.equal(ours["responses"], theirs["responses"])
    assert_same_as_actor(both, SAMPLED, both.prompts)


def test_images_that_vllm_would_read_causally_are_refused_elsewhere(both):
    """On a GPU, for models whose windows vLLM does not keep within images."""
    keeps = both.builder.family.model_type != "gemma3"
    assert both.vllm.llm.collective_rpc(longest_image) == [None if keeps else WINDOW]
    limited = replace(both.vllm.prompts, longest_image=3, last=[])
    with pytest.raises(InvalidPrompt, match=r"row 0: an image of \d+ tokens, of more than 3: .*use the hf engine"):
        limited.render(build_requests(both.prompts, GREEDY)[0], GREEDY, "row 0")
    limited.render(build_requests(both.builder(WORDS), GREEDY)[0], GREEDY, "row 0")
