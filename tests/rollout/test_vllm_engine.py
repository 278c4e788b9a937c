"""What the vLLM engine promises besides the right numbers: streaming, errors that name rows, memory, random states."""

import gc
import os
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.engine_weights import differing_weights
from dataproto.errors import InvalidConfig, InvalidPrompt, NonFiniteLogits, RequestFailed, RunAbandoned
from helpers.engines import GREEDY, RESTRICTED, ROWS, SAMPLED, generate, picture, start
from helpers.turns import finish
from rollout.engine import SamplingParams, create_engine
from rollout.prompts import PromptBuilder
from rollout.responses import build_requests
from rollout.vllm import requests as vllm_requests
from rollout.vllm.memory import model_state
from rollout.vllm.prompt_rendering import PromptRenderer, image_key

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return start("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def test_samples_do_not_depend_on_the_batch_around_them(setup):
    together = generate(setup, setup.vllm, SAMPLED)
    alone = generate(setup, setup.vllm, SAMPLED, setup.prompts[2:3])
    assert torch.equal(together["responses"][6:9], alone["responses"])
    assert len({tuple(row) for row in alone["responses"].tolist()}) > 1


def test_completions_come_as_they_finish(setup):
    whole = generate(setup, setup.vllm, SAMPLED)
    lengths = whole["response_mask"].sum(1).tolist()
    stop = int(whole["responses"][lengths.index(max(lengths)), 1])
    sampling = SamplingParams(n=3, temperature=0.8, max_tokens=8, seed=1, stop_token_ids=(stop,))
    order, ended = [], {}
    for completion in setup.vllm.generate(build_requests(setup.prompts, sampling), sampling):
        order.append(completion.request)
        ended[completion.request] = completion
    for row, padded in enumerate(whole["responses"].tolist()):
        tokens = padded[: lengths[row]]
        length = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert ended[row].token_ids == tokens[:length]
        assert ended[row].finish_reason == (
            "stop" if length < 8 or tokens[7] in (stop, *setup.vllm.end_ids) else "length"
        )
    lengths = [len(ended[request].token_ids) for request in order]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 1


def test_media_tokens_are_never_sampled(setup):
    weights = {name: weight.clone() for name, weight in setup.hf.model.named_parameters()}
    weights["lm_head.weight"].fill_(0)  # all tokens equally likely
    setup.vllm.load_weights(weights.items())
    data = generate(setup, setup.vllm, SamplingParams(n=40, temperature=1.0, max_tokens=8, seed=3))
    setup.vllm.load_weights(setup.hf.model.named_parameters())
    mask = data["response_mask"].bool()
    assert not np.isin(data["responses"][mask].numpy(), setup.vllm.banned_ids).any()
    likely = np.log(1 / (len(weights["lm_head.weight"]) - len(setup.vllm.banned_ids)))
    torch.testing.assert_close(
        data["rollout_log_probs"][mask], torch.full((int(mask.sum()),), likely, dtype=torch.float32)
    )


def test_log_probs_are_kept_for_as_long_as_responses_are(setup, monkeypatch):
    monkeypatch.setattr("rollout.vllm.sampler.FIRST_COLUMNS", 2)
    whole = generate(setup, setup.vllm, SAMPLED)
    torch.testing.assert_close(
        whole["rollout_log_probs"], generate(setup, setup.hf, SAMPLED)["rollout_log_probs"], atol=2e-5, rtol=0
    )
    monkeypatch.undo()
    long = SamplingParams(n=3, temperature=0.8, max_tokens=300, seed=1, stop_token_ids=tuple(range(240)))
    data = generate(setup, setup.vllm, long)
    assert data["responses"].shape[1] == data["response_mask"].sum(1).max() < 10
    assert setup.vllm.sampler.found.shape[1] < 300


@torch.inference_mode()
def lose_state(worker):
    """As sleep at level 2 on CUDA drops it, where vLLM does not restore it. Sizes and bounds are on the host there."""
    for tensor in model_state(worker).values():
        if tensor.is_floating_point():
            tensor.zero_()


def test_what_sleep_drops_besides_weights_is_found_and_restored(setup):
    before = generate(setup, setup.vllm, SAMPLED)
    memory, weights = setup.vllm.memory, list(setup.hf.model.named_parameters())
    for _ in range(2):  # the second copies are in the memory of the first ones
        memory.keep_state()
    setup.vllm.llm.collective_rpc(lose_state)
    setup.vllm.load_weights(weights)
    differing = differing_weights(setup.vllm, weights)
    assert any("rotary" in name for name in differing)
    assert not {name for name, _ in weights} & set(differing)
    lost = generate(setup, setup.vllm, SAMPLED)
    assert not torch.equal(lost["rollout_log_probs"], before["rollout_log_probs"])
    memory.restore_state()
    setup.vllm.load_weights(weights)
    assert differing_weights(setup.vllm, weights) == []
    after = generate(setup, setup.vllm, SAMPLED)
    assert torch.equal(after["responses"], before["responses"])
    assert torch.equal(after["rollout_log_probs"], before["rollout_log_probs"])


# What goes wrong


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, RESTRICTED])
def test_logits_that_are_not_finite_name_the_row_and_new_weights_mend_it(setup, bad, sampling):
    weights = {name: weight.clone() for name, weight in setup.hf.model.named_parameters()}
    before = generate(setup, setup.vllm, sampling)
    head = weights["lm_head.weight"].clone()
    head[7] = bad
    setup.vllm.load_weights((weights | {"lm_head.weight": head}).items())
    with pytest.raises(NonFiniteLogits, match=r"row \d \(uid .*response token 0 are not finite"):
        generate(setup, setup.vllm, sampling)
    assert not setup.vllm.engine.has_unfinished_requests()
    setup.vllm.load_weights(weights.items())
    after = generate(setup, setup.vllm, sampling)
    assert torch.equal(before["responses"], after["responses"])
    assert torch.equal(before["rollout_log_probs"], after["rollout_log_probs"])


def test_pixels_that_are_not_finite_name_their_row_alone(setup):
    weights = {name: weight.clone() for name, weight in setup.hf.model.named_parameters()}
    broken = {name: weight * (torch.nan if "visual" in name else 1) for name, weight in weights.items()}
    setup.vllm.load_weights(broken.items())
    with pytest.raises(NonFiniteLogits, match="row 0"):
        generate(setup, setup.vllm, SAMPLED, setup.prompts[:2])
    assert len(generate(setup, setup.vllm, SAMPLED, setup.prompts[1:2])) == 3  # the row without an image
    setup.vllm.load_weights(weights.items())
    assert len(generate(setup, setup.vllm, SAMPLED)) == 12


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_request_that_vllm_ends_by_itself_is_named(setup, reason, monkeypatch):
    """As a failed cache transfer ends it."""
    step = setup.vllm.engine.step

    def ending():
        outputs = step()
        for output in outputs:
            if output.finished and output.request_id.endswith("-4"):
                output.outputs[0].finish_reason = reason
        return outputs

    before = generate(setup, setup.vllm, SAMPLED)
    with monkeypatch.context() as patch, pytest.raises(RequestFailed, match=rf"row 1 \(uid .* with {reason!r} after"):
        patch.setattr(setup.vllm.engine, "step", ending)
        generate(setup, setup.vllm, SAMPLED)
    assert torch.equal(generate(setup, setup.vllm, SAMPLED)["responses"], before["responses"])


def test_requests_that_vllm_forgets_do_not_keep_the_caller_waiting(setup):
    stop = SamplingParams(n=3, temperature=0.8, max_tokens=60, seed=1)
    stream = setup.vllm.generate(build_requests(setup.prompts, stop), stop)
    engine, step = setup.vllm.engine, setup.vllm.engine.step

    def forgetting():
        engine.abort_request(list(setup.vllm._running.rows))
        return step()

    engine.step = forgetting
    try:
        with pytest.raises(RequestFailed, match=r"vLLM has dropped 12 requests: row 0 \(uid"):
            next(stream)
    finally:
        engine.step = step
    assert len(generate(setup, setup.vllm, SAMPLED)) == 12


def test_a_second_model_that_guesses_tokens_is_refused(setup, tmp_path):
    with pytest.raises(InvalidConfig, match="speculative_config"):
        create_engine("vllm", str(tmp_path), speculative_config={"method": "ngram", "num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x" * 396, "images": []}, r"row 1 .*: \d+ prompt tokens and max_tokens=8 exceed max_model_len=400"),
        ({"prompt": "<image>" * 4, "images": [picture(16, 16, 0)] * 4}, "row 1 .*: 4 images exceed max_images=3"),
    ],
)
def test_a_prompt_beyond_the_limits_is_named_and_the_next_one_works(setup, row, message):
    builder = PromptBuilder(
        setup.builder.tokenizer, setup.builder.image_processor, setup.builder.config, max_prompt_length=500
    )
    before = generate(setup, setup.vllm, GREEDY)
    with pytest.raises(InvalidPrompt, match=message):
        generate(setup, setup.vllm, SAMPLED, builder([ROWS[0], row]))
    assert torch.equal(generate(setup, setup.vllm, GREEDY)["responses"], before["responses"])


def test_an_image_that_vllm_refuses_is_named_and_the_next_one_works(setup):
    prompts = setup.prompts[:2]
    before = generate(setup, setup.vllm, GREEDY, prompts)
    broken = setup.prompts[:2]
    broken["multi_modal_data"] = np.array([{"image": [picture(8, 4000, 5)] * 2}, {}], dtype=object)
    with pytest.raises(InvalidPrompt, match=r"row 0 .*aspect ratio"):
        generate(setup, setup.vllm, GREEDY, broken)
    assert torch.equal(generate(setup, setup.vllm, GREEDY, prompts)["responses"], before["responses"])


def test_another_expansion_than_the_training_sides_is_named(setup):
    other = setup.prompts[:]
    other["multi_modal_data"] = setup.prompts[[3, 1, 2, 0]]["multi_modal_data"]
    with pytest.raises(InvalidPrompt, match=r"row 0 .*; row 3 "):
        generate(setup, setup.vllm, GREEDY, other)
    swapped = setup.prompts[3:]
    swapped["multi_modal_data"] = np.array([{"image": [picture(20, 60, 6)]}], dtype=object)
    with pytest.raises(
        InvalidPrompt, match=r"row 0 .*: vLLM expands the prompt to \d+ tokens, the training side to \d+"
    ):
        generate(setup, setup.vllm, GREEDY, swapped)


def test_images_of_a_refused_batch_can_be_asked_for_alone(setup):
    """They have been processed, but vLLM never got them."""
    rows = [
        {"prompt": "<image>", "images": [picture(44, 36, 77)]},
        {"prompt": "<image>", "images": [picture(36, 52, 78)]},
    ]
    prompts = setup.builder(rows)
    refused = prompts[:]
    refused["multi_modal_data"] = np.array(
        [prompts["multi_modal_data"][0], {"image": [picture(8, 4000, 5)]}], dtype=object
    )
    with pytest.raises(InvalidPrompt, match="row 1"):
        generate(setup, setup.vllm, GREEDY, refused)
    expected = generate(setup, setup.hf, GREEDY, prompts)["responses"]
    assert torch.equal(generate(setup, setup.vllm, GREEDY, prompts[:1])["responses"], expected[:1])
    assert torch.equal(generate(setup, setup.vllm, GREEDY, prompts)["responses"], expected)


def test_later_prompts_are_rendered_while_earlier_ones_are_decoded(setup, monkeypatch):
    expected = generate(setup, setup.vllm, SAMPLED)
    stepped, last = threading.Event(), setup.prompts["uid"][-1]
    step, render = setup.vllm.engine.step, PromptRenderer.render_one

    def noted():
        stepped.set()
        return step()

    def held_back(self, request, sampling):
        assert request.uid != last or stepped.wait(120)
        return render(self, request, sampling)

    with monkeypatch.context() as patch:
        patch.setattr(setup.vllm, "_step_tokens", 8)  # of prompts in a step
        patch.setattr(setup.vllm.engine, "step", noted)
        patch.setattr(PromptRenderer, "render_one", held_back)
        found = generate(setup, setup.vllm, SAMPLED)
    assert torch.equal(found["responses"], expected["responses"])
    assert not any(thread.name.startswith("rendering") for thread in threading.enumerate())


def test_images_that_are_refused_after_the_first_steps_end_the_run_and_are_all_named(setup, monkeypatch):
    rows = [{"prompt": "<image>", "images": [picture(40 + place, 44, 400 + place)]} for place in range(4)]
    prompts = setup.builder(rows)
    refused = prompts[:]
    images = [prompts["multi_modal_data"][0], {"image": [picture(8, 4000, 5)]}] * 2
    refused["multi_modal_data"] = np.array(images, dtype=object)
    monkeypatch.setattr(setup.vllm, "_step_tokens", 1)
    with pytest.raises(InvalidPrompt, match=r"row 1 .*; row 3 "):
        generate(setup, setup.vllm, GREEDY, refused)
    assert not setup.vllm.engine.has_unfinished_requests()
    assert setup.vllm.unfinished == 0
    expected = generate(setup, setup.hf, GREEDY, prompts)["responses"]
    assert torch.equal(generate(setup, setup.vllm, GREEDY, prompts)["responses"], expected)


def test_a_run_without_requests_is_over_at_once(setup):
    before = generate(setup, setup.vllm, SAMPLED)
    assert list(setup.vllm.generate([], SAMPLED)) == []
    abandoned = setup.vllm.generate(build_requests(setup.prompts, SAMPLED), SAMPLED)
    next(abandoned)
    assert len(generate(setup, setup.vllm, SAMPLED, setup.prompts[:0])) == 0
    assert setup.vllm.unfinished == 0
    with pytest.raises(RunAbandoned):
        next(abandoned)
    assert torch.equal(generate(setup, setup.vllm, SAMPLED)["responses"], before["responses"])


def test_a_prompt_that_is_refused_ends_its_own_run_and_not_another_request(setup, monkeypatch):
    single, request, *_, last = build_requests(setup.prompts, replace(SAMPLED, n=1))
    media = {"image": [picture(8, 4000, 5)]}  # which vLLM's processor refuses
    refused = replace(last, multi_modal_data=media)
    sampling = replace(SAMPLED, n=1)
    monkeypatch.setattr(
        setup.vllm, "_step_tokens", 1
    )  # of prompts in a step: the last ones are given to vLLM much later
    run = setup.vllm.generate([single, request, refused], sampling)
    next(run)
    number = setup.vllm.submit(request, sampling)
    with pytest.raises(InvalidPrompt, match="row 2"):
        list(run)
    (done,) = finish(setup.vllm, number)
    assert done.finish_reason != "error"
    assert done.token_ids == finish(setup.hf, setup.hf.submit(request, sampling))[0].token_ids
    assert setup.vllm.unfinished == 0
    assert torch.equal(generate(setup, setup.vllm, GREEDY)["responses"], generate(setup, setup.hf, GREEDY)["responses"])


def test_a_caller_that_stops_early_leaves_no_requests(setup):
    before = generate(setup, setup.vllm, SAMPLED)
    stream = setup.vllm.generate(build_requests(setup.prompts, SAMPLED), SAMPLED)
    next(stream)
    stream.close()
    assert not setup.vllm.engine.has_unfinished_requests()
    assert torch.equal(generate(setup, setup.vllm, SAMPLED)["responses"], before["responses"])


def test_another_run_ends_the_one_before(setup):
    before = generate(setup, setup.vllm, SAMPLED)
    abandoned = setup.vllm.generate(build_requests(setup.prompts, SAMPLED), SAMPLED)
    next(abandoned)
    assert torch.equal(generate(setup, setup.vllm, SAMPLED)["responses"], before["responses"])
    with pytest.raises(RunAbandoned, match="11 of 12 completions are lost"):
        list(abandoned)
    whole = setup.vllm.generate(build_requests(setup.prompts, SAMPLED), SAMPLED)
    for _ in range(12):
        next(whole)
    generate(setup, setup.vllm, GREEDY)
    assert list(whole) == []  # it had been read to its end
    assert torch.equal(generate(setup, setup.vllm, SAMPLED)["responses"], before["responses"])


def test_weights_that_do_not_fit_are_refused_and_the_engine_goes_on(setup):
    weights = dict(setup.hf.model.named_parameters())
    before = generate(setup, setup.vllm, GREEDY)
    with pytest.raises(InvalidConfig, match="nonsense"):
        setup.vllm.load_weights([("nonsense.weight", torch.zeros(1))])
    with pytest.raises(InvalidConfig, match="not given"):
        setup.vllm.load_weights((name, weight) for name, weight in weights.items() if "norm" not in name)
    assert not setup.vllm.wake()  # so a sharding manager streams them again
    setup.vllm.load_weights(weights.items())
    assert setup.vllm.wake()
    assert torch.equal(generate(setup, setup.vllm, GREEDY)["responses"], before["responses"])


# Memory and surroundings


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_fifty_cycles_leak_nothing(setup):
    weights = [(name, weight.detach()) for name, weight in setup.hf.model.named_parameters()]
    expected = generate(setup, setup.vllm, SAMPLED)
    sizes = []
    for cycle in range(60):
        setup.vllm.sleep()
        assert setup.vllm.wake()
        setup.vllm.load_weights(iter(weights))
        fresh = setup.builder([{"prompt": "<image>", "images": [picture(60, 60, 100 + cycle)]}])
        generate(setup, setup.vllm, GREEDY, fresh)
        del fresh
        if cycle in (9, 59):
            assert torch.equal(generate(setup, setup.vllm, SAMPLED)["responses"], expected["responses"])
            setup.vllm.sleep()
            gc.collect()
            core = setup.vllm.engine.engine_core.engine_core
            sizes.append(
                {
                    "requests": len(core.scheduler.requests),
                    "encoder": len(core.scheduler.encoder_cache_manager.cached),
                    "bytes": resident_bytes(),
                }
            )
    first, last = sizes
    assert last["bytes"] - first["bytes"] < 32 << 20  # the model has 1 MiB, each cycle's image 100 KiB processed
    assert {name: last[name] - first[name] for name in ("requests", "encoder")} == {"requests": 0, "encoder": 0}


def test_processed_images_outlive_sleep_and_new_weights(setup, monkeypatch):
    weights = [(name, weight.detach()) for name, weight in setup.hf.model.named_parameters()]
    before = generate(setup, setup.vllm, SAMPLED)
    setup.vllm.sleep()
    assert setup.vllm.wake()
    setup.vllm.load_weights(iter(weights))
    cache, processed = setup.vllm.engine.renderer.mm_processor_cache, []
    taken = cache.get_and_update_item
    monkeypatch.setattr(
        cache, "get_and_update_item", lambda item, key: processed.append(item is not None) or taken(item, key)
    )
    later = setup.builder(ROWS)  # other objects of the same content
    later["uid"] = setup.prompts["uid"]
    assert torch.equal(generate(setup, setup.vllm, SAMPLED, later)["responses"], before["responses"])
    assert processed == [False] * 6


@pytest.mark.parametrize("where", ["render_one", "vllm_params"])
def test_an_interruption_leaves_no_image_half_known(setup, where, monkeypatch):
    rows = [{"prompt": "<image>", "images": [picture(50, 40, 300 + number)]} for number in range(3)]
    owner = vllm_requests if where == "vllm_params" else PromptRenderer
    whole, times = getattr(owner, where), []

    def interrupted(*args):
        times.append(args)
        if len(times) == 2:
            raise KeyboardInterrupt
        return whole(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, where, interrupted)
        generate(setup, setup.vllm, GREEDY, setup.builder(rows))
    assert len(generate(setup, setup.vllm, GREEDY, setup.builder(rows))) == 3


def test_without_room_for_the_cache_no_image_is_half_known(setup, monkeypatch):
    rows = [{"prompt": "<image>", "images": [picture(52, 44, 310)]}]

    def no_room():
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(setup.vllm, "wake_kv_cache", no_room)
        generate(setup, setup.vllm, GREEDY, setup.builder(rows))
    assert len(generate(setup, setup.vllm, GREEDY, setup.builder(rows))) == 1


def test_palette_images_with_equal_indices_and_other_colours_differ():
    images = [Image.new("P", (4, 4)) for _ in range(3)]
    for image, colour in zip(images, ([255, 0, 0], [0, 0, 255], [255, 0, 0]), strict=True):
        image.putpalette(colour)
    red, blue, same = map(image_key, images)
    assert red == same != blue


def test_an_image_that_was_edited_is_another(setup):
    image = picture(50, 40, 320)
    batch = setup.builder([{"prompt": "<image>", "images": [image]}])
    before = generate(setup, setup.vllm, GREEDY, batch)
    image_in_batch = batch["multi_modal_data"][0]["image"][0]
    image_in_batch.paste((255, 255, 255), (0, 0, *image_in_batch.size))
    edited = generate(setup, setup.vllm, GREEDY, batch)
    white = setup.builder([{"prompt": "<image>", "images": [Image.new("RGB", image.size, "white")]}])
    expected = generate(setup, setup.vllm, GREEDY, white)
    assert torch.equal(edited["rollout_log_probs"], expected["rollout_log_probs"])
    assert not torch.equal(edited["rollout_log_probs"], before["rollout_log_probs"])


def test_random_states_are_left_alone(setup):
    torch.manual_seed(3)
    random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    generate(setup, setup.vllm, SAMPLED)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
