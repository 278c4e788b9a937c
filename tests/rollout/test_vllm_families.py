"""vLLM's tokens and log-probs for every family: those of the Hugging Face engine and of the actor, before and after updates;
and its expansion of chunks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.engine_weights import differing_weights
from dataproto.errors import InvalidPrompt
from helpers.engines import GREEDY, RESTRICTED, SAMPLED, generate, start
from helpers.shown_models import VLLM_TYPES
from rollout.responses import build_requests
from workers.model.named_weights import named_weights
from workers.roles.actor import ActorWorker

pytestmark = pytest.mark.vllm

IN_THE_GATE = ("qwen3_vl_moe", "qwen2_5_vl", "smolvlm")
FAMILIES = [each if each in IN_THE_GATE else pytest.param(each, marks=pytest.mark.long) for each in VLLM_TYPES]
# vLLM keeps the groups of the first, which has experts, in a process


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
    assert differing_weights(family.vllm, family.actor.named_weights()) == []
    data = assert_same_as_actor(family, SAMPLED)
    for _ in range(3):
        data["advantages"] = torch.randn(data["responses"].shape, generator=torch.Generator().manual_seed(0))
        family.actor.update(data, lambda outputs, rows: (-outputs.log_probs * rows["advantages"], {}))
        old = set(differing_weights(family.vllm, family.actor.named_weights()))
        towered = any("visual" in name or "vision" in name for name in old)
        assert towered or not family.builder.family.vision_parts
        assert any("layers.0" in name for name in old)
        family.vllm.load_weights(family.actor.named_weights())
        assert differing_weights(family.vllm, family.actor.named_weights()) == []
        data = assert_same_as_actor(family, SAMPLED)  # the same images: nothing old may come out of a cache
    family.vllm.load_weights(named_weights(family.hf.model))


@pytest.mark.parametrize("family", ["qwen3_vl_moe"], indirect=True)
def test_adapted_experts_reach_the_engine_merged(family):
    data = generate(family, family.vllm, SAMPLED)
    data["advantages"] = torch.randn(data["responses"].shape, generator=torch.Generator().manual_seed(0))
    actor = ActorWorker(replace(family.actor.config, lora_rank=2, lora_alpha=8.0), torch.device("cpu"))
    for _ in range(2):
        actor.update(data, lambda outputs, rows: (-outputs.log_probs * rows["advantages"], {}))
    assert any(".experts." in name for name in differing_weights(family.vllm, actor.named_weights()))
    family.vllm.load_weights(actor.named_weights())
    data = generate(family, family.vllm, SAMPLED)
    scored, mask = actor.log_probs(data)["old_log_probs"], data["response_mask"].bool()
    torch.testing.assert_close(data["rollout_log_probs"][mask], scored[mask], atol=1e-4, rtol=0)
    family.vllm.load_weights(named_weights(family.hf.model))


def frames(count, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (count, 16, 24, 3), dtype=np.uint8)


def with_videos(family):
    """A row of text, one with images, and rows with videos, of which the first steps by 0.7 seconds."""
    as_images = family.builder.family.frames_as_images  # with long texts between them
    first = (frames(2 if as_images else 12), {"fps": 20 / 7})
    second = (frames(3, seed=1), {"fps": 24.0, "frames_indices": [0, 12, 30], "total_num_frames": 48})
    videos = [second] if as_images else [second, first]
    rows = [
        family.rows[1],
        family.rows[0],
        {"prompt": "What <video> moves?", "videos": [first]},
        {"prompt": "<image>" + "<video> or" * len(videos), "images": family.rows[3]["images"], "videos": videos},
    ]
    return family.builder(rows)


TAKING_VIDEOS = (
    "qwen3_vl_moe",
    "qwen2_5_vl",
    "smolvlm",
    *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen2_vl", "qwen3_vl")),
)


@pytest.mark.parametrize("family", TAKING_VIDEOS, indirect=True)
def test_videos_beside_images_and_text_are_those_of_the_hf_engine_and_of_the_actor(family):
    prompts = with_videos(family)
    for sampling in (GREEDY, SAMPLED):
        ours, theirs = (generate(family, engine, sampling, prompts) for engine in (family.vllm, family.hf))
        assert torch.equal(ours["responses"], theirs["responses"])
        torch.testing.assert_close(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=2e-5, rtol=0)
    actor = ActorWorker(family.actor.config, torch.device("cpu"))  # that of the other tests has learnt
    scored, mask = actor.log_probs(ours)["old_log_probs"], ours["response_mask"].bool()
    torch.testing.assert_close(ours["rollout_log_probs"][mask], scored[mask], atol=1e-4, rtol=0)


def first_positions(worker):
    (request,) = worker.model_runner.requests.values()
    return request.prompt_token_ids, request.mrope_positions, request.mrope_position_delta


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen2_5_vl"], indirect=True)
def test_vllm_has_the_tokens_and_positions_of_a_video(family):
    for request in build_requests(with_videos(family)[2:], GREEDY):
        number = family.vllm.submit(request, GREEDY)
        assert family.vllm.poll() == []
        ((tokens, positions, delta),) = family.vllm.llm.collective_rpc(first_positions)
        family.vllm.abort(number)
        family.vllm.engine.step()  # which forgets the request
        assert tokens == request.input_ids.tolist()
        assert torch.equal(positions, request.position_ids[1:])
        assert delta == int(request.position_ids[1:].max()) + 1 - len(tokens)


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_a_video_that_vllm_cannot_take_is_refused_by_its_row(family):
    prompts, short = with_videos(family), with_videos(family)
    short["multi_modal_inputs"][2] = {}
    with pytest.raises(InvalidPrompt, match=r"row 2 .* 36 video tokens, but its 0 videos have 0 features"):
        generate(family, family.vllm, GREEDY, short)
    large = family.builder([{"prompt": "<video>", "videos": [frames(80)]}])
    refusal = "row 0 .*video 0 has 240 tokens, more than the 100 .* with max_num_batched_tokens=240"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InvalidPrompt, match=refusal):
        patch.setattr(family.vllm.engine.input_processor, "mm_encoder_cache_size", 100)
        generate(family, family.vllm, GREEDY, large)
    again = generate(family, family.vllm, GREEDY, prompts)  # nothing was left in vLLM's caches
    assert torch.equal(again["responses"], generate(family, family.hf, GREEDY, prompts)["responses"])
