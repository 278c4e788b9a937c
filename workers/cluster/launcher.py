"""`launch` starts the roles of a recipe on the backend that is chosen by name."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from dataproto.errors import InvalidConfig
from dataproto.extras import require_extra
from rollout.engine import check_engine_installed
from workers.cluster.role_groups import LaunchPlan, Phase, Roles, timed_phase
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig
from workers.roles.critic import CriticConfig
from workers.roles.model_worker import PolicyConfig
from workers.roles.reward import ModelReward, RewardFunction
from workers.roles.rollout_worker import RolloutConfig

log = logging.getLogger(__name__)

BACKENDS = {"local": "workers.cluster.local", "ray": "workers.cluster.ray_launcher"}
"""Modules with ``start_roles(LaunchPlan, Phase, **options) -> Roles``: imported when chosen, since Ray is optional."""


def launch(
    actor: ActorConfig | CriticConfig,
    reference: PolicyConfig | None = None,
    reward: RewardFunction | ModelReward | None = None,
    rollout: str | RolloutConfig | None = "hf",
    on: str = "local",
    layout: Layout | None = None,
    critic: CriticConfig | None = None,
    phase: Phase = nullcontext,
    libraries: Path | None = None,
    **options: Any,
) -> Roles:
    """Starts the roles of a recipe.

    ``start_seconds`` of the result has the seconds of each phase by name.

    Args:
        actor: the policy that learns; or a critic, for a reward model that learns in its place (without ``rollout``).
        reward: a function of rows, or a model.
        rollout: the name of an engine, or a `RolloutConfig` with options for it; ``None``: nothing is generated.
        on: the backend: ``"local"`` runs all roles in this process, ``"ray"`` starts one process for each rank of ``layout``,
            which holds all roles.
        layout: the degrees of parallelism of actor, reference and critic.
        phase: is called with the name of each phase of the start, and gives a context manager for the time of the phase.
        libraries: file to which other processes append what libraries warn of, once they are started.
        options: of the backend; for Ray the fields of `RayConfig`.

    Raises:
        InvalidConfig: the backend, the engine or an option is unknown, or the backend cannot run the layout.
        MissingPackage: the backend or the engine needs an extra that is not installed.
    """
    if isinstance(rollout, str):
        rollout = RolloutConfig(actor.model_path, engine=rollout)
    plan = LaunchPlan(actor, reference, reward, rollout, layout or Layout(), critic, libraries)
    if on not in BACKENDS:
        raise InvalidConfig(f"on={on!r} is unknown: choose one of {sorted(BACKENDS)}")
    check_extras(None if rollout is None else rollout.engine, on, options.get("address"))
    seconds: dict[str, float] = {}
    backend: Any = import_module(BACKENDS[on])
    roles: Roles = backend.start_roles(plan, timed_phase(phase, seconds), **options)
    if rollout is not None and (line := roles.rollout.how_lora()):
        log.info("%s", line)
    return replace(roles, start_seconds=seconds)


def check_extras(engine: str | None, on: str = "local", address: str | None = None) -> None:
    """Checks that the packages of a backend and of an engine are installed, without importing them.

    A running cluster at ``address`` may have an engine that this Python lacks.

    Raises:
        MissingPackage: names the missing package and its extra.
    """
    if on == "ray":
        require_extra("ray", "on='ray'", "ray")
    if address is None and engine is not None:
        check_engine_installed(engine)
