"""What stays unsharded where the options leave it open: from the memory that calls took, the same on all ranks."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from helpers.batches import prompt_batch, with_responses
from helpers.processes import check_all_passed, run_ranks, shared_folder, sharing
from helpers.tiny_models import tiny_config, tiny_model
from workers.parallel.fsdp import GatheredBytes, gathered_bytes, layer_groups, sharded_parts, weight_groups
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.reference import reference_worker
from workers.training import training_model
from workers.training.memory import DeviceMemory
from workers.training.training_model import Unsharding, device_share

MODEL = "qwen2_5_vl"
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SIZES = [("blocks", 19), ("layers", 2)]


def test_the_share_counts_what_others_hold_and_not_what_a_sleeping_engine_gave_back(monkeypatch):
    """torch counts 50 reserved, 30 of which a sleeping engine has returned, and others hold 5: 45 are its own at the peak."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 75)
    monkeypatch.setattr(DeviceMemory, "of", classmethod(lambda cls, device: cls(reserved=50, used=25, total=100)))
    assert device_share(CUDA) == 0.5


def test_less_stays_unsharded_after_the_allocator_has_retried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    choice = Unsharding(CUDA, GatheredBytes(weights=10, gradients=20))
    assert choice.choose([choice.fitting(0.3, learns=False)]) == "scoring"
    assert choice.choose([choice.fitting(0.6, learns=True)]) == "gradients"
    assert choice.after_update({"perf/allocator_retries": 0}) == "gradients"
    assert choice.after_update({"perf/allocator_retries": 7}) == "weights"
    assert [choice.after_update({"perf/allocator_retries": 1}) for _ in range(2)] == ["scoring", "scoring"]


def test_a_choice_for_scoring_does_not_take_back_that_for_updates(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    choice = Unsharding(CUDA, GatheredBytes(weights=10, gradients=20))
    assert choice.choose([choice.fitting(0.6, learns=True)]) == "gradients"
    assert choice.choose([choice.fitting(0.95, learns=False)]) == "gradients"


def counts_each_weight_once(module, elements):
    extra = gathered_bytes(module)
    assert extra.weights == pytest.approx(4 * elements, rel=0.01)  # float32 on a CPU; shards may be uneven
    assert extra.gradients == pytest.approx(2 * elements, rel=0.01)  # half of them is a rank's own shard


def modules_that_are_gathered_together(model_type):
    """Projections of recurrent layers, and blocks of a tower: each group counts once."""
    actor = ActorWorker(ActorConfig(str(shared_folder() / model_type)), CPU, init_ranks(Layout(dp=2), CPU))
    module = actor.module
    counts_each_weight_once(module, sum(weight.numel() for weight in module.parameters()))
    assert len(sharded_parts(module)) == len(list(weight_groups(module)))


def test_blocks_of_a_tower_are_gathered_together_and_decoder_layers_alone():
    model = torch.nn.ModuleDict(
        {name: torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(count)) for name, count in SIZES}
    )
    family = SimpleNamespace(repeated_layers=("blocks", "layers"), decoder_layers="layers")
    groups = layer_groups(SimpleNamespace(model=model, family=family))
    assert [len(group) for group in groups] == [8, 8, 3, 1, 1]
    assert [layer for group in groups for layer in group] == [*model["blocks"], *model["layers"]]


def chosen_on_ranks(shares, gradients):
    """Rank 1 has room for weights only. Two updates decide; the third uses it."""
    ranks = init_ranks(Layout(dp=2), CPU)
    actor = ActorWorker(ActorConfig(str(shared_folder() / MODEL), token_budget=25), CPU, ranks)
    model = actor.model
    elements = sum(weight.numel() for weight in model.module.parameters())
    counts_each_weight_once(model.module, elements)
    assert isinstance(model.module, FSDPModule)
    model._unsharding = Unsharding(CPU, GatheredBytes(10, gradients[ranks.rank("dp")]))  # as on CUDA
    model._leave_unsharded("nothing")
    config = tiny_config(MODEL)
    data = with_responses(config, prompt_batch(config, [[(4, 6)], []], texts=[6, 5], seed=0), lengths=[5, 4], width=6)

    def update():
        metrics = actor.update(data, lambda outputs, rows: (-outputs.log_probs, {}))
        return (
            metrics["perf/unsharded/actor"],
            model.config.unsharded,
            {each.options.unsharded for each in model.transforms},
        )

    with (
        patch.object(training_model, "device_share", lambda device: shares[ranks.rank("dp")]),
        patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100)),
    ):
        assert update() == (0.0, "nothing", {"nothing"})
        assert update() == (2.0, "weights", {"weights"})
        assert update() == (2.0, "weights", {"weights"})


def test_all_ranks_choose_what_fits_on_the_fullest(tmp_path):
    """The device of rank 1 is fuller; or its shards are larger, as uneven ones are."""
    for model_type in (MODEL, "qwen3_5"):
        tiny_model(model_type).save_pretrained(tmp_path / model_type)
    cases = {
        "fuller": partial(chosen_on_ranks, shares=(0.5, 0.8), gradients=(20, 20)),
        "uneven": partial(chosen_on_ranks, shares=(0.65, 0.65), gradients=(10, 20)),
        "recurrent": partial(modules_that_are_gathered_together, "qwen3_5"),
    }
    with sharing(tmp_path):
        outcomes = run_ranks(2, cases, tmp_path)
    for name in cases:
        check_all_passed(outcomes[name])


@pytest.mark.parametrize("asked", ["auto", "weights"])
def test_a_cpu_chooses_nothing(asked, tmp_path):
    tiny_model(MODEL).save_pretrained(tmp_path)
    actor = ActorWorker(ActorConfig(str(tmp_path), unsharded=asked))
    assert actor.model.config.unsharded == asked


def test_room_is_left():
    assert training_model.most_that_fits(0.94, 100, GatheredBytes(0, 0), learns=True) == "gradients"
    assert training_model.most_that_fits(0.95, 100, GatheredBytes(0, 0), learns=True) == "nothing"


def test_what_the_first_step_scores_does_not_choose(tmp_path, monkeypatch):
    """An adapted model scores twice before the first update, after which the optimizer's state takes memory."""
    tiny_model(MODEL).save_pretrained(tmp_path)
    config = ActorConfig(str(tmp_path), lora_rank=2)
    actor = ActorWorker(config)
    reference = reference_worker(config.frozen(), actor)
    made = []
    monkeypatch.setattr(training_model, "device_share", lambda device: made.append(device) or 0.5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    actor.model._unsharding = Unsharding(CPU, GatheredBytes(weights=10, gradients=20))  # as on CUDA
    tiny = tiny_config(MODEL)
    data = with_responses(tiny, prompt_batch(tiny, [[(4, 6)], []], texts=[6, 5], seed=0), lengths=[5, 4], width=6)

    for chosen in (0, 1):
        actor.log_probs(data)
        reference.log_probs(data)
        assert len(made) == chosen
