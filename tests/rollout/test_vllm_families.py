"""vLLM's tokens and log-probs for every family: those of the Hugging Face engine and of the actor, before and after updates;
and its expansion of chunks."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from dataproto.chunks import EncodedTextChunk, ImageChunk, ModelInput
from dataproto.errors import InvalidPrompt
from helpers.engines import GREEDY, RESTRICTED, SAMPLED, generate, start
from helpers.shown_models import VLLM_TYPES
from rollout.prompts import ChunkRenderer
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
    assert family.vllm.differing_weights(family.actor.named_weights()) == []
    data = assert_same_as_actor(family, SAMPLED)
    for _ in range(3):
        data["advantages"] = torch.randn(data["responses"].shape, generator=torch.Generator().manual_seed(0))
        family.actor.update(data, lambda outputs, rows: (-outputs.log_probs * rows["advantages"], {}))
        old = set(family.vllm.differing_weights(family.actor.named_weights()))
        towered = any("visual" in name or "vision" in name for name in old)
        assert towered or not family.builder.family.vision_parts
        assert any("layers.0" in name for name in old)
        family.vllm.load_weights(family.actor.named_weights())
        assert family.vllm.differing_weights(family.actor.named_weights()) == []
        data = assert_same_as_actor(family, SAMPLED)  # the same images: nothing old may come out of a cache
    family.vllm.load_weights(named_weights(family.hf.model))


@pytest.mark.parametrize("family", ["qwen3_vl_moe"], indirect=True)
def test_adapted_experts_reach_the_engine_merged(family):
    data = generate(family, family.vllm, SAMPLED)
    data["advantages"] = torch.randn(data["responses"].shape, generator=torch.Generator().manual_seed(0))
    actor = ActorWorker(replace(family.actor.config, lora_rank=2, lora_alpha=8.0), torch.device("cpu"))
    for _ in range(2):
        actor.update(data, lambda outputs, rows: (-outputs.log_probs * rows["advantages"], {}))
    assert any(".experts." in name for name in family.vllm.differing_weights(actor.named_weights()))
    family.vllm.load_weights(actor.named_weights())
    data = generate(family, family.vllm, SAMPLED)
    scored, mask = actor.log_probs(data)["old_log_probs"], data["response_mask"].bool()
    torch.testing.assert_close(data["rollout_log_probs"][mask], scored[mask], atol=1e-4, rtol=0)
    family.vllm.load_weights(named_weights(family.hf.model))


@pytest.mark.parametrize("family", ["smolvlm"], indirect=True)
def test_a_video_is_refused_by_its_row_also_where_its_frames_are_images(family):
    frames = np.zeros((2, 20, 30, 3), dtype=np.uint8)
    prompts = family.builder([family.rows[0], {"prompt": "<video>What?", "videos": [frames]}])
    with pytest.raises(InvalidPrompt, match=r"row 1 .*the vLLM engine takes no videos: use the hf engine"):
        generate(family, family.vllm, GREEDY, prompts)
    assert generate(family, family.hf, GREEDY, prompts)["response_mask"].any(1).all()


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def chunks_of(builder, row):
    """The row's text and images, with the vision tokens of Qwen in the text chunks."""
    pieces = row["prompt"].split("<image>")
    chunks = [EncodedTextChunk(builder.encode_text(pieces[0]))]
    for image, text in zip(row["images"], pieces[1:], strict=True):
        chunks += [
            EncodedTextChunk(builder.encode_text("<|vision_start|>")),
            ImageChunk(png(image), "png"),
            EncodedTextChunk(builder.encode_text(f"<|vision_end|>{text}")),
        ]
    return ModelInput(chunks)


def test_our_expansion_of_chunks_is_vllms(family):
    prompts = ChunkRenderer(family.builder).prompts([chunks_of(family.builder, row) for row in family.rows])
    # The engine refuses a request whose expansion by vLLM is not ours (`check_expansion`).
    ours, theirs = (generate(family, engine, GREEDY, prompts) for engine in (family.hf, family.vllm))
    assert torch.equal(ours["responses"], theirs["responses"])
    assert torch.equal(ours["truncated"], theirs["truncated"])
    torch.testing.assert_close(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=1e-4, rtol=0)
