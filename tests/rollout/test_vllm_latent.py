"""vLLM beside the actor for latent attention, where its own model differs from Hugging Face's."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.engine_weights import differing_weights
from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers import checkpoints
from helpers.engines import SAMPLED, generate, start
from helpers.tiny_prompts import tiny_prompt_config
from rollout.vllm import process_settings, startup

pytestmark = pytest.mark.vllm

FAMILY = family_of("kimi_k25")


def config_with(rope):
    """A config whose norms have another epsilon than those of the latents, which is fixed in Hugging Face's model."""
    config = tiny_prompt_config("kimi_k25")
    config.text_config.rms_norm_eps = 1e-2
    if rope == "plain":
        config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return config


@pytest.mark.long
@pytest.mark.parametrize("rope", ["plain", "yarn"])
def test_log_probs_are_the_actors_with_other_norms_angles_and_corrected_scores(rope, tmp_path):
    """By what scores experts are chosen is in no config that transformers writes."""
    with mock.patch.object(checkpoints, "tiny_prompt_config", return_value=config_with(rope)):
        both = start("kimi_k25", tmp_path)
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in both.actor.module.model.state_dict().items():
            if ".language_model.layers." in name:
                weight.add_(torch.randn(weight.shape, generator=drawn) * 0.1)
    both.vllm.load_weights(both.actor.named_weights())
    assert differing_weights(both.vllm, both.actor.named_weights()) == []
    data = generate(both, both.vllm, SAMPLED)
    scored, mask = both.actor.log_probs(data)["old_log_probs"], data["response_mask"].bool()
    torch.testing.assert_close(data["rollout_log_probs"][mask], scored[mask], atol=1e-4, rtol=0)


def test_a_version_without_the_image_processor_is_refused():
    with (
        mock.patch.object(type(FAMILY), "vllm_module", "vllm.of_another_version"),
        pytest.raises(InvalidConfig, match=r"takes no models of type kimi_k25: it has no vllm.of_another_version"),
    ):
        startup.check_version(FAMILY)
    startup.check_version(FAMILY)
    startup.check_version(family_of("qwen3"))


class Wrapper:
    """As llvmlite's: its class has slots, and all other names, ``__dict__`` among them, are looked up elsewhere."""

    __slots__ = ()

    def __getattr__(self, name):
        return print


def test_objects_that_only_say_that_they_have_attributes_have_none():
    assert callable(vars(Wrapper()))
    assert process_settings._attributes(Wrapper()) == {}
    assert process_settings._attributes(SimpleNamespace(kernel=1)) == {"kernel": 1}
