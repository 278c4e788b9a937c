"""Ranks of a layout: positions, process groups, dispatch of calls, and failures."""

from workers.ranks.dispatch_modes import Arguments, Dispatch, dispatch
from workers.ranks.layout import Layout
from workers.ranks.mesh import AXES, Ranks, init_ranks

__all__ = ["AXES", "Arguments", "Dispatch", "Layout", "Ranks", "dispatch", "init_ranks"]
