"""Launches the roles of a run in Ray processes."""

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from math import ceil, gcd, lcm
from typing import Any

import torch

from dataproto.errors import InvalidConfig
from rollout.engine import prepare_engine
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
from workers.cluster.role_groups import LaunchPlan, Phase, Roles, early_reward, engine_phase
from workers.ranks.layout import Layout
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import reference_worker
from workers.roles.reward import ModelReward, ModelRewardWorker, RewardWorker
from workers.roles.rollout_worker import RolloutWorker

log = logging.getLogger(__name__)


def launch_ray(plan: LaunchPlan, phase: Phase = nullcontext, **options: Any) -> Roles:
    """Starts one process for each rank of the layout, which holds that rank of actor, reference, critic and rollout.

    Engines get separate processes if ``rollout_processes`` is set, and start while the actor is loaded. A reward function gets
    processes without a device.

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
            pools = _start_pools(plan, config, stack)
            pool = pools.models
            _prepare_engines(plan, pools.engines or pool)
            reward, rollout = _begin_reward(plan, pools), _begin_rollout(plan, pools)
        with phase("loading the actor"):
            actor = pool.build("actor", lambda host: ActorWorker(plan.actor, host.device, host.ranks))
        optional = _build_optional(plan, pool, phase)
        if reward is not None:
            with phase("starting the reward"):
                optional["reward"] = reward()
        with phase(engine_phase(plan.rollout.engine)):
            engines = rollout()
            transfer_weights = _weight_transfer(pools, engines)
        share_cores([group for group in (actor, engines, optional["reward"]) if group is not None])

        def after_sync() -> None:
            pool.blobs.renew()
            transfer_weights()

        devices = _num_devices(model_processes, gpus_per_process(config))
        return Roles(actor, engines, optional, stack.pop_all().close, after_sync, engines.release, devices)


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
    pool.connect()
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


@dataclass(frozen=True)
class Pools:
    """The processes of a run."""

    models: RayPool
    engines: RayPool | None  # None: engines share the processes of the models
    scorers: RayPool | None  # of a reward function


def _start_pools(plan: LaunchPlan, config: RayConfig, stack: ExitStack) -> Pools:
    """Starts all processes at once, and waits for them."""
    blobs = new_step_blobs()

    def start(layout: Layout, config: RayConfig, together: int = 1) -> RayPool:
        pool = RayPool(layout, config, blobs, together)
        stack.callback(pool.close)
        return pool

    models, engines, scorers = start(plan.layout, config, engine_ranks(plan)), None, None
    if config.rollout_processes:
        engines = start(Layout(dp=config.rollout_processes), config, engine_ranks(plan))
    if plan.reward is not None and not isinstance(plan.reward, ModelReward):
        without_device = replace(config, gpus=0.0, timeout_s=config.reward_timeout_s)
        scorers = start(Layout(dp=config.reward_processes), without_device)
    for pool in (models, engines, scorers):
        if pool is not None:
            pool.connect()
    return Pools(models, engines, scorers)


def _prepare_engines(plan: LaunchPlan, pool: RayPool) -> None:
    """Lets each node begin what its engines need, while the actor is loaded."""
    engine, model_path = plan.rollout.engine, plan.rollout.model_path
    pool.prepare(lambda: prepare_engine(engine, model_path))


def _build_optional(plan: LaunchPlan, pool: RayPool, phase: Phase) -> dict[str, RayGroup | None]:
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
    return optional


def _begin_reward(plan: LaunchPlan, pools: Pools) -> Callable[[], RayGroup] | None:
    """A reward model shares the actor's processes. A function has separate ones, so that scoring overlaps with the models."""
    reward, model_path = plan.reward, plan.actor.model_path
    if isinstance(reward, ModelReward):
        return lambda: pools.models.build(
            "reward", lambda host: ModelRewardWorker(reward, model_path, host.device, host.ranks)
        )
    if reward is None or pools.scorers is None:
        return None
    return pools.scorers.begin_build("reward", lambda host: RewardWorker(reward, model_path))


def _begin_rollout(plan: LaunchPlan, pools: Pools) -> Callable[[], RayGroup]:
    """Engines with devices of their own start now, others when the result is called: their devices are shared."""
    if pools.engines is None:
        return lambda: pools.models.build(
            "rollout",
            lambda host: RolloutWorker(
                plan.rollout, host.roles["actor"].named_weights, host.ranks, reward=early_reward(plan)
            ),
        )
    return pools.engines.begin_build(
        "rollout",
        lambda host: RolloutWorker(
            plan.rollout,
            lambda dtype: host.receive_weights(),
            host.ranks,
            shares_device=False,
            reward=early_reward(plan),
        ),
    )


def _weight_transfer(pools: Pools, rollout: RayGroup) -> Callable[[], None]:
    """A function that sends separate engines the actor's weights at the end of a step; they get them now for the first time."""
    if pools.engines is None:
        return lambda: None  # these engines read the actor's weights before they next generate
    pools.models.open_channel(pools.engines)
    dtype = rollout.weights_dtype()

    def transfer_weights() -> None:
        pools.models.transfer_weights("actor", rollout, dtype)

    transfer_weights()
    return transfer_weights
