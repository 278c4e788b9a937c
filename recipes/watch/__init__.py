"""What a run shows: its console, files of metrics and rollouts, trackers, its report, and the viewer in the browser."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from recipes.watch.console import Progress, announce_start, run_summary, show_summary, start_metrics, start_phase
    from recipes.watch.kept_rollouts import KeptRollouts
    from recipes.watch.loggers import LOGGERS, RunLoggers, check_loggers, open_loggers
    from recipes.watch.metrics_file import MetricsLog, read_metrics
    from recipes.watch.report import write_report
    from recipes.watch.signals import LearningSignals, SpeedSignals, Thresholds, learning_problems
    from recipes.watch.trackers import LoggedRun, RunLogger
    from recipes.watch.viewer import ViewerServer

__all__ = [
    "LOGGERS",
    "KeptRollouts",
    "LearningSignals",
    "LoggedRun",
    "MetricsLog",
    "Progress",
    "RunLogger",
    "RunLoggers",
    "SpeedSignals",
    "Thresholds",
    "ViewerServer",
    "announce_start",
    "check_loggers",
    "learning_problems",
    "open_loggers",
    "read_metrics",
    "run_summary",
    "show_summary",
    "start_metrics",
    "start_phase",
    "write_report",
]

__getattr__ = lazy_names(__name__, __file__)
