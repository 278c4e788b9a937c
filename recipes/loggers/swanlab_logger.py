"""SwanLab. Its own environment variables set the account and the mode (``SWANLAB_MODE=offline``)."""

import os
import secrets
from collections.abc import Mapping, Sequence

import swanlab

from recipes.loggers.logger import LoggedRun, finite
from recipes.report.samples import RolloutSample

PROJECT = "dataproto"


class SwanlabLogger:
    """Metrics by step; rollouts, since SwanLab has no tables, as texts and images with captions. Files: ``<run>/swanlog``.

    Online, a resumed run continues under its id; offline, each process leaves files of its own.
    """

    def __init__(self, run: LoggedRun) -> None:
        name = run.saved_id("swanlab") or secrets.token_hex(8)
        mode = os.environ.get("SWANLAB_MODE", "online")
        self.run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=run.name,
            config=run.config,
            log_dir=str(run.directory.absolute() / "swanlog"),
            mode=mode,
            **({"id": name, "resume": "allow"} if mode == "online" else {}),
        )
        run.save_id("swanlab", name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(finite(metrics), step=step)

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        texts = [swanlab.Text(f"{row.prompt}\n\n{row.response}", caption=_caption(row)) for row in rows]
        images = [swanlab.Image(image, caption=_caption(row)) for row in rows for image in row.images]
        found = {"rollouts/texts": texts, "rollouts/images": images}
        self.run.log({name: media for name, media in found.items() if media}, step=step)

    def close(self) -> None:
        self.run.finish()


def _caption(row: RolloutSample) -> str:
    return f"{row.key}: reward {row.reward:g}, ground truth {row.ground_truth}"
