"""Adapters: they are all that is trained, weights that leave the worker have them merged, and training goes on from them."""

import pytest
import torch

from dataproto.errors import InvalidConfig
from helpers.batches import padded_log_probs, prompt_batch, with_responses
from helpers.tiny_models import CLASSES, MODEL_TYPES, tiny_config, tiny_model
from workers.actor import ActorConfig, ActorWorker
from workers.optimizer import OptimizerConfig
from workers.policy import ReferenceWorker

CPU = torch.device("cpu")


def rows(model_type):
    config = tiny_config(model_type)
    prompts = prompt_batch(config, [[(4, 6), (8, 4)], [], [(6, 6)]], texts=[4, 5, 3])
    data = with_responses(config, prompts, lengths=[5, 3, 4], width=5)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    return data


def pg_loss(outputs, rows):
    return -outputs.log_probs * rows["advantages"], {}


@pytest.fixture(params=MODEL_TYPES)
def model_type(request):
    return request.param


@pytest.fixture
def adapted(model_type, tmp_path):
    """An actor whose adapters have learnt something."""
    tiny_model(model_type).save_pretrained(tmp_path / "model")
    lora = {"lora_rank": 2, "lora_alpha": 8.0, "lora_vision": True}
    config = ActorConfig(str(tmp_path / "model"), **lora, optimizer=OptimizerConfig(lr=3e-2))
    actor = ActorWorker(config, CPU)
    before = actor.log_probs(rows(model_type))["old_log_probs"]
    for _ in range(2):
        actor.update(rows(model_type), pg_loss)
    assert (actor.log_probs(rows(model_type))["old_log_probs"] - before).abs().max() > 0.05
    return actor


def test_weights_handed_over_are_those_of_the_base_model_with_adapters_merged(adapted, model_type):
    data, model = rows(model_type), tiny_model(model_type)
    expected = adapted.log_probs(data)["old_log_probs"]
    weights = dict(adapted.named_weights())
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: parameter.shape for name, parameter in model.named_parameters()
    }
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, weights[name])}
    assert any("vision" in name or "visual" in name for name in changed)
    assert any(name.endswith("layers.1.self_attn.q_proj.weight") for name in changed)
    assert not any("embed_tokens" in name or "lm_head" in name or "norm" in name for name in changed)
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(padded_log_probs(model, data), expected, atol=1e-5, rtol=0)


def test_the_export_is_an_ordinary_checkpoint_and_training_goes_on_from_the_rest(adapted, model_type, tmp_path):
    import transformers

    data = rows(model_type)
    adapted.save(tmp_path / "saved")
    expected = adapted.log_probs(data)["old_log_probs"]
    merged = getattr(transformers, CLASSES[model_type][1]).from_pretrained(tmp_path / "saved" / "huggingface")
    with torch.no_grad():
        torch.testing.assert_close(padded_log_probs(merged, data), expected, atol=1e-5, rtol=0)
    other = ActorWorker(adapted.config, CPU)
    other.load(tmp_path / "saved")
    assert adapted.update(data, pg_loss)["actor/loss"] == other.update(data, pg_loss)["actor/loss"]
    assert torch.equal(adapted.log_probs(data)["old_log_probs"], other.log_probs(data)["old_log_probs"])


def test_the_frozen_policy_is_the_base_model(adapted, model_type):
    data = rows(model_type)
    reference = ReferenceWorker(adapted.config.frozen(), CPU)
    with torch.no_grad():
        expected = padded_log_probs(tiny_model(model_type), data)
    torch.testing.assert_close(reference.log_probs(data)["ref_log_prob"], expected, atol=1e-5, rtol=0)


def test_only_adapters_are_trained(tmp_path):
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    actor = ActorWorker(ActorConfig(str(tmp_path), lora_rank=2), CPU)
    trained = [name for name, parameter in actor.module.model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 7  # two matrices for each of two layers' seven linear ones
    assert all("language_model" in name and (".lora_A." in name or ".lora_B." in name) for name in trained)


def test_adapters_that_cannot_be_are_refused():
    with pytest.raises(InvalidConfig, match="lora_rank=-1"):
        ActorConfig("", lora_rank=-1)
    for options in ({}, {"lora_rank": 2, "freeze_vision": True}):
        with pytest.raises(InvalidConfig, match="lora_vision=True adapts the vision tower"):
            ActorConfig("", lora_vision=True, **options)
    adapted = ActorConfig("", lora_rank=2, lora_vision=True).frozen()
    assert (adapted.lora_rank, adapted.lora_vision) == (0, False)
