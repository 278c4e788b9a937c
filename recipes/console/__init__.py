"""What a run shows on the console: phases of its start, a table of steps, warnings, and a summary at its end."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from recipes.console.learning_signals import LearningSignals, Thresholds, learning_problems
    from recipes.console.progress import Progress
    from recipes.console.speed_signals import SpeedSignals
    from recipes.console.start_phases import announce_start, start_metrics, start_phase
    from recipes.console.summary import run_summary, show_summary

__all__ = [
    "LearningSignals",
    "Progress",
    "SpeedSignals",
    "Thresholds",
    "announce_start",
    "learning_problems",
    "run_summary",
    "show_summary",
    "start_metrics",
    "start_phase",
]

__getattr__ = lazy_names(__name__, __file__)
