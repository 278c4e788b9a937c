"""A run as a page for readers: its metrics file, sampled answers, charts, and the page that shows them."""

from recipes.report.metrics_file import MetricsLog, read_metrics
from recipes.report.page import write_report

__all__ = ["MetricsLog", "read_metrics", "write_report"]
