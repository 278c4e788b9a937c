"""Ray clusters of several nodes on one machine, which may be busy with other work."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray._private import services
from ray.cluster_utils import Cluster

PATIENCE_S = 300.0  # for a node to start; Ray itself gives up after 30 s
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 15}
"""A node counts as lost after 15 s without an answer: not when it is slow, and sooner than by Ray's own settings."""


@contextmanager
def ray_cluster(module: str, cpus: int) -> Iterator[Cluster]:
    """A cluster of a head with so many CPUs, whose processes can unpickle what the test ``module`` defines."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[module])  # its processes cannot import a test
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the nodes' processes
        patched.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
        patched.setattr(services, "get_node", patient(services.get_node))
        options = {"num_cpus": cpus, "include_dashboard": False, "_system_config": HEALTH}
        made = Cluster(initialize_head=True, head_node_args=options)
        yield made
        ray.shutdown()
        made.shutdown()


def add_nodes(cluster: Cluster, *cpus: int) -> list[Any]:
    """Adds nodes with so many CPUs, and waits until they are up."""
    added = [cluster.add_node(num_cpus=each, object_store_memory=100 * 2**20) for each in cpus]
    cluster.wait_for_nodes(timeout=PATIENCE_S)
    return added


def patient(get_node: Any) -> Any:
    """Ray's look for a node that is starting, repeated until it is there."""

    def get(*args: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return get_node(*args)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    return get
