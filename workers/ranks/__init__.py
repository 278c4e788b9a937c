"""Ranks of a layout: positions, process groups, dispatch of calls, and failures."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from workers.ranks.dispatch_modes import Arguments, Dispatch, dispatch
    from workers.ranks.layout import Layout
    from workers.ranks.mesh import AXES, Ranks, init_ranks

__all__ = ["AXES", "Arguments", "Dispatch", "Layout", "Ranks", "dispatch", "init_ranks"]

__getattr__ = lazy_names(__name__, __file__)
