"""Weights and optimizer state in host memory between calls: the same numbers, and nothing on the device meanwhile."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from dataproto.errors import InvalidConfig
from helpers.batches import prompt_batch, with_responses
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_config, tiny_model
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.model_worker import ReferenceWorker
from workers.roles.reference import reference_worker
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig
from workers.training.residence import HostCopies, storages_of

CPU = torch.device("cpu")
OPTIONS = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "adapters": {"lora_rank": 4, "dtype": "bfloat16"},
    "muon": {"optimizer": OptimizerConfig(lr=1e-2, kind="muon")},
    "adamw8bit": {"optimizer": OptimizerConfig(lr=1e-2, kind="adamw8bit")},
    "4 bits": {"lora_rank": 4, "load_in_4bit": True},
}
FURTHER = [
    pytest.param(name, marks=[pytest.mark.long, *[pytest.mark.torchao] * (name in ("adamw8bit", "4 bits"))])
    for name in OPTIONS
    if name != "bfloat16"
]
CASES = ["bfloat16", *FURTHER]


@pytest.fixture(scope="module", autouse=True)
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("residence")
    tiny_model("qwen2_5_vl").save_pretrained(root / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_RESIDENCE_FOLDER", str(root))
        yield root


def folder():
    return Path(os.environ["TEST_RESIDENCE_FOLDER"])


def actor(offload_idle, layout=None, **options):
    ranks = Ranks() if layout is None else init_ranks(layout, CPU)
    options = {"optimizer": OptimizerConfig(lr=1e-2)} | options
    return ActorWorker(ActorConfig(str(folder() / "model"), offload_idle=offload_idle, **options), CPU, ranks)


def rows(worker):
    config = tiny_config("qwen2_5_vl")
    prompts = prompt_batch(config, [[(4, 6)], [], [(6, 6)], []], texts=[4, 5, 6, 7])
    data = with_responses(config, prompts, lengths=[2, 3, 4, 2], width=4)
    return share_out(data, worker.model.ranks.size("dp"))[worker.model.ranks.rank("dp")]


def loss(outputs, data):
    return -outputs.log_probs, {}


def on_device(worker):
    """Bytes of weights and moments."""
    return bytes_of(worker.module.parameters()) + (moment_bytes(worker) if worker.trains else 0)


def moment_bytes(worker):
    """Bytes of the optimizer's moments on the device."""
    states = worker.model.optimizer.moments.values()
    return bytes_of(each for state in states for each in state.values() if each.ndim)


def bytes_of(tensors):
    return sum({each._cdata: each.nbytes() for tensor in tensors for each in storages_of(tensor)}.values())


def half_copies(worker):
    """Bytes of the bfloat16 copies that passes compute with."""
    half = worker.model.precision.half_weights
    return 0 if half is None else bytes_of(half.copies.values())


def calls(worker, directory):
    """A step of a run, twice, with everything that uses weights: what came out."""
    found = []
    for number in range(2):
        data = rows(worker)
        found.append(worker.log_probs(data)["old_log_probs"])
        worker.update(data, loss, minibatch=2)
        worker.forward_backward(data, loss)
        worker.optim_step()
        found += [weight.clone() for _, weight in worker.named_weights()]
        worker.save(directory / f"{number}")
    worker.load(directory / "0")
    worker.update(rows(worker), loss)
    return [*found, *(weight.clone() for _, weight in worker.named_weights())]


def same_as_ever(directory, **options):
    ever, idle = actor(False, **options), actor(True, **options)
    assert on_device(idle) == 0 < on_device(ever)
    expected, found = calls(ever, directory / "ever"), calls(idle, directory / "idle")
    assert on_device(idle) == half_copies(idle) == 0
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    with idle.model.residence.using(moments=True):
        assert on_device(idle) >= on_device(ever)  # FSDP pads shards


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nothing_stays_and_nothing_changes(tmp_path, name):
    same_as_ever(tmp_path, **OPTIONS[name])


def test_a_reference_comes_for_its_scores_alone_and_is_copied_once(monkeypatch):
    worker = actor(True)
    reference = reference_worker(worker.config.frozen(), worker)
    expected = ReferenceWorker(actor(False).config.frozen(), CPU).log_probs(rows(worker))["ref_log_prob"]
    copied = []
    copy = HostCopies._copy
    monkeypatch.setattr(
        HostCopies, "_copy", lambda *args, to_host: (copied.append(to_host), copy(*args, to_host=to_host))
    )
    for _ in range(2):
        assert torch.equal(reference.log_probs(rows(worker))["ref_log_prob"], expected)
        assert on_device(reference) == 0
    assert copied
    assert not any(copied)


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4, "dtype": "bfloat16"}], ids=["plain", "adapters"])
def test_named_weights_outlast_their_stay_on_the_device(options):
    """A caller may keep all of them, as the buckets of a `WeightChannel` keep some."""
    ever, idle = (dict(actor(offload_idle, **options).named_weights()) for offload_idle in (False, True))
    assert ever.keys() == idle.keys()
    for name, weight in ever.items():
        assert torch.equal(weight, idle[name]), name


def test_weights_loaded_into_a_frozen_model_stay(tmp_path):
    trained, other = actor(False), actor(True)
    trained.update(rows(trained), loss)
    trained.save(tmp_path)
    reference = ReferenceWorker(other.config.frozen(), CPU)
    expected = trained.log_probs(rows(trained))["old_log_probs"]
    assert not torch.equal(reference.log_probs(rows(reference))["ref_log_prob"], expected)
    reference.model.load(tmp_path)
    for _ in range(2):
        assert torch.equal(reference.log_probs(rows(reference))["ref_log_prob"], expected)
        assert on_device(reference) == 0


def test_moments_are_on_the_device_only_for_an_optimizer_step(monkeypatch):
    worker, in_passes, in_steps = actor(True), [], []
    worker.update(rows(worker), loss)  # makes them
    step = worker.model.optimizer.step

    def watched(*args):
        in_steps.append(moment_bytes(worker))
        return step(*args)

    def watching(outputs, data):
        in_passes.append(moment_bytes(worker))
        return loss(outputs, data)

    monkeypatch.setattr(worker.model.optimizer, "step", watched)
    worker.update(rows(worker), watching, epochs=2)
    assert len(in_steps) == 2
    assert all(in_steps)
    assert in_passes
    assert not any(in_passes)


def test_gathered_weights_are_freed_before_the_weights_leave(monkeypatch):
    worker, found = actor(True), []
    monkeypatch.setattr(worker.model, "_reshard", lambda: found.append(on_device(worker)))
    worker.forward(rows(worker), loss)
    assert found
    assert all(found)


def test_an_error_leaves_nothing_on_the_device():
    worker = actor(True)

    def fails(outputs, data):
        raise ArithmeticError("no loss")

    with pytest.raises(ArithmeticError):
        worker.update(rows(worker), fails)
    assert on_device(worker) == 0
    worker.update(rows(worker), loss)


def test_tied_tensors_and_views_come_back_to_the_same_place():
    whole = torch.arange(3000.0)
    view, empty = whole[5:10], torch.empty(0)
    copies = HostCopies(lambda: [whole, view, empty], CPU)
    copies.park(changed=True)
    assert whole.untyped_storage().nbytes() == 0
    copies.fetch()
    copies.wait()
    assert view.tolist() == [5, 6, 7, 8, 9]
    assert float(whole.sum()) == 3000 * 2999 / 2
    whole.zero_()
    copies.park(changed=False)  # as if nothing had changed
    copies.fetch()
    assert view.tolist() == [5, 6, 7, 8, 9]


def test_what_is_always_in_host_memory_is_not_moved_twice():
    with pytest.raises(InvalidConfig, match="offload_idle"):
        ModelConfig(offload=True, offload_idle=True)


def over_two_processes(layout, **options):
    same_as_ever(folder() / f"{layout}", layout=layout, **options)


SCENARIOS = {
    "dp 2": partial(over_two_processes, Layout(dp=2)),
    "dp 2, bfloat16": partial(over_two_processes, Layout(dp=2), dtype="bfloat16", unsharded="gradients"),
    "tp 2": partial(over_two_processes, Layout(tp=2)),
    "pp 2": partial(over_two_processes, Layout(pp=2)),
}


@pytest.mark.long
def test_on_two_ranks(tmp_path):
    found = run_ranks(2, SCENARIOS, tmp_path)
    failures = [
        f"{name}, rank {rank}: {each}" for name, ranks in found.items() for rank, each in enumerate(ranks) if each
    ]
    assert not failures, "\n".join(failures)
