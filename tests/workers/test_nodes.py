"""Clusters of several nodes on this machine: tp groups within a node, the environment and the prints of processes, and a run that
resumes on the nodes that are left.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.geo3k_files import geometry3k, write_geometry3k
from helpers.geo3k_runs import REWARD, arguments, assert_same_run
from helpers.ray_nodes import add_nodes, ray_cluster
from recipes.geo3k_grpo import main
from workers.cluster.host import Host
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import StepBlobs, running_ray
from workers.cluster.ray_launcher import PlannedPool, RayPool
from workers.ranks.dispatch_modes import dispatch
from workers.ranks.layout import Layout

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head with one CPU, which holds the reward."""
    with ray_cluster(__name__, cpus=1) as made:
        yield made


def test_a_tensor_parallel_group_has_one_node(cluster, monkeypatch):
    """Nodes with three places each, which processes one by one would fill with three and one of four."""
    add_nodes(cluster, 3, 3)
    config = RayConfig(address=cluster.address)
    with running_ray(config, 4):
        pool = RayPool(PlannedPool(Layout(dp=2, tp=2), config), StepBlobs())
        pool.connect()
        nodes = [place.node for place in pool.placements]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        pool.close()
        monkeypatch.setattr("workers.cluster.ray_group.PLACEMENT_TIMEOUT_S", 3)
        with pytest.raises(
            InvalidConfig, match=r"processes with \{'CPU': 4.0\} for every 4, which share a node, do not fit"
        ):
            RayPool(PlannedPool(Layout(tp=4), config), StepBlobs())


class Speaking:
    """Prints, and tells of its environment."""

    def __init__(self, host: Host) -> None:
        self.rank = host.rank

    @dispatch("all")
    def speak(self) -> list[str]:
        print(f"rank {self.rank} speaks of {os.environ['OF_THE_RUN']}", flush=True)
        logging.getLogger("rollout.vllm.engine").info("rank %d begins a phase", self.rank)
        return [os.environ["OF_THE_RUN"]]

    @dispatch("rank_zero")
    def neighbours(self) -> list[str]:
        return sorted(path.name for path in Path.cwd().iterdir())


@pytest.mark.parametrize("shown", [True, False])
def test_processes_have_the_environment_of_the_options_and_print_here_if_asked(cluster, tmp_path, capfd, shown):
    (tmp_path / "notes.txt").write_text("mine")
    add_nodes(cluster, 2)
    environment = {"OF_THE_RUN": "geometry"}
    config = RayConfig(address=cluster.address, env_vars=environment, working_dir=str(tmp_path), show_logs=shown)
    with running_ray(config, 2):
        pool = RayPool(PlannedPool(Layout(dp=2), config), StepBlobs())
        pool.connect()
        group = pool.build("speaking", Speaking)
        assert group.speak() == ["geometry"]
        assert group.neighbours() == ["notes.txt"]
        told, deadline = "", time.monotonic() + 60
        while shown and told.count("rank") < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
            told += "".join(capfd.readouterr())
        pool.close()
    told += "".join(capfd.readouterr())
    assert ("rank 0 speaks of geometry" in told) == ("rank 1 speaks of geometry" in told) == shown
    assert ("rank 0 begins a phase" in told) == ("rank 1 begins a phase" in told) == shown


def lose_after(directory: Path, step: int, cluster: Cluster, node: Any) -> threading.Thread:
    """Ends a node once the run has written the checkpoint of a step."""

    def watch() -> None:
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline and not (directory / f"global_step_{step}").exists():
            time.sleep(0.02)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.timeout(1200)
def test_a_run_that_lost_a_node_resumes_on_those_that_are_left(cluster, tmp_path, capfd):
    """Two nodes of one process each; after the second step one is left, and the metrics are those of one process."""
    for split, count in (("train", 12), ("test", 5)):
        write_geometry3k(tmp_path / "data" / f"{split}-00000-of-00001.parquet", geometry3k(count))
    (tmp_path / "mine.py").write_text(REWARD)
    files = write_checkpoint("qwen2_5_vl", tmp_path / "model"), str(tmp_path / "data"), f"{tmp_path / 'mine.py'}:score"
    settings = ("--steps", "4", "--save-every", "1", "--keep-checkpoints", "9")
    assert main(arguments(*files, tmp_path / "one", *settings)) == 0

    _, second = add_nodes(cluster, 1, 1)
    directory = tmp_path / "two"
    lost = lose_after(directory, 2, cluster, second)
    on_ray = ("--on", "ray", "--ray.address", cluster.address, "--layout.dp", "2")
    assert main(arguments(*files, directory, *settings, *on_ray)) != 0
    lost.join()
    assert "is lost" in capfd.readouterr().err
    assert main(["--resume", str(directory), "--layout.dp", "1"]) == 0
    assert_same_run(directory, tmp_path / "one")
