"""Weights & Biases. Its own environment variables set the account, the project and the mode (``WANDB_MODE=offline``)."""

import os
import secrets
from collections.abc import Mapping, Sequence

import wandb

from recipes.loggers.logger import LoggedRun, finite, table_rows
from recipes.report.samples import RolloutSample

PROJECT = "dataproto"


class WandbLogger:
    """Metrics over the axis ``step``; rollouts as a table with images. Files lie in ``<run>/wandb``.

    A resumed run continues under its id. Steps that it makes again are logged again, so that their curves overlap.
    """

    def __init__(self, run: LoggedRun) -> None:
        name = run.saved_id("wandb") or secrets.token_hex(4)
        os.environ.setdefault(
            "WANDB_DATA_DIR", str(run.directory.absolute())
        )  # pictures of tables, until they are synced
        self.run = wandb.init(
            id=name,
            resume="allow",
            name=run.name,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(run.directory),
            config=run.config,
        )
        run.save_id("wandb", name)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # W&B's own step could not go back after a resume

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({**finite(metrics), "step": step})

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        table = table_rows(rows, wandb.Image)
        columns: list[str | int] = list(table[0]) if table else []
        data = [list(row.values()) for row in table]
        self.run.log({"rollouts": wandb.Table(columns=columns, data=data), "step": step})

    def close(self) -> None:
        self.run.finish()
