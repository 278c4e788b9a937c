"""A simulator of steps on clusters that are not at hand: ``dataproto plan --devices N``; see docs/cluster_plan.md."""

from recipes.simulation.cluster_shape import Cluster, Traffic
from recipes.simulation.layout_search import as_options, best_step, possible_layouts
from recipes.simulation.published_models import PUBLISHED, published_config
from recipes.simulation.simulated_step import SimulatedPhase, SimulatedStep, simulate
from recipes.simulation.simulation_options import simulated
from recipes.simulation.simulation_table import simulation_lines
from recipes.simulation.workload import Choice, ModelParts, Workload

__all__ = [
    "PUBLISHED",
    "Choice",
    "Cluster",
    "ModelParts",
    "SimulatedPhase",
    "SimulatedStep",
    "Traffic",
    "Workload",
    "as_options",
    "best_step",
    "possible_layouts",
    "published_config",
    "simulate",
    "simulated",
    "simulation_lines",
]
