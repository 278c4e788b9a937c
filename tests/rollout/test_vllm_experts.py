"""The experts that vLLM's routers choose, against those of the Hugging Face engine, and replayed by the actor."""

from shutil import copytree

import pytest
import torch

from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS
from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.checkpoints import write_checkpoint
from helpers.engines import GREEDY, ROWS, SAMPLED, generate, publish, start
from helpers.interpreted_triton import plain_places
from helpers.routes import differences_with_and_without, write_like_a3b
from rollout.engine import SamplingParams, create_engine
from rollout.hf.engine import HFEngine
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses, build_requests
from rollout.vllm.process_settings import set_environment
from rollout.vllm.startup import chosen_options, recording_options
from workers.roles.actor import ActorConfig, ActorWorker

pytestmark = [pytest.mark.vllm, pytest.mark.long]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3_vl_moe", "kimi_k25", "qwen3_omni_moe_thinker"])
def family(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    setup = start(request.param, path, routed_experts=True)
    setup.hf = HFEngine(str(path / "actor"), device=CPU, routed_experts=True)
    return setup


def assert_same_experts(ours, theirs):
    assert torch.equal(ours["responses"], theirs["responses"])
    for name in (PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS):
        assert ours[name].dtype == theirs[name].dtype == torch.uint8
        assert torch.equal(ours[name].lengths, theirs[name].lengths)
        found, expected = (column[name].values.sort(-1).values for column in (ours, theirs))
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_experts_are_those_of_the_hf_engine(family, sampling):
    """Prompts have images of unequal size; of the samples of a prompt all but the first find its blocks in the cache."""
    ours, theirs = (generate(family, engine, sampling) for engine in (family.vllm, family.hf))
    assert_same_experts(ours, theirs)
    if sampling is GREEDY:  # of another temperature than the actor's
        return
    replayed, mask = family.actor.log_probs(ours)["old_log_probs"], ours["response_mask"].bool()
    torch.testing.assert_close(replayed[mask], ours["rollout_log_probs"][mask], atol=1e-4, rtol=0)


def test_drafts_keep_the_experts_of_the_tokens_that_are_accepted(tmp_path):
    setup = start("qwen3_vl_moe", tmp_path, routed_experts=True, speculate=2)
    setup.hf = HFEngine(str(tmp_path / "actor"), device=CPU, routed_experts=True)
    weights = {name: weight.clone() for name, weight in setup.hf.model.named_parameters()}
    weights["lm_head.weight"] *= 6  # prefers few tokens
    for engine in (setup.hf, setup.vllm):
        engine.load_weights(weights.items())
    copied = SamplingParams(n=4, temperature=0.1, max_tokens=16, seed=3, ignore_eos=True)
    ours, theirs = (generate(setup, engine, copied) for engine in (setup.vllm, setup.hf))
    assert ours["accepted_tokens"].sum() > 0
    assert_same_experts(ours, theirs)


def test_interrupted_responses_keep_their_experts(family):
    requests = build_requests(family.prompts, SAMPLED)
    numbers = {family.vllm.submit(request, SAMPLED): place for place, request in enumerate(requests)}
    done = [each for _ in range(4) for each in family.vllm.poll()]
    family.vllm.load_weights(family.actor.named_weights())
    while family.vllm.unfinished:
        done += family.vllm.poll()
    done = [type(each)(**vars(each) | {"request": numbers[each.request]}) for each in done]
    ours = attach_responses(family.prompts, done, SAMPLED, family.builder.family, pad_token_id=0)
    assert_same_experts(ours, generate(family, family.hf, SAMPLED))


def test_experts_are_recorded_again_after_a_sleep_has_freed_them(family):
    slots = family.vllm.sampler.expert_slots
    before = generate(family, family.vllm, SAMPLED)
    assert slots.slots.nbytes > 0
    slots.clear()
    family.vllm.sleep()  # which clears the cached prefixes
    assert slots.slots.nbytes == 0
    assert_same_experts(generate(family, family.vllm, SAMPLED), before)


def test_no_step_is_scheduled_ahead_of_its_tokens(family):
    assert family.vllm.llm.llm_engine.vllm_config.scheduler_config.async_scheduling is False


def test_prefixes_are_found_in_whole_blocks(tmp_path):
    """vLLM copies a block of which a request uses a part, and its experts would not be copied."""
    set_environment()
    from vllm import EngineArgs

    recurrent = chosen_options(family_of("qwen3_5_moe"))
    assert recurrent["gdn_prefill_backend"] == "triton"  # FlashInfer's kernels would first be compiled for minutes
    model = str(tmp_path)  # else vLLM looks for it in the cache, if Hugging Face's hub is offline
    args = EngineArgs(model, **recurrent | recording_options())
    assert getattr(args, "prefix_match_unit", None) is None
    assert args.async_scheduling is False
    assert getattr(EngineArgs(model, **recurrent), "prefix_match_unit", 16) == 16


def test_the_difference_of_engine_and_actor_halves(tmp_path, monkeypatch):
    """In bfloat16, of a model with the mixture of Qwen3-VL-30B-A3B."""
    plain_places(monkeypatch)
    path = write_like_a3b(tmp_path / "actor", width=128)
    published = publish("qwen3_vl_moe", copytree(path, tmp_path / "engine"))
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=300)
    options = {"max_model_len": 400, "max_images": 3, "kv_cache_bytes": 1 << 26, "image_options": builder.image_options}
    engine = create_engine("vllm", str(published), dtype="bfloat16", routed_experts=True, **options)
    prompts, sampling = builder(ROWS), SamplingParams(n=4, max_tokens=24, ignore_eos=True)
    completions = list(engine.generate(build_requests(prompts, sampling), sampling))
    data = attach_responses(prompts, completions, sampling, engine.family, pad_token_id=0)
    actor = ActorWorker(ActorConfig(path, dtype="bfloat16"), CPU)
    replayed, plain = differences_with_and_without(actor, data)
    assert replayed <= plain / 2, f"mean difference {replayed:.2e} with replay, {plain:.2e} without"


def test_a_dense_model_has_no_experts_to_record(tmp_path):
    with pytest.raises(InvalidConfig, match="does not tell which experts it chooses"):
        create_engine("vllm", write_checkpoint("qwen3", tmp_path), routed_experts=True, max_model_len=64)
