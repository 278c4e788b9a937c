"""The processes of a run before they start: how many, and which of them share a node."""

import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from dataproto.errors import InvalidConfig
from workers import launch
from workers.cluster import ray_group
from workers.cluster.host import shadowing_folders
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_launcher import planned_pools, with_absolute_paths
from workers.cluster.role_groups import LaunchPlan
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig
from workers.roles.critic import CriticConfig
from workers.roles.reward import ModelReward
from workers.roles.rollout_worker import RolloutConfig

MODEL_REWARD = ModelReward(CriticConfig("model"))


def nothing(rows):
    return []


def plan_of(layout, parallel=1, reward=None, model="model"):
    rollout = RolloutConfig(model, "vllm", {"tensor_parallel": parallel})
    return LaunchPlan(ActorConfig(model), None, reward, rollout, layout)


@pytest.mark.parametrize(
    ("plan", "pools"),
    [
        (plan_of(Layout(dp=2)), [(2, 1)]),
        (plan_of(Layout(dp=4), 2), [(4, 2)]),  # engines in the processes of the models
        (plan_of(Layout(dp=2, tp=3), 2), [(6, 6)]),
        (plan_of(Layout(dp=2, rollout=4), 4), [(2, 1), (4, 4)]),
        (plan_of(Layout(dp=2, tp=2, rollout=6), 3), [(4, 2), (6, 3)]),
    ],
)
def test_engines_and_tp_groups_get_whole_nodes(plan, pools):
    """Processes, and how many of them share a node."""
    found = planned_pools(plan, RayConfig(gpus=1.0, cpus=2.0)).values()
    assert [(pool.layout.world_size, pool.together) for pool in found] == pools


@pytest.mark.parametrize(("reward", "processes"), [(None, 0), (MODEL_REWARD, 0), (nothing, 3)])
def test_only_a_reward_function_has_processes_of_its_own(reward, processes):
    config = RayConfig(gpus=1.0, reward_processes=3, reward_timeout_s=7.0)
    pools = planned_pools(plan_of(Layout(), reward=reward), config)
    scorers = [pool for name, pool in pools.items() if name == "scorers"]
    found = [(pool.layout.world_size, pool.config.gpus, str(pool.device), pool.config.timeout_s) for pool in scorers]
    assert found == ([(processes, 0.0, "cpu", 7.0)] if processes else [])
    assert pools["models"].device is None


@pytest.mark.parametrize(("parallel", "apart"), [(4, 0), (0, 0), (4, 6)])
def test_engines_that_do_not_divide_their_processes_are_refused_before_ray_starts(monkeypatch, parallel, apart):
    monkeypatch.setattr("rollout.engine.ENGINE_EXTRAS", {})  # as if vLLM were installed
    rollout = RolloutConfig("model", "vllm", {"tensor_parallel": parallel})
    with pytest.raises(InvalidConfig, match=f"tensor_parallel={parallel}"):
        launch(ActorConfig("model"), rollout=rollout, on="ray", layout=Layout(dp=6, rollout=apart))


@pytest.mark.parametrize(
    ("outcomes", "answers"),
    [
        ([None], True),
        ([TimeoutError(), None], True),  # a slow node is not a lost one
        ([TimeoutError()] * 3, False),
        ([ConnectionRefusedError()], False),
    ],
)
def test_a_node_that_does_not_answer_in_time_is_asked_again(monkeypatch, outcomes, answers):
    connect = Mock(side_effect=[each or Mock() for each in outcomes])
    node = {
        "NodeID": "n",
        "Alive": True,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerPort": 1,
        "Resources": {"CPU": 2.0},
    }
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(ray_group.ray, "nodes", lambda: [node, node | {"NodeID": "other", "Alive": False}])
    assert ray_group.lost_nodes({"n"}) == ["n"] * (not answers)
    assert connect.call_count == len(outcomes)


def test_local_checkpoints_have_absolute_paths_and_others_their_names(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    here, reward = str(tmp_path / "here"), ModelReward(CriticConfig("here"), Path("head"))
    found = with_absolute_paths(plan_of(Layout(), reward=reward, model="here"))
    assert [found.actor.model_path, found.rollout.model_path, found.reward.critic.model_path] == [here] * 3
    assert found.reward.directory == tmp_path / "head"
    assert (found.reference, found.critic) == (None, None)
    named = plan_of(Layout(), model="Qwen/Qwen2.5-VL-7B-Instruct")
    assert with_absolute_paths(named) == named


def test_packages_are_shadowed_by_the_folder_in_which_processes_begin(tmp_path, monkeypatch):
    ours = Path(sys.modules["dataproto"].__path__[0]).parent
    (tmp_path / "dataproto").mkdir()
    monkeypatch.chdir(ours)
    assert shadowing_folders(tmp_path) == {"dataproto": str(ours)}
    assert shadowing_folders(ours) == {}
