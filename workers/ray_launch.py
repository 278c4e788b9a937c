"""Roles in Ray processes: which worker stands where."""

from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from dataproto.errors import InvalidConfig
from workers.actor import ActorWorker
from workers.launch import Plan, Roles
from workers.layout import Layout
from workers.policy import ReferenceWorker
from workers.ray_config import RayConfig
from workers.ray_group import RayPool, StepBlobs, running_ray
from workers.reward import RewardWorker
from workers.rollout import RolloutWorker


def launch_ray(plan: Plan, **options: Any) -> Roles:
    """One process for each rank of the layout, each holding that rank of actor, reference and rollout; the reward has processes
    without a device.

    Raises:
        InvalidConfig: an unknown option, or the cluster is too small.
    """
    unknown = sorted(options.keys() - {field.name for field in fields(RayConfig)})
    if unknown:
        raise InvalidConfig(f"on='ray' has no options {unknown}: it has {[field.name for field in fields(RayConfig)]}")
    config, blobs = RayConfig(**options), StepBlobs()
    with ExitStack() as stack:
        stack.enter_context(running_ray(config, plan.layout.world_size + 1))
        pool = RayPool(plan.layout, config, blobs)
        stack.callback(pool.close)
        actor = pool.build("actor", lambda host: ActorWorker(plan.actor, host.device, host.ranks))
        optional: dict[str, Any] = {"reference": None, "reward": None}
        if plan.reference is not None:
            policy = plan.reference
            optional["reference"] = pool.build(
                "reference", lambda host: ReferenceWorker(policy, host.device, host.ranks)
            )
        rollout = pool.build("rollout", lambda host: RolloutWorker(plan.rollout, host.roles["actor"].named_weights))
        if plan.reward is not None:
            score_rows = plan.reward
            scorers = RayPool(Layout(), RayConfig(cpus=config.cpus, gpus=0, timeout_s=config.timeout_s), blobs)
            stack.callback(scorers.close)
            optional["reward"] = scorers.build("reward", lambda host: RewardWorker(score_rows, plan.actor.model_path))
        return Roles(actor, rollout, optional, stack.pop_all().close, blobs.renew)
