"""Trackio (Hugging Face): in its own directory, which ``trackio show`` reads, or the Space that ``TRACKIO_SPACE_ID`` names."""

import os
import secrets
from collections.abc import Mapping, Sequence

import trackio

from recipes.loggers.logger import LoggedRun, finite, table_rows
from recipes.report.samples import RolloutSample

PROJECT = "dataproto"


class TrackioLogger:
    """Metrics by step; rollouts as a table with images. A resumed run continues under its name; steps made again appear twice."""

    def __init__(self, run: LoggedRun) -> None:
        saved = run.saved_id("trackio")
        name = saved or f"{run.name}-{secrets.token_hex(4)}"
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name,
            config=run.options(),
            resume="must" if saved else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        run.save_id("trackio", name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(finite(metrics), step=step)

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        table = table_rows(rows, trackio.Image)
        columns = list(table[0]) if table else []
        data = [list(row.values()) for row in table]
        self.run.log({"rollouts": trackio.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        self.run.finish()
