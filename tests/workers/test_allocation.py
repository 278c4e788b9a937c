"""Expandable segments of torch's allocator: in passes and updates, and nowhere else."""

from contextlib import contextmanager

import pytest
import torch

from helpers.batches import prompt_batch, with_responses
from helpers.tiny_models import tiny_config, tiny_model
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training import training_model
from workers.training.memory import VARIABLES, expandable_segments
from workers.training.optimizer import Optimizer
from workers.training.residence import HostCopies
from workers.training.training_model import TrainingModel

CUDA = torch.device("cuda")
PAGES = torch.__version__ >= "2.13"  # which torch 2.11 and 2.12 may not know
BEGIN = "expandable_segments:True" + ",large_segment_size_mb:128" * PAGES
END = "expandable_segments:False" + ",large_segment_size_mb:20" * PAGES


@pytest.fixture
def said(monkeypatch):
    """What torch's allocator is told, which takes it."""
    told, tell = [], torch._C._accelerator_setAllocatorSettings

    def recorded(settings):
        tell(settings)
        told.append(settings)

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", recorded)
    return told


def test_segments_expand_until_the_outermost_block_ends(said):
    with expandable_segments(CUDA):
        with expandable_segments(CUDA):
            pass
        assert said == [BEGIN]
    assert said == [BEGIN, END]


def test_an_error_ends_a_block_too(said):
    with pytest.raises(ArithmeticError), expandable_segments(CUDA):
        raise ArithmeticError
    assert said == [BEGIN, END]


def test_what_torch_refuses_is_tried_again_in_the_next_block(said, monkeypatch):
    recorded = torch._C._accelerator_setAllocatorSettings

    def refused(settings):
        raise ValueError(settings)

    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_accelerator_setAllocatorSettings", refused)
        with pytest.raises(ValueError, match="expandable_segments:True"), expandable_segments(CUDA):
            pass
    assert torch._C._accelerator_setAllocatorSettings is recorded
    with expandable_segments(CUDA):
        pass
    assert said == [BEGIN, END]


@pytest.mark.parametrize("name", VARIABLES)
def test_a_users_configuration_of_the_allocator_holds(said, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    with expandable_segments(CUDA):
        pass
    assert not said


def test_a_cpu_has_no_segments(said):
    with expandable_segments(torch.device("cpu")):
        pass
    assert not said


def test_passes_steps_and_updates_allocate_in_such_blocks(tmp_path, monkeypatch):
    depth, seen = [0], []

    @contextmanager
    def counted(device):
        depth[0] += 1
        yield
        depth[0] -= 1

    def noted(kind, name):
        act = getattr(kind, name)

        def noting(*arguments, **options):
            seen.append((name, depth[0]))
            return act(*arguments, **options)

        monkeypatch.setattr(kind, name, noting)

    def loss(outputs, rows):
        return -outputs.log_probs, {}

    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    config = tiny_config("qwen2_5_vl")
    worker = ActorWorker(ActorConfig(str(tmp_path), offload_idle=True), torch.device("cpu"))
    data = with_responses(config, prompt_batch(config, [[(4, 6)]], texts=[4]), lengths=[2], width=4)
    monkeypatch.setattr(training_model, "expandable_segments", counted)
    noted(TrainingModel, "_inputs")
    noted(Optimizer, "step")
    noted(HostCopies, "fetch")
    worker.log_probs(data)
    worker.update(data, loss)
    worker.forward_backward(data, loss)
    worker.optim_step()
    assert all(inside for _, inside in seen)  # what comes from the host too
    assert [each for each in seen if each[0] != "fetch"] == [
        ("_inputs", 1),
        ("_inputs", 2),  # in an update
        ("step", 2),
        ("_inputs", 1),
        ("step", 1),
    ]
    assert depth == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_takes_the_kind_of_segments_that_was_asked_for(said):
    def expands(tensor):
        segments = torch.cuda.memory_snapshot()
        (found,) = (each for each in segments if 0 <= tensor.data_ptr() - each["address"] < each["total_size"])
        return found["is_expandable"]

    torch.cuda.empty_cache()
    before = torch.empty(2**26, dtype=torch.uint8, device=CUDA)
    with expandable_segments(CUDA):
        within = torch.empty(2**26, dtype=torch.uint8, device=CUDA)
    after = torch.empty(2**26, dtype=torch.uint8, device=CUDA)
    assert [expands(each) for each in (before, within, after)] == [False, True, False]


@pytest.mark.skipif(not torch.cuda.is_available() or not PAGES, reason="needs a CUDA device and torch 2.13")
def test_a_device_is_taken_by_pages_of_128_mb_within_blocks_alone(said):
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    with expandable_segments(CUDA):
        within = torch.empty(30 << 20, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_reserved() - held == 128 << 20
    after = torch.empty(2**29, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_reserved() - held == (128 << 20) + 2**29
    assert within.device == after.device
