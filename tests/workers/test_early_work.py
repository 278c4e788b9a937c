"""What the host does ahead of the device: media of the next micro-batch, and optimizer steps that it does not wait for."""

from importlib import import_module
from pathlib import Path
from weakref import ref

import pytest
import torch

from dataproto import DataProto
from helpers.layouts import mixed_rows
from helpers.rank_actors import rows_of
from helpers.second_device import DEVICE, second_device
from helpers.tiny_models import tiny_model
from workers import ActorConfig
from workers.roles.actor import ActorWorker
from workers.training import micro_batches as planning
from workers.training import training_model
from workers.training.forward_pass import media_tokens
from workers.training.optimizer import Optimizer, OptimizerConfig

FAMILIES = ("qwen2_5_vl", "internvl")  # the second has a projector outside of its tower


@pytest.fixture
def actor(tmp_path: Path, request: pytest.FixtureRequest) -> ActorWorker:
    tiny_model(request.param).save_pretrained(tmp_path)
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=0.1)
    return ActorWorker(ActorConfig(str(tmp_path), token_budget=30, optimizer=optimizer), torch.device("cpu"))


def pg_loss(outputs, data):
    return -outputs.log_probs * data["advantages"], {}


def tower_of(actor: ActorWorker) -> torch.nn.Module:
    return actor.module.model.get_submodule(actor.module.family.vision_tower)


@pytest.mark.parametrize("actor", FAMILIES[:1], indirect=True)
def test_media_of_all_rows_count_and_those_of_a_shared_prompt_once(actor):
    data = mixed_rows(actor.module.model.config)
    types = data["mm_token_type_ids"]
    alone = [int((row != 0).sum()) for row in types]
    assert [media_tokens(actor.module, data[[row]]) for row in range(len(data))] == alone
    row = alone.index(max(alone))
    assert alone[row] > 0
    assert media_tokens(actor.module, data[[row, row]]) == alone[row]  # all of its media lie in its prompt


@pytest.mark.parametrize(("actor", "patches"), [("qwen2_5_vl", 4), ("minicpmv4_6", 16)], indirect=["actor"])
def test_a_micro_batch_with_many_patches_is_not_encoded_early(actor, patches, monkeypatch):
    """Of a token a tower has 4 patches, or 16, and by these its work and its activations grow."""
    data = rows_of(actor)
    (part,) = planning.micro_batches(data, actor.module, 10_000)
    most = patches * media_tokens(actor.module, part.rows)
    for limit, early in ((most, True), (most - 1, False)):
        monkeypatch.setattr(planning, "EARLY", limit)
        (part,) = planning.micro_batches(data, actor.module, 10_000)
        assert part.early is early


@pytest.mark.parametrize("actor", FAMILIES, indirect=True)
@pytest.mark.parametrize("early", [True, False])
def test_the_tower_is_ahead_of_the_backward_pass(actor, early, monkeypatch):
    """At each loss, the media of this micro-batch have been encoded, and early those of the next one."""
    monkeypatch.setattr(planning, "EARLY", planning.EARLY if early else -1)
    data = rows_of(actor)
    parts = planning.micro_batches(data, actor.module, 30)
    towers = [part.tower for part in parts]
    calls: list[int] = []
    tower_of(actor).register_forward_hook(lambda *_: calls.append(1))
    found: list[int] = []

    def loss(outputs, rows):
        found.append(len(calls))
        return pg_loss(outputs, rows)

    actor.update(data, loss)
    assert len(parts) > 2
    assert found == [sum(towers[: number + 1 + early]) for number in range(len(parts))]


@pytest.mark.parametrize("actor", FAMILIES[:1], indirect=True)
def test_no_micro_batch_keeps_its_media_during_its_backward_pass(actor, monkeypatch):
    """Those of the next one are there already."""
    held: list[ref] = []
    inputs_of = training_model.inputs_of

    def noted(*args):
        made = inputs_of(*args)
        if made.media is not None:
            held.append(ref(made.media))
        return made

    monkeypatch.setattr(training_model, "inputs_of", noted)
    monkeypatch.setattr(planning, "EARLY", -1)
    counts: list[int] = []

    def loss(outputs, rows):
        counts.append(sum(each() is not None for each in held))
        return pg_loss(outputs, rows)

    actor.update(rows_of(actor), loss)
    assert len(counts) > 2
    assert max(counts) == 1


@pytest.mark.parametrize("actor", FAMILIES[:1], indirect=True)
def test_an_update_keeps_no_copies_of_the_rows_of_its_mini_batches(actor):
    held: list[ref] = []
    with actor.model.updating(rows_of(actor)[:6], minibatch=2, epochs=2) as update:
        for rows, sums in update.minibatches():
            held.append(ref(rows))
            actor.model.run(rows, pg_loss, sums)
            assert sum(each() is not None for each in held) <= 2
    assert len(held) > 4


@pytest.mark.parametrize("actor", FAMILIES, indirect=True)
def test_early_media_change_no_result(actor, tmp_path, monkeypatch):
    """Scores, metrics and weights after two mini-batches, to the last bit."""
    data = rows_of(actor)
    actor.save(tmp_path / "before")

    def results() -> tuple[DataProto, dict[str, float], list[torch.Tensor]]:
        actor.load(tmp_path / "before")
        scores = actor.log_probs(data)
        metrics = actor.update(data, pg_loss, minibatch=3, epochs=2)
        return scores, metrics, [weight.detach().clone() for weight in actor.module.parameters()]

    scores, metrics, weights = results()
    monkeypatch.setattr(planning, "EARLY", -1)
    others = results()
    assert torch.equal(scores["old_log_probs"], others[0]["old_log_probs"])
    stays = [name for name in metrics if not name.startswith(("timing_s/", "perf/"))]
    assert [metrics[name] for name in stays] == [others[1][name] for name in stays]
    assert all(map(torch.equal, weights, others[2]))


@pytest.mark.parametrize("actor", FAMILIES[:1], indirect=True)
def test_the_host_waits_for_the_device_once_in_an_update(actor, monkeypatch):
    """Between its mini-batches it reads neither norms nor sums."""
    kernels = import_module("torch.optim.optimizer")
    known = kernels._get_fused_kernels_supported_devices()
    monkeypatch.setattr(kernels, "_get_fused_kernels_supported_devices", lambda: [*known, DEVICE.type])
    data, model = rows_of(actor), actor.model
    expected = ActorWorker(actor.config, torch.device("cpu")).update(data, pg_loss, minibatch=3)
    with second_device() as waits:
        model.module.to(DEVICE)
        model.device = DEVICE
        model._optimizer = Optimizer(model.module.parameters(), actor.config.optimizer)
        waits.clear()
        with model.updating(data, minibatch=3) as update:
            for rows, sums in update.minibatches():
                model.run(rows, pg_loss, sums)
            assert model.optimizer.steps > 1
            assert waits == []
        assert waits != []
    for name in ("actor/loss", "actor/grad_norm"):
        assert update.result.metrics[name] == pytest.approx(expected[name], rel=1e-4)
