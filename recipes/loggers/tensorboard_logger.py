"""TensorBoard events in ``<run>/tensorboard``."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from recipes.loggers.logger import LoggedRun, finite
from recipes.report.samples import RolloutSample


class TensorBoardLogger:
    """Scalars by step; rollouts as texts and images. Events of steps that a resumed run makes again are hidden."""

    def __init__(self, run: LoggedRun) -> None:
        purge = None if run.resume_after is None else run.resume_after + 1
        self.events = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, number in finite(metrics).items():
            self.events.add_scalar(name, number, step)
        self.events.flush()

    def log_rollouts(self, step: int, rows: Sequence[RolloutSample]) -> None:
        for place, row in enumerate(rows):
            parts = {"prompt": row.prompt, "response": row.response, "ground truth": row.ground_truth}
            text = "\n\n".join(f"**{name}**\n\n{_indented(value)}" for name, value in parts.items())
            self.events.add_text(f"rollouts/{place:02}", f"{text}\n\n**reward** {row.reward:g}", step)
            for number, image in enumerate(row.images):
                pixels = np.asarray(image.convert("RGB"))
                self.events.add_image(f"rollouts/{place:02}/image_{number}", pixels, step, dataformats="HWC")
        self.events.flush()

    def close(self) -> None:
        self.events.close()


def _indented(text: str) -> str:
    """A block that Markdown shows as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
