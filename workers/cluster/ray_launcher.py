"""Launches the roles of a run in Ray processes."""

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from math import ceil, gcd, lcm
from typing import Any

import torch

from dataproto.errors import InvalidConfig
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import (
    RayGroup,
    gpus_per_process,
    has_room,
    new_step_blobs,
    pickle_unimportable_modules_by_value,
    room_for,
    running_ray,
)
from workers.cluster.ray_pool import RayPool, share_cores
from workers.cluster.role_groups import LaunchPlan, Phase, Roles, engine_phase
from workers.ranks.layout import Layout
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import reference_worker
from workers.roles.reward import ModelReward, ModelRewardWorker, RewardFunction, RewardWorker
from workers.roles.rollout_worker import RolloutWorker

log = logging.getLogger(__name__)


def launch_ray(plan: LaunchPlan, phase: Phase = nullcontext, **options: Any) -> Roles:
    """Starts one process for each rank of the layout, which holds that rank of actor, reference, critic and rollout.

    Engines get separate processes if ``rollout_processes`` is set. A reward function gets processes without a device.

    The layout may have fewer dp positions than was asked for if the plan says so and nodes are missing.

    Raises:
        InvalidConfig: an option is unknown, or the cluster is too small.
    """
    config = _config(options)
    processes = plan.layout.world_size + config.rollout_processes + config.reward_processes
    pickle_unimportable_modules_by_value()
    with ExitStack() as stack:
        with phase("starting Ray"):
            stack.enter_context(running_ray(config, processes))
            if plan.may_shrink:
                plan = replace(plan, layout=layout_with_room(plan.layout, config, engine_ranks(plan)))
            model_processes = plan.layout.world_size + config.rollout_processes
            pool = RayPool(plan.layout, config, new_step_blobs(), engine_ranks(plan))
            stack.callback(pool.close)
        with phase("loading the actor"):
            actor = pool.build("actor", lambda host: ActorWorker(plan.actor, host.device, host.ranks))
        optional = _build_optional(plan, pool, stack, phase)
        with phase(engine_phase(plan.rollout.engine)):
            rollout, transfer_weights = _build_rollout(plan, pool, stack)
        share_cores([group for group in (actor, rollout, optional["reward"]) if group is not None])

        def after_sync() -> None:
            pool.blobs.renew()
            transfer_weights()

        devices = _num_devices(model_processes, gpus_per_process(config))
        return Roles(actor, rollout, optional, stack.pop_all().close, after_sync, rollout.release, devices)


def engine_ranks(plan: LaunchPlan) -> int:
    """The number of consecutive ranks that run an engine together."""
    return int(plan.rollout.options.get("tensor_parallel", 1))


def layout_with_room(layout: Layout, config: RayConfig, together: int) -> Layout:
    """The layout, or if the nodes that are left have no room for it, one with fewer dp positions and without replicas.

    Raises:
        InvalidConfig: there is no room for one dp position either.
    """
    unit, stride = lcm(layout.tp, together), layout.world_size // layout.dp
    if has_room(layout.world_size, config, unit):
        return layout
    others = config.rollout_processes + (0 if gpus_per_process(config) else config.reward_processes)
    left = room_for(config, unit) * unit - others
    for dp in range(min(left // stride, layout.dp - 1), 0, -1):
        if dp * stride % unit == 0:
            smaller = replace(layout, dp=dp, replicas=1, ep=gcd(layout.ep, dp * layout.sp))
            log.warning("the nodes that are left have room for %d processes: %s instead of %s", left, smaller, layout)
            return smaller
    raise InvalidConfig(
        f"the nodes that are left have room for {max(left, 0)} processes; {layout} needs at least {stride}"
    )


def ray_worker(make: Callable[[torch.device | None], Any], stack: ExitStack, **options: Any) -> RayGroup:
    """Starts a process with one device. See `workers.cluster.launcher.launch_worker`."""
    config = _config(options)
    pickle_unimportable_modules_by_value()
    stack.enter_context(running_ray(config, 1))
    pool = RayPool(Layout(), config, new_step_blobs())
    stack.callback(pool.close)
    return pool.build("worker", lambda host: make(host.device))


def _config(options: dict[str, Any]) -> RayConfig:
    """Raises `InvalidConfig` for an unknown option."""
    unknown = sorted(options.keys() - {field.name for field in fields(RayConfig)})
    if unknown:
        raise InvalidConfig(f"on='ray' has no options {unknown}: it has {[field.name for field in fields(RayConfig)]}")
    return RayConfig(**options)


def _num_devices(processes: int, gpus: float) -> int:
    """GPUs of ``processes`` with ``gpus`` each (several may share one), or the number of processes if they have none.

    >>> _num_devices(4, 1.0), _num_devices(4, 0.5), _num_devices(4, 0.0)
    (4, 2, 4)
    """
    return ceil(processes * gpus) if 0 < gpus < 1 else processes


def _build_optional(plan: LaunchPlan, pool: RayPool, stack: ExitStack, phase: Phase) -> dict[str, RayGroup | None]:
    optional: dict[str, RayGroup | None] = {"reference": None, "critic": None, "reward": None}
    if plan.reference is not None:
        reference = plan.reference
        with phase("loading the reference"):
            optional["reference"] = pool.build(
                "reference", lambda host: reference_worker(reference, host.roles["actor"])
            )
    if plan.critic is not None:
        critic = plan.critic
        with phase("loading the critic"):
            optional["critic"] = pool.build("critic", lambda host: CriticWorker(critic, host.device, host.ranks))
    if plan.reward is not None:
        with phase("starting the reward"):
            optional["reward"] = _build_reward(plan.reward, plan.actor.model_path, pool, stack)
    return optional


def _build_reward(reward: RewardFunction | ModelReward, model_path: str, pool: RayPool, stack: ExitStack) -> RayGroup:
    """A reward model shares the actor's processes. A function gets separate ones, so that scoring overlaps with the models."""
    if isinstance(reward, ModelReward):
        return pool.build("reward", lambda host: ModelRewardWorker(reward, model_path, host.device, host.ranks))
    config = replace(pool.config, gpus=0.0, timeout_s=pool.config.reward_timeout_s)
    scorers = RayPool(Layout(dp=pool.config.reward_processes), config, pool.blobs)
    stack.callback(scorers.close)
    return scorers.build("reward", lambda host: RewardWorker(reward, model_path))


def _build_rollout(plan: LaunchPlan, pool: RayPool, stack: ExitStack) -> tuple[RayGroup, Callable[[], None]]:
    """The engines, and a function that sends them the actor's weights at the end of a step."""
    if not pool.config.rollout_processes:
        shared = pool.build(
            "rollout", lambda host: RolloutWorker(plan.rollout, host.roles["actor"].named_weights, host.ranks)
        )
        return shared, lambda: None  # these engines read the actor's weights before they next generate
    engines = RayPool(Layout(dp=pool.config.rollout_processes), pool.config, pool.blobs, engine_ranks(plan))
    stack.callback(engines.close)
    rollout = engines.build(
        "rollout",
        lambda host: RolloutWorker(plan.rollout, lambda dtype: host.receive_weights(), host.ranks, shares_device=False),
    )
    pool.open_channel(engines)
    dtype = rollout.weights_dtype()

    def transfer_weights() -> None:
        pool.transfer_weights("actor", rollout, dtype)

    transfer_weights()
    return rollout, transfer_weights
