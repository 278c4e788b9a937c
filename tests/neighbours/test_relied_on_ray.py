"""What we take from Ray; see docs/neighbours.md."""

import inspect
import os
import sys
from importlib.metadata import version

import ray
from packaging.version import Version

from helpers.neighbours import relied_on
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import running_ray


class Process:
    """A process without a GPU on a node that has one, as those of a reward function."""

    def variables(self) -> tuple[str | None, ...]:
        return tuple(os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"))


@relied_on(
    "ray",
    "2.60.0",
    "docs/cluster.md says which GPUs a reward function sees and how they are hidden from it, and "
    "`workers.cluster.ray_pool.share_cores` gives processes the threads that Ray takes from them.",
)
def test_a_process_that_reserves_one_cpu_sees_the_gpus_of_its_node_and_has_one_thread(monkeypatch):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the processes cannot import a test
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for name in ("OMP_NUM_THREADS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.delenv(name, raising=False)
    hidden = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}}
    with running_ray(RayConfig(object_store_gib=0.2), processes=2):
        own, told = (
            ray.remote(Process).options(num_cpus=1, num_gpus=0, runtime_env=environment).remote()
            for environment in ({}, hidden)
        )
        found = ray.get([own.variables.remote(), told.variables.remote()])
    shown = "0" if Version(version("ray")) >= Version("2.60") else ""
    assert found == [(shown, "1"), ("", "1")]


@relied_on(
    "ray",
    "2.60.0",
    "`workers.cluster.ray_group` keeps Ray's ports to this machine and finds free nodes by these names.",
)
def test_private_names_of_ray():
    assert isinstance(ray._private.ray_constants.ENABLE_RAY_CLUSTER, bool)
    assert callable(ray._private.state.available_resources_per_node)
    assert "runtime_env" in inspect.signature(ray.init).parameters
