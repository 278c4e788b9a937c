"""Roles in Ray processes: which worker stands where."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from math import ceil
from typing import Any

from dataproto.errors import InvalidConfig
from workers.cluster.launcher import Plan, Roles
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import (
    RayGroup,
    RayPool,
    StepBlobs,
    gpus_of,
    running_ray,
    send_code_of_lone_modules,
    share_cores,
)
from workers.ranks.layout import Layout
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.model_reward import ModelReward, ModelRewardWorker
from workers.roles.model_worker import ReferenceWorker
from workers.roles.reward import RewardFunction, RewardWorker
from workers.roles.rollout_worker import RolloutWorker


def launch_ray(plan: Plan, **options: Any) -> Roles:
    """One process for each rank of the layout, each holding that rank of actor, reference, critic and, unless it has processes
    of its own, rollout; the reward has a process without a device.

    Raises:
        InvalidConfig: an unknown option, or the cluster is too small.
    """
    unknown = sorted(options.keys() - {field.name for field in fields(RayConfig)})
    if unknown:
        raise InvalidConfig(f"on='ray' has no options {unknown}: it has {[field.name for field in fields(RayConfig)]}")
    config, blobs = RayConfig(**options), StepBlobs()
    send_code_of_lone_modules()
    with ExitStack() as stack:
        stack.enter_context(
            running_ray(config, plan.layout.world_size + config.rollout_processes + config.reward_processes)
        )
        pool = RayPool(plan.layout, config, blobs)
        stack.callback(pool.close)
        actor = pool.build("actor", lambda host: ActorWorker(plan.actor, host.device, host.ranks))
        optional: dict[str, Any] = {"reference": None, "critic": None, "reward": None}
        if plan.reference is not None:
            policy = plan.reference
            optional["reference"] = pool.build(
                "reference", lambda host: ReferenceWorker(policy, host.device, host.ranks)
            )
        if plan.critic is not None:
            critic = plan.critic
            optional["critic"] = pool.build("critic", lambda host: CriticWorker(critic, host.device, host.ranks))
        if plan.reward is not None:
            optional["reward"] = build_reward(plan.reward, plan.actor.model_path, pool, stack)
        rollout, hand_over = build_rollout(plan, pool, config, blobs, stack)
        share_cores([group for group in (actor, rollout, optional["reward"]) if group is not None])

        def after_sync() -> None:
            blobs.renew()
            hand_over()

        devices = devices_of(plan.layout.world_size + config.rollout_processes, gpus_of(config))
        return Roles(actor, rollout, optional, stack.pop_all().close, after_sync, devices)


def devices_of(processes: int, gpus: float) -> int:
    """GPUs of processes that hold ``gpus`` each, of which several may share one; the processes where they hold none.

    >>> devices_of(4, 1.0), devices_of(4, 0.5), devices_of(4, 0.0)
    (4, 2, 4)
    """
    return ceil(processes * gpus) if 0 < gpus < 1 else processes


def build_rollout(
    plan: Plan, pool: RayPool, config: RayConfig, blobs: StepBlobs, stack: ExitStack
) -> tuple[RayGroup, Callable[[], None]]:
    """The engines, beside the actor or on devices of their own, and what brings them new weights at the end of a step."""
    if not config.rollout_processes:
        beside = pool.build(
            "rollout", lambda host: RolloutWorker(plan.rollout, host.roles["actor"].named_weights, host.ranks)
        )
        return beside, lambda: None  # they stream from the actor before they next generate
    engines = RayPool(Layout(dp=config.rollout_processes), config, blobs)
    stack.callback(engines.close)
    rollout = engines.build(
        "rollout",
        lambda host: RolloutWorker(plan.rollout, lambda dtype: host.receive_weights(), host.ranks, shares_device=False),
    )
    pool.open_channel(engines)
    dtype = rollout.weights_dtype()

    def hand_over() -> None:
        pool.hand_over("actor", rollout, dtype)

    hand_over()
    return rollout, hand_over


def build_reward(reward: RewardFunction | ModelReward, model_path: str, pool: RayPool, stack: ExitStack) -> RayGroup:
    """A model beside the others; a function in processes without a device, so that scoring overlaps with the models' work."""
    if isinstance(reward, ModelReward):
        return pool.build("reward", lambda host: ModelRewardWorker(reward, model_path, host.device, host.ranks))
    config = replace(pool.config, gpus=0.0, timeout_s=pool.config.reward_timeout_s)
    scorers = RayPool(Layout(dp=pool.config.reward_processes), config, pool.blobs)
    stack.callback(scorers.close)
    return scorers.build("reward", lambda host: RewardWorker(reward, model_path))
