"""Passes without gradients: their results, to the bit, and how often they copy, gather and compute."""

from unittest.mock import patch

import pytest
import torch

from dataproto import DataProto
from helpers.batches import prompt_batch, with_responses
from helpers.tiny_models import FURTHER_TYPES, VLM_TYPES, tiny_config, tiny_model
from workers import launch
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.model_worker import PolicyConfig, ReferenceWorker
from workers.roles.reference import BaseReferenceWorker, reference_worker

CPU = torch.device("cpu")


def rows(model_type: str = "qwen2_5_vl") -> DataProto:
    """Samples of a prompt with an image, of one with two, and of one without."""
    config = tiny_config(model_type)
    prompts = prompt_batch(config, [[(4, 6)], [], [(6, 6), (4, 4)]], texts=[4, 7, 5])[[0, 0, 1, 1, 2, 2]]
    data = with_responses(config, prompts, lengths=[5, 3, 1, 6, 2, 4], width=6)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    return data


def pg_loss(outputs, data):
    return -outputs.log_probs * data["advantages"], {}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    def path_of(model_type: str) -> str:
        path = folder / model_type
        if not path.exists():
            tiny_model(model_type).save_pretrained(path)
        return str(path)

    folder = tmp_path_factory.mktemp("scored")
    return path_of


def test_results_stay_on_the_device_until_the_call_ends(checkpoint):
    """One copy to the host for all micro-batches, of log-probs and entropies together, and the same numbers."""
    actor = ActorWorker(ActorConfig(checkpoint("qwen2_5_vl"), scoring_token_budget=25), CPU)
    whole = ActorWorker(ActorConfig(checkpoint("qwen2_5_vl")), CPU)
    data, copied, to_host = rows(), [], torch.Tensor.cpu

    def counted(tensor):
        copied.append(tuple(tensor.shape))
        return to_host(tensor)

    assert len(actor.model.micro_batches(data, backward=False)) > 2
    with patch("workers.training.training_model.check_rows"), patch.object(torch.Tensor, "cpu", counted):
        found = actor.log_probs(data, entropy=True)
    assert [shape for shape in copied if len(shape) == 3] == [(2, 6, 6)]
    assert not [shape for shape in copied if shape in ((1, 6), (2, 6))]  # those of a micro-batch
    expected = whole.log_probs(data, entropy=True)
    for name in ("old_log_probs", "entropys"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0)


def test_passes_without_gradients_have_a_budget_of_their_own(checkpoint):
    """Twice that of an update unless the options say otherwise; also for `forward`, which trains step by step."""
    data = rows()
    for options, passes in (({}, 2), ({"scoring_token_budget": 10_000}, 1)):
        actor = ActorWorker(ActorConfig(checkpoint("qwen2_5_vl"), token_budget=20, **options), CPU)
        calls: list[int] = []
        actor.module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        actor.log_probs(data)
        assert len(calls) == passes
        calls.clear()
        actor.forward(data, pg_loss)
        assert len(calls) == passes
        calls.clear()
        actor.update(data, pg_loss)
        assert len(calls) == len(actor.model.micro_batches(data)) > passes


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5"])
def test_the_reference_stores_bfloat16_alone(checkpoint, model_type):
    """Its log-probs are those of a model with float32 weights that computes in bfloat16, to the bit."""
    path, data = checkpoint(model_type), rows(model_type)
    reference = ReferenceWorker(PolicyConfig(path, dtype="bfloat16"), CPU)
    actor = ActorWorker(ActorConfig(path, dtype="bfloat16"), CPU)
    assert torch.equal(reference.log_probs(data)["ref_log_prob"], actor.log_probs(data)["old_log_probs"])
    family = reference.module.family
    kinds = {name: weight.dtype for name, weight in reference.module.model.named_parameters()}
    assert set(kinds.values()) <= {torch.bfloat16, torch.float32}
    assert [name for name, kind in kinds.items() if kind == torch.float32] == [
        name for name in kinds if family.in_float32(name)
    ]
    assert {weight.dtype for weight in actor.module.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", pytest.param("qwen3_vl_moe", marks=pytest.mark.long)])
def test_with_adapters_the_reference_is_the_actors_base(checkpoint, model_type):
    """No second model; the same log-probs as with one, to the bit, while the actor's change with its adapters."""
    data = rows(model_type)
    config = ActorConfig(checkpoint(model_type), lora_rank=2, lora_vision=True)
    with launch(config, config.frozen()) as roles:
        actor, reference = roles.actor.worker, roles.reference.worker
        assert isinstance(reference, BaseReferenceWorker)
        assert reference.module is actor.module
        separate = ReferenceWorker(config.frozen(), CPU).log_probs(data)["ref_log_prob"]
        before = {name: weight.requires_grad for name, weight in actor.module.named_parameters()}
        for _ in range(3):
            actor.update(data, pg_loss)
        for weight in actor.model.optimizer.parameters:
            weight.data.add_(0.1)
        changed = actor.log_probs(data)["old_log_probs"]
        assert torch.equal(roles.reference.log_probs(data)["ref_log_prob"], separate)
        assert torch.equal(actor.log_probs(data)["old_log_probs"], changed)
        assert (changed - separate).abs().max() > 0.01
        assert {name: weight.requires_grad for name, weight in actor.module.named_parameters()} == before
    other = reference_worker(PolicyConfig(checkpoint(model_type), temperature=0.5), actor)
    assert other.module is not actor.module  # another policy than the base


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"freeze_vision": True}, pytest.param({"lora_rank": 2}, marks=pytest.mark.long)])
def test_a_tower_that_is_not_trained_runs_once_a_step(checkpoint, options):
    """Old log-probs, reference and both epochs of the update share its features, whatever the micro-batches are."""
    config = ActorConfig(checkpoint("qwen2_5_vl"), token_budget=25, scoring_token_budget=40, **options)
    actor = ActorWorker(config, CPU)
    reference, plain = reference_worker(config.frozen(), actor), ActorWorker(config, CPU)
    plain.module.kept = None
    data, runs = rows(), []
    for module in {actor.module, reference.module}:
        tower = module.model.get_submodule(module.family.vision_tower)
        tower.register_forward_pre_hook(lambda *_, **__: runs.append(1))
    for _ in range(2):
        runs.clear()
        torch.testing.assert_close(
            actor.log_probs(data)["old_log_probs"], plain.log_probs(data)["old_log_probs"], atol=1e-5, rtol=0
        )
        assert len(runs) == len([part for part in actor.model.micro_batches(rows(), backward=False) if part.tower])
        reference.log_probs(data)
        ours, theirs = (each.update(data, pg_loss, minibatch=2, epochs=2) for each in (actor, plain))
        assert len(runs) <= 2  # two images, in one micro-batch or in two
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
    for (name, weight), (_, expected) in zip(actor.named_weights(), plain.named_weights(), strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=0, msg=name)


def test_features_are_kept_of_towers_that_are_not_trained_alone(checkpoint):
    path = checkpoint("qwen2_5_vl")
    trained = ActorWorker(ActorConfig(path), CPU)
    assert trained.module.kept is None
    assert ActorWorker(ActorConfig(path, lora_rank=2, lora_vision=True), CPU).module.kept is None
    frozen = ActorWorker(ActorConfig(path, freeze_vision=True), CPU)
    assert reference_worker(frozen.config.frozen(), frozen).module.kept is frozen.module.kept is not None
    assert reference_worker(trained.config.frozen(), trained).module.kept is None
    changed, data = rows(), rows()
    before = frozen.log_probs(data)["old_log_probs"]
    media = changed["multi_modal_inputs"]
    media[0]["pixel_values"].mul_(-1)  # in place: the same memory holds another picture
    other = frozen.log_probs(changed)["old_log_probs"]
    assert not torch.equal(other, before)
    frozen.module.forget_features()
    assert torch.equal(frozen.log_probs(changed)["old_log_probs"], other)
    frozen.module.kept.max_bytes = 0
    torch.testing.assert_close(frozen.log_probs(data)["old_log_probs"], before, atol=1e-5, rtol=0)


KEEPING = ["smolvlm", "minicpmv4_6", "gemma3"]
"""Families whose rows say more of an image than the tower takes, and one that does not."""
OTHERS = [each for each in (*VLM_TYPES, *FURTHER_TYPES) if each not in KEEPING]


@pytest.mark.parametrize("model_type", [*KEEPING, *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)])
def test_kept_features_of_every_family_are_those_of_its_tower(checkpoint, model_type):
    config, data = ActorConfig(checkpoint(model_type), token_budget=25, freeze_vision=True), rows(model_type)
    actor, plain = ActorWorker(config, CPU), ActorWorker(config, CPU)
    plain.module.kept = None
    expected = plain.log_probs(data)["old_log_probs"]
    for part in ([0, 1, 2, 3, 4, 5], [4, 5], [0, 2, 5]):
        found = actor.log_probs(data[part])["old_log_probs"]
        torch.testing.assert_close(found, expected[part], atol=1e-5, rtol=0)
    assert actor.module.kept._kept
    ours, theirs = (each.update(data, pg_loss) for each in (actor, plain))
    assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_no_more_features_are_kept_than_there_is_room_for(checkpoint, model_type):
    """Within a call too. The tower then runs in each pass for the others."""
    config = ActorConfig(checkpoint(model_type), token_budget=25, scoring_token_budget=25, freeze_vision=True)
    actor, plain = ActorWorker(config, CPU), ActorWorker(config, CPU)
    kept, plain.module.kept = actor.module.kept, None
    family, model = actor.module.family, actor.module.model.config
    one = (1 + family.deep_layers(model)) * model.get_text_config().hidden_size * 4  # bytes of a feature
    kept.max_bytes, sizes, runs = 10 * one, [], []

    def measure(*_):
        sizes.append(sum(held.mine.untyped_storage().nbytes() for _, held in kept._kept.values()))

    actor.module.register_forward_hook(measure)
    tower = actor.module.model.get_submodule(actor.module.family.vision_tower)
    tower.register_forward_pre_hook(lambda *_, **__: runs.append(1))
    data = rows(model_type)
    for _ in range(2):
        ours, theirs = (each.log_probs(data)["old_log_probs"] for each in (actor, plain))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert max(sizes) == sizes[-1] == 6 * one  # of the first prompt; the other one's 13 have no room
    whole = len([part for part in plain.model.micro_batches(data, backward=False) if part.tower])
    assert whole < len(runs) < 2 * whole
    actor.log_probs(rows(model_type)[2:])  # other media; those of an earlier call go first
    ours, theirs = (each.update(data, pg_loss, minibatch=2, epochs=2) for each in (actor, plain))
    assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
    assert max(sizes) <= kept.max_bytes
    assert not kept._kept


def test_adapters_are_on_again_after_an_error(checkpoint):
    config = ActorConfig(checkpoint("qwen2_5_vl"), lora_rank=2)
    actor = ActorWorker(config, CPU)
    for weight in actor.model.optimizer.parameters:
        weight.data.add_(0.1)
    data, reference = rows(), reference_worker(config.frozen(), actor)
    expected = actor.log_probs(data)["old_log_probs"]
    with pytest.raises(Exception, match="input_ids"):
        reference.log_probs(DataProto.from_dict({"response_mask": torch.ones(1, 1)}))
    assert torch.equal(actor.log_probs(data)["old_log_probs"], expected)
