"""Where the metrics and rollouts of a run go: ``metrics.jsonl`` always, and any number of trackers beside it.

A tracker of your own is a class with three methods, named on the command line as ``--loggers my_file.py:MyLogger``::

    class MyLogger:
        def __init__(self, run: LoggedRun) -> None: ...
        def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
        def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None: ...
        def close(self) -> None: ...
"""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from recipes.loggers.logger import LoggedRun, RunLogger
    from recipes.loggers.run_loggers import LOGGERS, RunLoggers, check_loggers, open_loggers

__all__ = ["LOGGERS", "LoggedRun", "RunLogger", "RunLoggers", "check_loggers", "open_loggers"]

__getattr__ = lazy_names(__name__, __file__)
