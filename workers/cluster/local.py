"""All roles in this process, each in a group of one worker.

A recipe calls ``group.method(...)``, or ``group.submit("method", ...)`` for a future, in the same way on every kind of group.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dataproto.errors import InvalidConfig
from workers.cluster.role_groups import LaunchPlan, Phase, Roles, engine_phase, trained_worker
from workers.ranks.dispatch_modes import dispatch_of
from workers.roles.critic import CriticWorker
from workers.roles.reference import reference_worker
from workers.roles.reward import ModelReward, ModelRewardWorker, RewardFunction, RewardWorker
from workers.roles.rollout_worker import RolloutWorker, lora_streams


class LocalGroup:
    """One worker in this process. In every dispatch mode ``group.method`` is the worker's own bound method."""

    closed_reason: str | None = None  # a local group is never closed; see `RayGroup.closed_reason`

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def submit(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Runs the call and returns a finished future, which holds the result or the exception."""
        future: Future[Any] = Future()
        try:
            future.set_result(self._method(method)(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name == "worker":
            raise AttributeError(name)
        return self._method(name)

    def _method(self, name: str) -> Callable[..., Any]:
        dispatch_of(type(self.worker), name)
        method: Callable[..., Any] = getattr(self.worker, name)
        return method


def start_roles(plan: LaunchPlan, phase: Phase) -> Roles:
    """Builds the workers of all roles in this process.

    Raises:
        InvalidConfig: the layout has more than one rank, or engines on devices of their own.
    """
    if plan.layout.world_size + plan.layout.rollout > 1:
        raise InvalidConfig(f"{plan.layout} needs several processes: use on='ray'")
    optional: dict[str, LocalGroup | None] = {"reference": None, "critic": None, "reward": None}
    with phase("loading the actor"):
        actor = trained_worker(plan.actor)
    if plan.reference:
        with phase("loading the reference"):
            optional["reference"] = LocalGroup(reference_worker(plan.reference, actor))
    if plan.critic:
        with phase("loading the critic"):
            optional["critic"] = LocalGroup(CriticWorker(plan.critic))
    if plan.reward:
        with phase("starting the reward"):
            optional["reward"] = LocalGroup(_reward_worker(plan.reward, plan.actor.model_path))
    if plan.rollout is None:
        return Roles(LocalGroup(actor), None, optional)
    with phase(engine_phase(plan.rollout.engine)):
        lora = lora_streams(plan.actor, actor.base_weights, actor.adapter_weights)
        rollout = LocalGroup(RolloutWorker(plan.rollout, actor.named_weights, lora=lora))
    return Roles(LocalGroup(actor), rollout, optional)


def _reward_worker(reward: RewardFunction | ModelReward, model_path: str) -> RewardWorker:
    if isinstance(reward, ModelReward):
        return ModelRewardWorker(reward, model_path)
    return RewardWorker(reward, model_path)
