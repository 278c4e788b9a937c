"""A cluster of three nodes on this machine, one of which is lost in the midst of a call: the call ends, and says which."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from dataproto import DataProto
from dataproto.errors import WorkerFailed
from helpers.batches import prompt_batch, with_responses
from helpers.checkpoints import write_checkpoint
from helpers.ray_nodes import add_nodes, ray_cluster
from helpers.tiny_prompts import tiny_prompt_config
from rollout.sampling import SamplingParams
from workers import Roles, launch
from workers.cluster.host import Host
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig
from workers.roles.rollout_worker import RolloutConfig
from workers.training.optimizer import OptimizerConfig

TIMEOUT_S = 3000.0  # of a call, many times that of a test: one that waited for it would fail


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without processes of ours; nodes come with each test."""
    with ray_cluster(__name__, cpus=0) as made:
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield made


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> list[Any]:
    """The nodes that tests have left: one without room for our processes, and others."""
    return add_nodes(cluster, 0)


@pytest.fixture
def nodes(cluster: Cluster, running: list[Any]) -> Iterator[list[Any]]:
    """Two nodes with room for one process each, and one without."""
    running += add_nodes(cluster, *[1] * (3 - len(running)))
    yield running
    for node in [node for node in running if node.dead_processes()]:
        cluster.remove_node(node, allow_graceful=False)
        running.remove(node)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def rows(responses: bool = True) -> DataProto:
    config = tiny_prompt_config("qwen2_5_vl")
    prompts = prompt_batch(config, [[], [], [], []], texts=[4, 7, 5, 3])
    return with_responses(config, prompts, lengths=[5, 4, 1, 6], width=6) if responses else prompts


def lose_this_node(*_: Any, **__: Any) -> None:
    """Ends the node's raylet and this process, as when the machine is switched off."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Trap:
    """On rank 1, the place of a method that loses the node."""

    def __init__(self, host: Host, owner: type, method: str) -> None:
        if host.rank == 1:
            mock.patch.object(owner, method, lose_this_node).start()


def trap(roles: Roles, owner: type, method: str) -> None:
    roles.actor._pool.build("trap", lambda host: Trap(host, owner, method))


def policy_loss(outputs: Any, data: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -outputs.log_probs, {}


def start(model: str) -> Roles:
    actor = ActorConfig(model, token_budget=60, optimizer=OptimizerConfig(lr=1e-3))
    return launch(
        actor, rollout=RolloutConfig(model, "hf"), on="ray", layout=Layout(dp=2), timeout_s=TIMEOUT_S, address="auto"
    )


def calls(folder: Path) -> dict[str, tuple[str, tuple[type, str], Callable[[Roles], Any]]]:
    """By phase: the call's name, what rank 1 is trapped in, and the call."""
    from rollout.hf.engine import HFEngine
    from workers.training.loss_sums import LossSums
    from workers.training.training_model import TrainingModel

    sampling = SamplingParams(max_tokens=8)
    return {
        "generation": (
            "rollout.generate",
            (HFEngine, "poll"),
            lambda roles: roles.rollout.generate(rows(False), sampling),
        ),
        "scoring": ("actor.log_probs", (TrainingModel, "_outputs"), lambda roles: roles.actor.log_probs(rows())),
        "update": ("actor.update", (LossSums, "add"), lambda roles: roles.actor.update(rows(), policy_loss)),
        "save": ("actor.save", (FileSystemWriter, "write_data"), lambda roles: roles.actor.save(folder / "saved")),
    }


@pytest.mark.long
@pytest.mark.parametrize("phase", ["generation", "scoring", "update", "save"])
def test_a_lost_node_ends_the_call_and_is_named_with_its_rank(nodes, model, tmp_path, phase):
    name, place, call = calls(tmp_path)[phase]
    with start(model) as roles:
        places = roles.actor._pool.placements
        assert len({each.node for each in places}) == 2
        trap(roles, *place)
        with pytest.raises(WorkerFailed) as caught:
            call(roles)
        told = str(caught.value).partition("\n")[0]
        assert told.startswith(f"{name} failed: rank 1 on {places[1].name}")
        assert f"died in '{name}'" in told
        assert f"node {places[1].node[:8]} at {places[1].ip} with rank 1 is lost" in told
        with pytest.raises(WorkerFailed, match="the worker processes have ended"):
            roles.actor.log_probs(rows())
