import random

import numpy as np
import pytest
import torch

from workers.training import checkpoint
from workers.training.checkpoint import (
    checkpoint_steps,
    latest_checkpoint,
    prune_checkpoints,
    random_states,
    set_random_states,
    writing_checkpoint,
)


def test_a_checkpoint_is_whole_or_absent(tmp_path):
    with writing_checkpoint(tmp_path, 1) as directory:
        (directory / "a").write_text("one")
    with pytest.raises(OSError, match="disk full"), writing_checkpoint(tmp_path, 2) as directory:
        (directory / "a").write_text("half")
        raise OSError("disk full")
    assert latest_checkpoint(tmp_path) == (1, tmp_path / "global_step_1")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["global_step_1"]


def test_a_draft_left_by_a_killed_run_is_ignored_and_replaced(tmp_path):
    draft = tmp_path / ".global_step_3.partial"
    draft.mkdir()
    (draft / "stale").write_text("x")
    assert latest_checkpoint(tmp_path) is None
    with writing_checkpoint(tmp_path, 3) as directory:
        (directory / "a").write_text("fresh")
    assert [entry.name for entry in (tmp_path / "global_step_3").iterdir()] == ["a"]


def test_a_checkpoint_is_on_disk_with_its_name(tmp_path, monkeypatch):
    on_disk = []
    monkeypatch.setattr(
        checkpoint, "wait_for_disk", lambda path: on_disk.append((path.name, (tmp_path / "global_step_4").exists()))
    )
    with writing_checkpoint(tmp_path, 4) as directory:
        (directory / "weights").write_text("w")
    partial = ".global_step_4.partial"
    assert on_disk == [("weights", False), (partial, False), (tmp_path.name, True)]


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 10, 30):
        with writing_checkpoint(tmp_path, step) as directory:
            (directory / "a").write_text("x")
        prune_checkpoints(tmp_path, keep=2)
    assert checkpoint_steps(tmp_path) == [10, 30]


def test_random_states_survive_a_file_that_runs_no_code(tmp_path):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    torch.save(random_states(), tmp_path / "rng.pt")
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    set_random_states(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


def test_states_of_more_devices_than_there_are_here_are_left_out(monkeypatch):
    """A checkpoint from a machine of two GPUs continues on one."""
    states, taken = random_states() | {"cuda": [torch.zeros(16), torch.ones(16)]}, []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", taken.extend)
    set_random_states(states)
    assert [state.tolist() for state in taken] == [[0.0] * 16]
