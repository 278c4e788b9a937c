"""`launch` starts the roles of a recipe on the backend that is chosen by name."""

from contextlib import nullcontext
from importlib import import_module
from typing import Any

from dataproto.errors import InvalidConfig
from dataproto.extras import require_extra
from workers.cluster.role_groups import LaunchPlan, Phase, Roles
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig
from workers.roles.critic import CriticConfig
from workers.roles.model_worker import PolicyConfig
from workers.roles.reward import ModelReward, RewardFunction
from workers.roles.rollout_worker import RolloutConfig

BACKENDS = {
    "local": "workers.cluster.local_launcher:launch_local",
    "ray": "workers.cluster.ray_launcher:launch_ray",
}
"""``(LaunchPlan, Phase, **options) -> Roles`` by name, as ``module:function``: imported when chosen, since Ray is optional."""


def launch(
    actor: ActorConfig,
    reference: PolicyConfig | None = None,
    reward: RewardFunction | ModelReward | None = None,
    rollout: str | RolloutConfig = "hf",
    on: str = "local",
    layout: Layout | None = None,
    critic: CriticConfig | None = None,
    phase: Phase = nullcontext,
    **options: Any,
) -> Roles:
    """Starts the roles of a recipe.

    Args:
        reward: a function of rows, or a model.
        rollout: the name of an engine, or a `RolloutConfig` with options for it.
        on: the backend: ``"local"`` runs all roles in this process, ``"ray"`` starts one process for each rank of ``layout``,
            which holds all roles.
        layout: the degrees of parallelism of actor, reference and critic.
        phase: is called with the name of each phase of the start, and gives a context manager for the time of the phase.
        options: of the backend; for Ray the fields of `RayConfig`.

    Raises:
        InvalidConfig: the backend, the engine or an option is unknown, or the backend cannot run the layout.
        MissingPackage: the backend or the engine needs an extra that is not installed.
    """
    if on not in BACKENDS:
        raise InvalidConfig(f"on={on!r} is unknown: choose one of {sorted(BACKENDS)}")
    if on == "ray":
        require_extra("ray", "on='ray'", "ray")
    if isinstance(rollout, str):
        rollout = RolloutConfig(actor.model_path, engine=rollout)
    module, _, name = BACKENDS[on].partition(":")
    plan = LaunchPlan(actor, reference, reward, rollout, layout or Layout(), critic)
    roles: Roles = getattr(import_module(module), name)(plan, phase, **options)
    return roles
