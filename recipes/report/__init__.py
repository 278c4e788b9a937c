"""A run as a page for readers: its metrics file, kept rollouts and answers, charts, and the page that shows them."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from recipes.report.kept_rollouts import KeptRollouts
    from recipes.report.metrics_file import MetricsLog, read_metrics
    from recipes.report.page import write_report

__all__ = ["KeptRollouts", "MetricsLog", "read_metrics", "write_report"]

__getattr__ = lazy_names(__name__, __file__)
