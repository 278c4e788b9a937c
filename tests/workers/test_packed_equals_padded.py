"""The packed model compared with the forward pass of Hugging Face, row by row, in float32: log-probs within 1e-5 absolute, each
parameter's gradient within 1e-5 of its norm, 1e-4 with recurrent layers."""

import copy

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidColumn, MissingColumn
from dataproto.vlm import family_of
from helpers.batches import padded_log_probs, prompt_batch, with_responses
from helpers.forward_rows import forward_rows
from helpers.metrics import learned
from helpers.tiny_models import EACH_TYPE, OMNI_TYPES, TEXT_TYPES, TILED, gradient_tolerance, rounding, tiny_model
from workers.model.packed_model import PackedVLM, select_rows
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.model_worker import PolicyConfig, ReferenceWorker
from workers.training.forward_pass import PreparedRows, token_types

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=EACH_TYPE)
def model(request):
    return tiny_model(request.param)


def mixed_batch(model):
    """Rows with two images of unequal size, with one and with none; a shared image, and samples of one prompt."""
    grids = [[(4, 6), (8, 4)], [(6, 6)], [], [(6, 6)]]
    prompts = prompt_batch(model.config, grids, texts=[4, 7, 5, 3])[[0, 1, 2, 2, 3, 0, 0]]
    return with_responses(model.config, prompts, lengths=[5, 1, 6, 2, 3, 4, 0], width=6)


def test_log_probs_and_gradients_are_equal(model):
    data = mixed_batch(model)
    weights = (
        torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(0)) * data["response_mask"]
    )
    temperature = 0.8
    reference = copy.deepcopy(model)
    expected = padded_log_probs(reference, data, temperature)
    (expected * weights).sum().backward()

    packed = PackedVLM(copy.deepcopy(model), family_of(model.config), temperature)
    outputs = forward_rows(packed, data, CPU)
    (outputs.log_probs * weights).sum().backward()

    torch.testing.assert_close(outputs.log_probs, expected, atol=1e-5, rtol=0)
    ours = dict(packed.model.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            assert ours[name].grad is None or not ours[name].grad.any(), name
            continue
        error = (ours[name].grad - parameter.grad).norm()
        assert error <= gradient_tolerance(model.config.model_type) * parameter.grad.norm() + rounding(name), (
            f"{name}: {error} of {parameter.grad.norm()}"
        )


def test_a_prompt_with_several_samples_is_computed_once(model):
    data = mixed_batch(model)
    module = PackedVLM(copy.deepcopy(model), family_of(model.config), 1.0)
    prepared = PreparedRows(module, data)
    packed, (part, _, _) = prepared.packed, prepared.media(module, torch.device("cpu"))
    media = {} if part is None else part.inputs
    prompts, responses = data["attention_mask"][:, :-6].sum(1), data["attention_mask"][:, -6:].sum(1)
    shared = [3, 6]  # rows 2 and 3 are samples of one prompt, and so are rows 5 and 6
    assert packed.input_ids.shape[1] == int(prompts.sum() + responses.sum() - prompts[shared].sum())
    grids = family_of(model.config).grids(media, model.config)
    model_type = model.config.model_type
    other = 0 if model_type in TEXT_TYPES else 5 if model_type == "minicpmv4_6" else 3  # an image of it has two slices
    other += 3 * (model_type in OMNI_TYPES)  # a sound after each image
    assert len(grids) == (7 if model_type in TILED else other)


def test_entropy_is_that_of_the_policy(model):
    data = mixed_batch(model)
    packed = PackedVLM(copy.deepcopy(model), family_of(model.config), 1.0)
    with torch.no_grad():
        outputs = forward_rows(packed, data, CPU, entropy=True)
        log_probs = padded_log_probs(model, data)
    assert (outputs.entropy[data["response_mask"] == 0] == 0).all()
    assert (outputs.entropy[data["response_mask"] == 1] > 0).all()
    torch.testing.assert_close(outputs.log_probs, log_probs, atol=1e-5, rtol=0)


def test_token_types_can_be_inferred_from_the_prompt(model):
    data = mixed_batch(model)
    packed = PackedVLM(copy.deepcopy(model), family_of(model.config), 1.0)
    expected = data.pop(["mm_token_type_ids"])["mm_token_type_ids"]
    assert torch.equal(token_types(packed, data), expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2_5_vl").save_pretrained(path)
    return str(path)


def pg_loss(outputs, rows):
    return -outputs.log_probs * rows["advantages"], {"actor/mean_log_prob": outputs.log_probs}


def training_batch(model):
    data = mixed_batch(model)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    return data


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_update_does_not_depend_on_micro_batches(checkpoint, aggregation):
    data = training_batch(tiny_model("qwen2_5_vl"))
    results = []
    for budget in (10_000, 40, 1):
        actor = ActorWorker(ActorConfig(checkpoint, token_budget=budget), CPU)
        actor.model.optimizer.adamw.param_groups[0]["lr"] = 0.0
        gradients = {}
        actor.model.optimizer.adamw.step = lambda a=actor, g=gradients: g.update(
            {name: p.grad.clone() for name, p in a.module.model.named_parameters() if p.grad is not None}
        )
        metrics = actor.update(data, pg_loss, aggregation=aggregation)
        results.append((metrics, gradients))
    (first, expected), *others = results
    assert any("visual" in name for name in expected)
    for metrics, gradients in others:
        assert gradients.keys() == expected.keys()
        for name in ("actor/loss", "actor/mean_log_prob", "actor/grad_norm"):
            assert metrics[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6)
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-9, name


def test_permuting_the_rows_permutes_the_log_probs(checkpoint):
    data = training_batch(tiny_model("qwen2_5_vl"))
    reference = ReferenceWorker(PolicyConfig(checkpoint), CPU)
    order = torch.tensor([2, 0, 3, 1, 6, 5, 4])
    straight = reference.log_probs(data)["ref_log_prob"]
    torch.testing.assert_close(reference.log_probs(data[order])["ref_log_prob"], straight[order], atol=1e-6, rtol=0)


def test_minibatches_make_one_step_each(checkpoint):
    data = training_batch(tiny_model("qwen2_5_vl"))
    actor = ActorWorker(ActorConfig(checkpoint), CPU)
    actor.update(data, pg_loss, minibatch=3, epochs=2)
    assert actor.model.optimizer.steps == 4


def test_a_different_image_gives_different_log_probs(checkpoint):
    data = training_batch(tiny_model("qwen2_5_vl"))
    reference = ReferenceWorker(PolicyConfig(checkpoint), CPU)
    before = reference.log_probs(data)["ref_log_prob"]
    media = data["multi_modal_inputs"][1]  # of row 1 alone; row 4 points at the same object
    data["multi_modal_inputs"][1] = media | {"pixel_values": -media["pixel_values"]}
    after = reference.log_probs(data)["ref_log_prob"]
    assert (before[1] != after[1])[: int(data["response_mask"][1].sum())].all()
    torch.testing.assert_close(before[[0, 2, 3, 5]], after[[0, 2, 3, 5]], atol=1e-6, rtol=0)


def test_a_banned_token_in_a_response_is_named(checkpoint):
    data = training_batch(tiny_model("qwen2_5_vl"))
    data["input_ids"][2, -6] = 250
    reference = ReferenceWorker(PolicyConfig(checkpoint), CPU)
    with pytest.raises(InvalidColumn, match="row 2, response position 0: token 250"):
        reference.log_probs(data)


def test_wrong_shapes_are_refused_by_name_before_a_step(checkpoint):
    data = training_batch(tiny_model("qwen2_5_vl"))[:6]  # as many rows as response tokens: (B,) would broadcast
    actor = ActorWorker(ActorConfig(checkpoint), CPU)
    data.meta_info["max_tokens"] = 6
    whole, each_row = data["advantages"], data["advantages"].sum(1)
    for call in (actor.update, actor.accumulate, actor.forward_backward):
        data["advantages"] = each_row
        with pytest.raises(InvalidColumn, match=r"'advantages': expected \(6, 6\).* found \(6,\); give each token"):
            call(data, pg_loss)
        data.pop(["advantages"])
        data["advantages"] = whole.numpy()
        with pytest.raises(InvalidColumn, match=r"'advantages' is a numpy array: give the tensor torch\.as_tensor"):
            call(data, pg_loss)
        data.pop([], ["advantages"])
        data["advantages"] = whole
        for returned, message in (
            (lambda outputs: (outputs.log_probs.sum(1), {}), r"returned \(6,\) as '.*loss.*'"),
            (lambda outputs: (outputs.log_probs.mean(), {}), r"returned \(\) as '.*loss.*'"),
            (lambda outputs: (outputs.log_probs, {"kl": outputs.log_probs.sum(1)}), r"returned \(6,\) as 'kl'"),
            (lambda outputs: (outputs.log_probs, {"kl": 0.5}), "returned a float as 'kl'"),
        ):
            with pytest.raises(InvalidColumn, match=message):
                call(data, lambda outputs, rows, returned=returned: returned(outputs))
    actor.log_probs(data | DataProto.from_dict({"returns": each_row}))  # a pass that reads no such column
    assert actor.model.optimizer.steps == 0


def test_a_batch_without_response_tokens_makes_no_step(checkpoint):
    data = training_batch(tiny_model("qwen2_5_vl"))
    data["response_mask"] = torch.zeros_like(data["response_mask"])
    actor = ActorWorker(ActorConfig(checkpoint), CPU)
    with pytest.raises(InvalidColumn, match="none of the 7 rows"):
        actor.update(data, pg_loss)
    assert actor.model.optimizer.steps == 0


def test_a_missing_column_is_named(checkpoint):
    data = training_batch(tiny_model("qwen2_5_vl"))
    data.pop(batch_keys=["response_mask"])
    with pytest.raises(MissingColumn, match="response_mask"):
        ReferenceWorker(PolicyConfig(checkpoint), CPU).log_probs(data)


@pytest.mark.slow
def test_saving_and_loading_continues_to_the_bit(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    data = training_batch(model)
    actor, other = (ActorWorker(ActorConfig(str(tmp_path / "model")), CPU) for _ in range(2))
    actor.update(data, pg_loss)
    actor.save(tmp_path)
    other.load(tmp_path)
    ours, theirs = (worker.update(data, pg_loss) for worker in (actor, other))
    assert {"perf/throughput/actor", "timing_s/update_actor/backward"} <= ours.keys()
    assert learned(ours) == learned(theirs)
    for (name, a), (_, b) in zip(actor.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(a, b), name


def test_gradients_of_repeated_rows_are_added_in_a_fixed_order():
    """They equal those of a loop bit by bit with several threads. The gradient of an indexing operation does not."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 7, (20_000,), generator=generator)
    states = torch.randn(7, 64, generator=generator, requires_grad=True)
    gradient = torch.randn(len(index), 64, generator=generator)
    torch.testing.assert_close(select_rows(states, index), states[index], rtol=0, atol=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        select_rows(states, index).backward(gradient)
    finally:
        torch.set_num_threads(threads)
    expected = torch.zeros_like(states)
    for row, part in zip(index.tolist(), gradient, strict=True):
        expected[row] += part
    torch.testing.assert_close(states.grad, expected, rtol=0, atol=0)
