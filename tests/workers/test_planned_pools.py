"""The processes of a run before they start: how many, which of them share a node, and what is left of them on fewer nodes."""

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
from workers.cluster.ray_group import NodeResources
from workers.cluster.ray_launcher import layout_with_room, planned_bundles, planned_pools, with_absolute_paths
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
    ("plan", "bundles"),
    [
        (plan_of(Layout(dp=2)), [1, 1]),
        (plan_of(Layout(dp=4), 2), [2, 2]),  # engines in the processes of the models
        (plan_of(Layout(dp=2, tp=3), 2), [6]),
        (plan_of(Layout(dp=2, rollout=4), 4), [1, 1, 4]),
        (plan_of(Layout(dp=2, tp=2, rollout=6), 3), [2, 2, 3, 3]),
    ],
)
def test_engines_and_tp_groups_get_whole_nodes(plan, bundles):
    found = planned_bundles(plan, RayConfig(gpus=1.0, cpus=2.0))
    assert found == [{"CPU": 2.0 * count, "GPU": count} for count in bundles]


@pytest.mark.parametrize(("reward", "processes"), [(None, 0), (MODEL_REWARD, 0), (nothing, 3)])
def test_only_a_reward_function_has_processes_of_its_own(reward, processes):
    config = RayConfig(gpus=1.0, reward_processes=3, reward_timeout_s=7.0)
    pools = planned_pools(plan_of(Layout(), reward=reward), config)
    assert planned_bundles(plan_of(Layout(), reward=reward), config)[1:] == [{"CPU": 1.0}] * processes
    scorers = [(str(pool.device), pool.config.timeout_s) for name, pool in pools.items() if name == "scorers"]
    assert scorers == [("cpu", 7.0)] * (processes > 0)
    assert pools["models"].device is None


@pytest.mark.parametrize(("parallel", "apart"), [(4, 0), (0, 0), (4, 6)])
def test_engines_that_do_not_divide_their_processes_are_refused_before_ray_starts(monkeypatch, parallel, apart):
    monkeypatch.setattr("rollout.engine.ENGINE_EXTRAS", {})  # as if vLLM were installed
    rollout = RolloutConfig("model", "vllm", {"tensor_parallel": parallel})
    with pytest.raises(InvalidConfig, match=f"tensor_parallel={parallel}"):
        launch(ActorConfig("model"), rollout=rollout, on="ray", layout=Layout(dp=6, rollout=apart))


@pytest.mark.parametrize(
    ("plan", "free", "layout"),
    [
        (plan_of(Layout(dp=4)), [2, 1], Layout(dp=3)),
        (plan_of(Layout(dp=8, tp=2, replicas=2)), [3, 3, 1], Layout(dp=2, tp=2)),
        (plan_of(Layout(dp=8), 2), [3, 2], Layout(dp=4)),  # whole engines
        (plan_of(Layout(dp=4, rollout=4), 4), [4, 2], Layout(dp=2, rollout=4)),  # one engine apart, whose node is full
        (plan_of(Layout(dp=4), reward=nothing), [3], Layout(dp=2)),
        (plan_of(Layout(dp=4), reward=MODEL_REWARD), [3], Layout(dp=3)),
        (plan_of(Layout(dp=4, sp=2, ep=8)), [3, 3], Layout(dp=3, sp=2, ep=2)),
        (plan_of(Layout(dp=4, rollout=4), 4), [3, 3], None),
        (plan_of(Layout(dp=4), 4), [3], None),
    ],
)
def test_a_run_takes_the_dp_positions_for_which_the_nodes_have_room(monkeypatch, plan, free, layout):
    config = RayConfig(gpus=0.0)
    monkeypatch.setattr(ray_group, "PLACEMENT_TIMEOUT_S", 0)
    monkeypatch.setattr(ray_group, "living_nodes", lambda: nodes_of(free))
    if layout is not None:
        assert layout_with_room(plan, config) == layout
        return
    with pytest.raises(InvalidConfig, match=r"too little: Layout\(dp=4.* needs at least"):
        layout_with_room(plan, config)


def nodes_of(free, total=None):
    return [
        NodeResources({"CPU": float(all_)}, {"CPU": float(left)})
        for left, all_ in zip(free, total or free, strict=True)
    ]


def test_a_run_waits_for_what_its_processes_leave_and_no_longer(monkeypatch):
    """A node of two is lost; the processes on the other one end a moment later."""
    seen = [nodes_of([1], total=[2]), nodes_of([2], total=[2])]
    monkeypatch.setattr(ray_group, "NODE_INTERVAL_S", 0)
    monkeypatch.setattr(ray_group, "living_nodes", lambda: seen.pop(0))
    assert layout_with_room(plan_of(Layout(dp=4)), RayConfig(gpus=0.0)) == Layout(dp=2)
    assert not seen


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
    monkeypatch.setattr(ray_group.ray, "nodes", lambda: [node, node | {"Alive": False}])
    monkeypatch.setattr(ray_group.ray._private.state, "available_resources_per_node", lambda: {"n": {"CPU": 1.0}})
    assert ray_group.living_nodes() == [NodeResources({"CPU": 2.0}, {"CPU": 1.0})] * answers
    assert connect.call_count == len(outcomes)


def test_what_another_run_keeps_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(ray_group, "PLACEMENT_TIMEOUT_S", 0)
    monkeypatch.setattr(ray_group, "living_nodes", lambda: nodes_of([1, 2], total=[4, 4]))
    assert layout_with_room(plan_of(Layout(dp=4)), RayConfig(gpus=0.0)) == Layout(dp=3)


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
