"""Launches the roles of a run in Ray processes."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from math import ceil, gcd, lcm
from pathlib import Path
from typing import Any, cast

import torch

from dataproto.errors import InvalidConfig, ending
from rollout.engine import engine_ranks, prepare_engine
from workers.cluster.placement import all_fit
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import (
    NodeResources,
    RayGroup,
    bundles_of,
    gpus_per_process,
    new_step_blobs,
    pickle_unimportable_modules_by_value,
    running_ray,
    wait_for_nodes,
)
from workers.cluster.ray_pool import RayPool, share_cores
from workers.cluster.role_groups import LaunchPlan, Phase, Roles, early_reward, engine_phase
from workers.ranks.layout import Layout
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import reference_worker
from workers.roles.reward import ModelReward, ModelRewardWorker, RewardFunction, RewardWorker, uses_device
from workers.roles.rollout_worker import RolloutWorker, lora_streams

log = logging.getLogger(__name__)


def start_roles(plan: LaunchPlan, phase: Phase, **options: Any) -> Roles:
    """Starts one process for each rank of the layout, which holds that rank of actor, reference, critic and rollout.

    Engines get separate processes if ``rollout_processes`` is set, and start while the actor is loaded. A reward function gets
    processes without a device.

    The layout may have fewer dp positions than was asked for if the plan says so and nodes are missing.

    Raises:
        InvalidConfig: an option is unknown, ``tensor_parallel`` does not divide the engines' processes, or the cluster is too
            small.
    """
    config, plan = _config(options), with_absolute_paths(plan)
    processes = sum(pool.layout.world_size for pool in planned_pools(plan, config).values())
    pickle_unimportable_modules_by_value()
    with ExitStack() as stack:
        with phase("starting Ray"):
            stack.enter_context(running_ray(config, processes))
            if plan.may_shrink:
                plan = replace(plan, layout=layout_with_room(plan, config))
            model_processes = plan.layout.world_size + config.rollout_processes
            pools = _start_pools(plan, config, stack)
            pool = pools["models"]
            prepare = partial(prepare_engine, plan.rollout.engine, plan.rollout.model_path)
            pools.get("engines", pool).prepare(prepare)  # on each node, while the actor is loaded
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
        apart = "scorers" in pools and not uses_device(cast(RewardFunction, plan.reward))
        ends = stack.pop_all().close
        return Roles(actor, engines, optional, ends, after_sync, engines.release, devices, scores_apart=apart)


def with_absolute_paths(plan: LaunchPlan) -> LaunchPlan:
    """The plan with absolute paths of local checkpoints, since processes may begin in another folder than this one."""

    def located(config: Any) -> Any:
        local = config is not None and Path(config.model_path).exists()
        return replace(config, model_path=str(Path(config.model_path).absolute())) if local else config

    reward = plan.reward
    if isinstance(reward, ModelReward):
        directory = None if reward.directory is None else Path(reward.directory).absolute()
        reward = ModelReward(located(reward.critic), directory)
    roles = {name: located(getattr(plan, name)) for name in ("actor", "reference", "critic", "rollout")}
    return replace(plan, reward=reward, **roles)


@dataclass(frozen=True)
class PlannedPool:
    """The processes of a pool before they start; so many ``together``, with consecutive ranks, share a node.

    ``device``: of each, its first GPU, or the CPU, if ``None``.
    """

    layout: Layout
    config: RayConfig
    together: int = 1
    device: torch.device | None = None

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What they need, by groups that share a node."""
        return bundles_of(self.layout.world_size, self.config, self.together)


def planned_pools(plan: LaunchPlan, config: RayConfig) -> dict[str, PlannedPool]:
    """The processes of a run: ``models``, ``engines`` unless these share the models', and ``scorers`` of a reward function.

    Raises:
        InvalidConfig: the engine's ``tensor_parallel`` does not divide the processes that have engines.
    """
    apart = config.rollout_processes
    parallel = engine_ranks(plan.rollout.options, apart or plan.layout.world_size)
    pools = {"models": PlannedPool(plan.layout, config, lcm(plan.layout.tp, 1 if apart else parallel))}
    if apart:
        pools["engines"] = PlannedPool(Layout(dp=apart), config, parallel)
    if plan.reward is not None and not isinstance(plan.reward, ModelReward):
        without_device = replace(config, gpus=0.0, timeout_s=config.reward_timeout_s)
        scorers = Layout(dp=config.reward_processes)
        pools["scorers"] = PlannedPool(scorers, without_device, device=torch.device("cpu"))
    return pools


def planned_bundles(plan: LaunchPlan, config: RayConfig) -> list[dict[str, float]]:
    """What all processes of a run need, by groups that share a node."""
    return [bundle for pool in planned_pools(plan, config).values() for bundle in pool.bundles]


def layout_with_room(plan: LaunchPlan, config: RayConfig) -> Layout:
    """The layout, or if the nodes that are left have no room for the run, one with fewer dp positions and without replicas.

    Waits for what runs on the nodes only if there would be more room without it, and for nodes if there is no room at all.

    Raises:
        InvalidConfig: there is no room for one dp position either.
    """
    layout, together = plan.layout, planned_pools(plan, config)["models"].together
    smaller = [replace(layout, dp=dp, replicas=1, ep=gcd(layout.ep, dp * layout.sp)) for dp in range(layout.dp)[:0:-1]]
    choices = {each: planned_bundles(replace(plan, layout=each), config) for each in [layout, *smaller]
               if each.world_size % together == 0}  # fmt: skip

    def largest(room: Iterable[Mapping[str, float]]) -> Layout | None:
        nodes = list(room)
        return next((each for each, bundles in choices.items() if all_fit(bundles, nodes)), None)

    def enough(nodes: Sequence[NodeResources]) -> bool:
        return largest(node.free for node in nodes) == largest(node.total for node in nodes) is not None

    free = [node.free for node in wait_for_nodes(enough)]
    found = largest(free)
    if found is None:
        least = lcm(layout.world_size // layout.dp, together)
        kept = [{name: node.get(name, 0) for name in ("CPU", "GPU")} for node in free]
        raise InvalidConfig(
            f"the nodes that are left have {kept} free, which is too little: {layout} needs at least {least} processes with "
            f"models, {together} of them on a node at a time, in addition to those of separate engines and the reward"
        )
    if found != layout:
        told = "the nodes that are left have room for %d processes with models: %s instead of %s"
        log.warning(told, found.world_size, found, layout)
    return found


def start_worker(make: Callable[[torch.device | None], Any], stack: ExitStack, **options: Any) -> RayGroup:
    """Starts a process with one device. See `workers.cluster.launcher.launch_worker`."""
    config = _config(options)
    pickle_unimportable_modules_by_value()
    stack.enter_context(running_ray(config, 1))
    pool = RayPool(Layout(), config, new_step_blobs())
    stack.enter_context(ending(pool.close))
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


Pools = dict[str, RayPool]
"""The pools of `planned_pools`, started."""


def _start_pools(plan: LaunchPlan, config: RayConfig, stack: ExitStack) -> Pools:
    """Starts all processes at once, and waits for them."""
    blobs, pools = new_step_blobs(), Pools()
    for name, planned in planned_pools(plan, config).items():
        pools[name] = RayPool(planned.layout, planned.config, blobs, planned.together, planned.device)
        stack.enter_context(ending(pools[name].close))
    for pool in pools.values():
        pool.connect()
    return pools


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
        return lambda: pools["models"].build(
            "reward", lambda host: ModelRewardWorker(reward, model_path, host.device, host.ranks)
        )
    if reward is None:
        return None
    return pools["scorers"].begin_build("reward", lambda host: RewardWorker(reward, model_path))


def _begin_rollout(plan: LaunchPlan, pools: Pools) -> Callable[[], RayGroup]:
    """Engines with devices of their own start now, others when the result is called: their devices are shared."""

    def with_actor(host: Any) -> RolloutWorker:
        actor = host.roles["actor"]
        lora = lora_streams(plan.actor, actor.base_weights, actor.adapter_weights)
        return RolloutWorker(plan.rollout, actor.named_weights, host.ranks, reward=early_reward(plan), lora=lora)

    def apart(host: Any) -> RolloutWorker:
        def receive(dtype: torch.dtype) -> Any:
            return host.receive_weights()

        lora, reward = lora_streams(plan.actor, receive, receive), early_reward(plan)
        return RolloutWorker(plan.rollout, receive, host.ranks, shares_device=False, reward=reward, lora=lora)

    if "engines" not in pools:
        return lambda: pools["models"].build("rollout", with_actor)
    return pools["engines"].begin_build("rollout", apart)


def _weight_transfer(pools: Pools, rollout: RayGroup) -> Callable[[], None]:
    """A function that sends separate engines the actor's weights at the end of a step; they get them now for the first time."""
    if "engines" not in pools:
        return lambda: None  # these engines read the actor's weights before they next generate
    pools["models"].open_channel(pools["engines"])
    dtype = rollout.weights_dtype()

    def transfer_weights() -> None:
        pools["models"].transfer_weights("actor", rollout, dtype, rollout.wanted_streams())

    transfer_weights()
    return transfer_weights
