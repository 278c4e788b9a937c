"""Rows with several images, one, none and video in one batch: as if each were alone. And what fails elsewhere: a sampled image
placeholder, a row cut through an image, a frozen tower that still keeps activations.
"""

from functools import cache

import numpy as np
import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidColumn, InvalidConfig, MediaMismatch, NonFiniteLogits
from dataproto.packing import token_widths, widen
from dataproto.vlm import family_of
from helpers.batches import film_prompt, padded_log_probs, prompt_batch, with_responses
from helpers.forward_rows import forward_rows
from helpers.layouts import text_rows
from helpers.tiny_models import (
    EACH_TYPE,
    IMAGE,
    VLM_TYPES,
    takes_video,
    tiny_config,
    tiny_model,
)
from workers.model.packed_model import PackedVLM
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.model_worker import PolicyConfig, ReferenceWorker
from workers.training.micro_batches import micro_batches
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
packed_of = cache(lambda model_type: PackedVLM(tiny_model(model_type), family_of(model_type), 1.0))


def mixed_rows(model_type):
    """Two images, one, none and, where the family has any, a video; two samples each."""
    config = tiny_config(model_type)
    prompts = prompt_batch(config, [[(4, 6), (8, 4)], [(6, 6)], []], texts=[24, 17, 5])
    if takes_video(model_type):
        prompts = DataProto.concat([prompts, film_prompt(config, prompts["input_ids"].shape[1])])
    prompts = prompts.repeat(2)
    return with_responses(config, prompts, lengths=[4, 2, 3, 5, 1, 2, 3, 2][: len(prompts)], width=5)


@pytest.mark.parametrize("model_type", EACH_TYPE)
def test_any_split_gives_the_log_probs_of_each_row_alone(model_type):
    module, data = packed_of(model_type), mixed_rows(model_type)
    with torch.no_grad():
        expected = padded_log_probs(tiny_model(model_type), data)
        for budget in (1, 60, 10_000):
            parts = micro_batches(data, module, budget)
            found = torch.full_like(expected, torch.nan)
            for part in parts:
                found[part.index] = forward_rows(module, part.rows, CPU).log_probs
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        order = torch.arange(len(data)).flip(0)
        found = forward_rows(module, data[order], CPU).log_probs
    torch.testing.assert_close(found, expected[order], atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", VLM_TYPES)
def test_a_dummy_changes_nothing_and_gives_the_tower_gradients_of_zero(model_type):
    module, data = packed_of(model_type), mixed_rows(model_type)[4:6]
    module.zero_grad()
    alone, beside = (forward_rows(module, data, CPU, tower=tower).log_probs for tower in (False, True))
    assert torch.equal(alone, beside)
    alone.sum().backward()
    tower = module.model.get_submodule(module.family.vision_tower)
    assert all(parameter.grad is None for parameter in tower.parameters())
    beside.sum().backward()
    gradients = [parameter.grad for parameter in tower.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("model_type", VLM_TYPES)
def test_other_images_give_other_log_probs(model_type):
    module, data = packed_of(model_type), mixed_rows(model_type)
    with torch.no_grad():
        before = forward_rows(module, data, CPU).log_probs
        media = data["multi_modal_inputs"][1]
        data["multi_modal_inputs"][1] = media | {"pixel_values": media["pixel_values"].flip(0)}
        after = forward_rows(module, data, CPU).log_probs
    assert ((after[1] - before[1])[data["response_mask"][1] == 1].abs() > 1e-5).all()
    others = torch.arange(len(data)) != 1
    torch.testing.assert_close(after[others], before[others], atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_vl").save_pretrained(path)
    return str(path)


def test_a_sampled_placeholder_is_refused(checkpoint):
    data = mixed_rows("qwen3_vl")
    data["input_ids"][3, -4] = IMAGE
    with pytest.raises(InvalidColumn, match=f"row 3, response position 1: token {IMAGE}"):
        ReferenceWorker(PolicyConfig(checkpoint), CPU).log_probs(data)


def test_a_row_cut_through_an_image_is_refused_and_named(checkpoint):
    data = mixed_rows("qwen3_vl")
    width = data["input_ids"].shape[1]
    within = int((data["mm_token_type_ids"][0] == 1).nonzero()[2])  # the third token of the first image
    for name in ("input_ids", "attention_mask", "mm_token_type_ids", "position_ids"):
        data[name] = data[name][..., within:]
    assert data["input_ids"].shape[1] < width
    with pytest.raises(MediaMismatch, match=r"row 0: \d+ image placeholder tokens.*cut through"):
        ReferenceWorker(PolicyConfig(checkpoint), CPU).log_probs(data)


def test_inert_rows_get_zeros_and_change_nothing(checkpoint):
    data = mixed_rows("qwen3_vl")
    inert = data[:2]
    for name in ("attention_mask", "response_mask", "mm_token_type_ids"):
        inert[name] = torch.zeros_like(inert[name])
    inert["multi_modal_inputs"] = np.array([{}, {}], dtype=object)
    reference = ReferenceWorker(PolicyConfig(checkpoint), CPU)
    expected = reference.log_probs(data)["ref_log_prob"]
    found = reference.log_probs(DataProto.concat([inert, data]))["ref_log_prob"]
    assert not found[:2].any()
    torch.testing.assert_close(found[2:], expected, atol=1e-6, rtol=0)
    assert not reference.log_probs(inert)["ref_log_prob"].any()


def test_a_frozen_tower_keeps_nothing_for_a_backward_pass(checkpoint):
    actor = ActorWorker(ActorConfig(checkpoint, freeze_vision=True), CPU)
    outputs = []
    for path in (actor.module.family.vision_tower, *actor.module.family.mergers):
        part = actor.module.model.get_submodule(path)
        for leaf in (leaf for leaf in part.modules() if not list(leaf.children())):
            leaf.register_forward_hook(lambda _, __, output: outputs.append(output))
    actor.update(mixed_rows("qwen3_vl"), lambda outputs, rows: (-outputs.log_probs, {}))
    assert outputs
    assert not any(isinstance(output, torch.Tensor) and output.requires_grad for output in outputs)


def test_a_frozen_decoder_passes_gradients_to_the_tower_alone(checkpoint):
    """Those of the whole model, also where a micro-batch has no image."""
    gradients = []
    for options in ({}, {"freeze_language": True, "token_budget": 16}):
        actor = ActorWorker(ActorConfig(checkpoint, **options), CPU)
        actor.forward_backward(mixed_rows("qwen3_vl"), lambda outputs, rows: (-outputs.log_probs, {}))
        gradients.append({name: p.grad for name, p in actor.module.named_parameters() if p.grad is not None})
    whole, tower = gradients
    assert tower.keys() == {name for name in whole if ".visual." in name}
    for name, gradient in tower.items():
        assert (gradient - whole[name]).norm() <= 1e-4 * whole[name].norm() + 1e-7, name
    actor.forward_backward(text_rows(actor.module.model.config), lambda outputs, rows: (-outputs.log_probs, {}))
    for options in ({"freeze_vision": True}, {"lora_rank": 2}):
        with pytest.raises(InvalidConfig, match="freeze_language=True trains only the vision tower"):
            ActorConfig(checkpoint, freeze_language=True, **options)
    assert not ActorConfig(checkpoint, freeze_language=True).frozen().freeze_language


def test_a_step_whose_loss_is_not_finite_is_skipped_and_its_row_named(checkpoint, caplog):
    actor, data = ActorWorker(ActorConfig(checkpoint), CPU), mixed_rows("qwen3_vl")
    data["uid"] = np.array([f"row-{row}" for row in range(len(data))], dtype=object)
    before = {name: weight.clone() for name, weight in actor.named_weights()}

    def loss_fn(outputs, rows):
        scale = torch.tensor([[float("inf") if uid == "row-3" else -1.0] for uid in rows["uid"]])
        return scale * outputs.log_probs, {}

    metrics = actor.update(data, loss_fn)
    assert metrics["actor/skipped_steps"] == 1
    assert actor.model.skipped[0].rows == ("row-3",)
    assert "step 0 skipped" in caplog.text
    assert "row-3" in caplog.text
    assert all(torch.equal(weight, before[name]) for name, weight in actor.named_weights())


def test_a_skipped_step_is_told_if_a_later_minibatch_fails(checkpoint, caplog):
    actor, data = ActorWorker(ActorConfig(checkpoint), CPU), mixed_rows("qwen3_vl")

    def loss_fn(outputs, rows):
        if actor.model.optimizer.steps:
            raise OverflowError("the second mini-batch")
        return float("inf") * outputs.log_probs, {}

    data["uid"] = np.array([f"row-{row}" for row in range(len(data))], dtype=object)
    with pytest.raises(OverflowError, match="the second mini-batch"):
        actor.update(data, loss_fn, minibatch=len(data) // 2)
    assert actor.model.optimizer.skipped_steps == 1
    assert "optimizer step 0 skipped, gradient norm nan; the update failed later" in caplog.text


def tiny_actor(path):
    tiny_model("qwen2_5_vl").save_pretrained(path)
    return ActorWorker(ActorConfig(str(path), optimizer=OptimizerConfig(lr=1e-3)), CPU)


def test_scores_that_are_not_finite_name_the_row_and_new_weights_mend_it(tmp_path):
    actor = tiny_actor(tmp_path)
    config = tiny_config("qwen2_5_vl")
    data = with_responses(config, prompt_batch(config, [[(4, 6)], []], texts=[4, 3]), [2, 3], width=4)
    before = actor.log_probs(data)["old_log_probs"]
    tower = actor.module.model.model.visual.merger.mlp[2].bias
    kept = tower.detach().clone()
    with torch.no_grad():
        tower.fill_(torch.nan)
    with pytest.raises(NonFiniteLogits, match=r"row 0 \(uid prompt-0\): old_log_probs of response token 0 is nan"):
        actor.log_probs(data)
    with torch.no_grad():
        tower.copy_(kept)
    assert torch.equal(actor.log_probs(data)["old_log_probs"], before)


def test_the_constant_of_dr_grpo_is_how_long_a_response_could_have_been(tmp_path):
    """Not how long the longest one is: 3 tokens here, of 8."""
    actor = tiny_actor(tmp_path)
    config = tiny_config("qwen2_5_vl")
    narrow = with_responses(config, prompt_batch(config, [[(4, 6)], []], texts=[4, 3]), [2, 3], width=3)
    losses = []
    for data, told in ((widen(narrow, token_widths(narrow)[0], 8), {}), (narrow, {"max_tokens": 8}), (narrow, {})):
        data = data[:]
        data.meta_info |= told
        weights = actor.model.token_weights(data, "seq-mean-token-sum-norm")
        losses.append(float(weights.sum()))
    assert losses == pytest.approx([5 / 8 / 2, 5 / 8 / 2, 5 / 3 / 2])
