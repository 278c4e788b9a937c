"""Adapters over a base in 4 bits: what is computed, learnt, handed over, exported, resumed and spread over ranks."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from dataproto.errors import InvalidConfig
from helpers.batches import padded_log_probs, prompt_batch, with_responses
from helpers.processes import run_ranks
from helpers.tiny_models import CLASSES, tiny_config, tiny_model
from workers.model.model_config import ModelConfig
from workers.model.named_weights import named_weights
from workers.model.quantized import dense, four_bit
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.reference import BaseReferenceWorker, reference_worker
from workers.training import loading
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig

pytestmark = pytest.mark.torchao
CPU = torch.device("cpu")
LEVELS = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
LEVELS += (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)


def rows(model_type="qwen2_5_vl"):
    config = tiny_config(model_type)
    media = [[], [], []] if model_type == "qwen3" else [[(4, 6), (8, 4)], [], [(6, 6)]]
    data = with_responses(config, prompt_batch(config, media, texts=[4, 5, 3]), lengths=[5, 3, 4], width=5)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    return data


def loss(outputs, data):
    return -outputs.log_probs * data["advantages"], {}


@pytest.fixture(scope="module", autouse=True)
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("four_bit")
    for name in ("qwen2_5_vl", "qwen3", "qwen3_5"):
        tiny_model(name).save_pretrained(root / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_FOUR_BIT_FOLDER", str(root))
        yield root


def folder():
    return Path(os.environ["TEST_FOUR_BIT_FOLDER"])


def actor(model_type="qwen2_5_vl", layout=None, **options):
    ranks = Ranks() if layout is None else init_ranks(layout, CPU)
    options = {"lora_rank": 4, "load_in_4bit": True, "optimizer": OptimizerConfig(lr=3e-2)} | options
    return ActorWorker(ActorConfig(str(folder() / model_type), **options), CPU, ranks)


def test_numbers_are_rounded_to_the_nearest_of_sixteen():
    """Beside a rounding of our own: blocks of 64 by their largest number, of which torchao keeps 8 bits."""
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    blocks = weight.view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / largest).unsqueeze(-1).sub(torch.tensor(LEVELS)).abs().argmin(-1)
    expected = torch.tensor(LEVELS)[nearest] * largest
    rounded = four_bit(weight, "weight")
    assert (rounded.shape, rounded.dtype, rounded.requires_grad) == (weight.shape, weight.dtype, False)
    torch.testing.assert_close(dense(rounded), expected.view(128, 128), atol=0.02, rtol=0)
    kept = rounded.quantized_data.nbytes + rounded.quantized_scalers.nbytes + rounded.quantization_factor.nbytes
    assert kept == 128 * 128 // 2 + 256 + 4


def test_a_weight_that_cannot_be_rounded_is_named():
    with pytest.raises(InvalidConfig, match=r"layers\.0\.weight has 30 numbers"):
        four_bit(torch.randn(5, 6), "layers.0.weight")
    with pytest.raises(InvalidConfig, match=r"layers\.0\.weight cannot be rounded"):
        four_bit(torch.ones(64, 64).fill_diagonal_(torch.inf), "layers.0.weight")


def test_options_that_do_not_go_together_are_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="lora_rank above 0"):
        ModelConfig(load_in_4bit=True)
    tiny_model("qwen3_vl_moe").save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match="fused experts"):
        ActorWorker(ActorConfig(str(tmp_path), lora_rank=2, load_in_4bit=True), CPU)


@pytest.mark.parametrize(
    "model_type", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3", "qwen3_5"))]
)
def test_the_policy_is_the_rounded_model_with_its_adapters(model_type, tmp_path):
    """Before and after an update, beside Hugging Face's own forward pass over the exported weights."""
    data, worker = rows(model_type), actor(model_type)
    reference = reference_worker(worker.config.frozen(), worker)
    assert isinstance(reference, BaseReferenceWorker)
    first = worker.log_probs(data)["old_log_probs"]
    rounded, whole = dict(worker.named_weights()), dict(named_weights(tiny_model(model_type)))
    changed = {name for name in whole if not torch.equal(rounded[name], whole[name])}
    assert changed
    assert all((".layers." in name and name.endswith("proj.weight")) or "in_proj" in name for name in changed)
    assert not any("visual" in name or "norm" in name for name in changed)
    for _ in range(3):
        worker.update(data, loss)
    learnt = worker.log_probs(data)["old_log_probs"]
    assert (learnt - first).abs().max() > 0.02
    torch.testing.assert_close(reference.log_probs(data)["ref_log_prob"], first, atol=1e-5, rtol=0)
    worker.save(tmp_path / "saved")
    merged = getattr(transformers, CLASSES[model_type][1]).from_pretrained(tmp_path / "saved" / "huggingface")
    with torch.no_grad():
        torch.testing.assert_close(padded_log_probs(merged, data), learnt, atol=2e-5, rtol=0)
    again = actor(model_type)
    again.load(tmp_path / "saved")
    assert torch.equal(again.log_probs(data)["old_log_probs"], learnt)
    assert again.update(data, loss)["actor/loss"] == worker.update(data, loss)["actor/loss"]


def test_gradients_of_adapters_are_those_of_the_expanded_weights():
    worker, data = actor(), rows()
    expanded = actor(load_in_4bit=False)
    with torch.no_grad():
        weights = dict(worker.module.model.named_parameters())
        for name, weight in expanded.module.model.named_parameters():
            weight.copy_(dense(weights[name]))
    for each in (worker, expanded):
        each.forward_backward(data, loss)
    theirs = dict(expanded.module.model.named_parameters())
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    for name in trained:
        torch.testing.assert_close(weights[name].grad, theirs[name].grad, atol=1e-5, rtol=1e-4, msg=name)


def test_frozen_weights_in_bfloat16_give_the_same_numbers_to_the_bit(monkeypatch):
    """Those under adapters and those of a frozen tower, which are stored in the numbers that the model computes with."""
    data, scores = rows(), []
    for stored in (loading.store_in_half, lambda *_: None):
        monkeypatch.setattr(loading, "store_in_half", stored)
        worker = actor(load_in_4bit=False, dtype="bfloat16")
        kinds = {weight.dtype for weight in worker.module.parameters() if not weight.requires_grad}
        assert kinds == ({torch.bfloat16} if not scores else {torch.float32})
        assert all(weight.dtype == torch.float32 for weight in worker.module.parameters() if weight.requires_grad)
        worker.update(data, loss)
        scores.append(worker.log_probs(data)["old_log_probs"])
    assert torch.equal(*scores)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_layers_compute_the_same():
    data, plain, compiled = rows("qwen3"), actor("qwen3"), actor("qwen3", compile=True)
    for worker in (plain, compiled):
        worker.update(data, loss)
    expected = plain.log_probs(data)["old_log_probs"]
    torch.testing.assert_close(compiled.log_probs(data)["old_log_probs"], expected, atol=1e-4, rtol=0)


# Over two processes


def learns_as_one_process(layout, atol, **options):
    alone, spread = actor(**options), actor(layout=layout, **options)
    whole = {layer.weight for layer in loading.base_layers(spread.module.model, spread.module.family).values()}
    assert all(hasattr(weight, "get_original_weight") for weight in whole)
    for _ in range(2):
        alone.update(rows(), loss)
        ranks = spread.model.ranks
        spread.update(share_out(rows(), ranks.size("dp"))[ranks.rank("dp")], loss)
    expected = dict(alone.named_weights())
    for name, weight in spread.named_weights():
        torch.testing.assert_close(weight.float(), expected[name].float(), atol=atol, rtol=0, msg=name)


def is_refused():
    with pytest.raises(InvalidConfig, match="tp=1"):
        actor(layout=Layout(tp=2))


SCENARIOS = {
    "dp 2": partial(learns_as_one_process, Layout(dp=2), 1e-3),
    "sp 2": partial(learns_as_one_process, Layout(sp=2), 1e-3),
    "pp 2": partial(learns_as_one_process, Layout(pp=2), 1e-3),
    "dp 2, bfloat16": partial(learns_as_one_process, Layout(dp=2), 0.15, dtype="bfloat16"),
    "tp 2": is_refused,
}


@pytest.mark.long
def test_over_two_processes(tmp_path):
    found = run_ranks(2, SCENARIOS, tmp_path)
    failures = [
        f"{name}, rank {rank}: {each}" for name, ranks in found.items() for rank, each in enumerate(ranks) if each
    ]
    assert not failures, "\n".join(failures)
