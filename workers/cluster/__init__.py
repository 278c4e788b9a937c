"""Launches the roles of a run in this process or in many by Ray, and calls them."""

from workers.cluster.launcher import launch
from workers.cluster.local_group import LocalGroup
from workers.cluster.ray_config import RayConfig
from workers.cluster.role_groups import LaunchPlan, Roles

__all__ = ["LaunchPlan", "LocalGroup", "RayConfig", "Roles", "launch"]
