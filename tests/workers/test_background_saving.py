"""Checkpoints that two roles write in the background on two processes, one of which has a slow or a full disk."""

import time
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from dataproto.errors import CheckpointError
from helpers.processes import run_ranks, shared_folder, sharing
from helpers.tiny_models import tiny_model
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.critic import CriticConfig, CriticWorker
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
write_data = FileSystemWriter.write_data


def slow(writer: FileSystemWriter, *args: Any) -> Any:
    """Writes, when the other rank has long begun with what comes next."""
    time.sleep(1)
    return write_data(writer, *args)


def full(writer: FileSystemWriter, *args: Any) -> Any:
    """Refuses the actor's part."""
    if "actor" in str(writer.path):
        raise OSError("no space left")
    return write_data(writer, *args)


def two_roles_save(name: str, disk: Any) -> dict[str, str | None]:
    """What actor and critic raise when they have saved in the background, on ranks of which the last one has such a disk."""
    ranks, path = init_ranks(Layout(dp=2), CPU), str(shared_folder() / "model")
    make = {
        "actor": lambda: ActorWorker(ActorConfig(path, optimizer=OptimizerConfig()), CPU, ranks),
        "critic": lambda: CriticWorker(CriticConfig(path), CPU, ranks),
    }
    roles = {role: build() for role, build in make.items()}
    for worker in roles.values():
        with torch.no_grad():
            for parameter in worker.module.parameters():
                parameter.add_(1)
    found: dict[str, str | None] = {}
    with patch.object(FileSystemWriter, "write_data", disk if ranks.rank("dp") == 1 else write_data):
        for role, worker in roles.items():
            worker.save(shared_folder() / name / role, in_background=True)
        for role, worker in roles.items():
            try:
                found[role] = worker.finish_save()
            except CheckpointError as error:
                found[role] = str(error)
    for role, worker in roles.items():
        if found[role] is None:
            other = make[role]()
            other.load(shared_folder() / name / role)
            pairs = zip(worker.module.parameters(), other.module.parameters(), strict=True)
            assert all(torch.equal(one.to_local(), two.to_local()) for one, two in pairs)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    root = tmp_path_factory.mktemp("in_background")
    tiny_model("qwen2_5_vl").save_pretrained(root / "model")
    scenarios = {disk.__name__: partial(two_roles_save, disk.__name__, disk) for disk in (slow, full)}
    with sharing(root):
        return run_ranks(2, scenarios, root, timeout=90)


def test_a_slow_disk_of_one_rank_holds_up_and_does_not_hang(outcomes):
    assert outcomes["slow"] == [{"actor": None, "critic": None}] * 2


def test_a_full_disk_of_one_rank_is_told_on_all_and_what_comes_after_is_written(outcomes):
    for outcome in outcomes["full"]:
        assert not isinstance(outcome, str), outcome
        assert "actor/training could not be written: rank 1: OSError: no space left; make room" in outcome["actor"]
        assert outcome["critic"] is None
