"""Launches the roles of a run in this process or in many by Ray, and calls them."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from workers.cluster.launcher import launch, launch_worker
    from workers.cluster.local_group import LocalGroup
    from workers.cluster.ray_config import RayConfig
    from workers.cluster.role_groups import LaunchPlan, Roles

__all__ = ["LaunchPlan", "LocalGroup", "RayConfig", "Roles", "launch", "launch_worker"]

__getattr__ = lazy_names(__name__, __file__)
