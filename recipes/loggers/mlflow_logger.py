"""MLflow: files in ``<run>/mlruns``, or the server that ``MLFLOW_TRACKING_URI`` names."""

import os
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import mlflow
from mlflow.entities import Metric, Param
from PIL import Image

from recipes.loggers.logger import LoggedRun, finite, table_rows
from recipes.report.samples import RolloutSample

EXPERIMENT = "dataproto"
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000  # MLflow's limits of one request


class MlflowLogger:
    """Metrics by step, options as parameters, rollouts as a table with images for each evaluation.

    MLflow's names have no ``@``: ``acc/mean@1`` becomes ``acc/mean_at_1``, as in verl; see `free_name`. A resumed run
    continues its MLflow run.
    """

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # else it asks for a database, which mlflow-skinny lacks
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.directory.absolute() / "mlruns").as_uri()
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        self.run_id = run.saved_id("mlflow") or self._create(run)
        run.save_id("mlflow", self.run_id)
        self.client.update_run(self.run_id, status="RUNNING")
        self.names = set(self.client.get_run(self.run_id).data.metrics)

    def _create(self, run: LoggedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        run_id: str = self.client.create_run(experiment, run_name=run.name).info.run_id
        options = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in run.options().items()]
        for start in range(0, len(options), MOST_PARAMS):
            self.client.log_batch(run_id, params=options[start : start + MOST_PARAMS])
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = []
        for name, value in sorted(finite(metrics).items()):  # a name comes before those within it
            free = free_name(name.replace("@", "_at_"), self.names)
            self.names.add(free)
            entries.append(Metric(free, value, now, step))
        for start in range(0, len(entries), MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=entries[start : start + MOST_METRICS])

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        blank = mlflow.Image(Image.new("RGB", (1, 1), "white"))  # MLflow refuses a column of images and gaps
        table = table_rows(rows, mlflow.Image, blank)
        columns: dict[str, Any] = {name: [row[name] for row in table] for name in table[0]} if table else {}
        self.client.log_table(self.run_id, columns, f"rollouts/step_{step}.json")

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


def free_name(name: str, used: AbstractSet[str]) -> str:
    """The name of a metric in MLflow, whose files cannot hold a name and others within it.

    >>> free_name("timing_s/step/read", {"timing_s/step"}), free_name("timing_s/step", {"timing_s/step/read"})
    ('timing_s/step.read', 'timing_s/step/all')
    """
    parts = name.split("/")
    for end in range(1, len(parts)):
        if (outer := "/".join(parts[:end])) in used:
            return f"{outer}.{'/'.join(parts[end:])}"
    return f"{name}/all" if any(each.startswith(f"{name}/") for each in used) else name
