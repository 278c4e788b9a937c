"""The columns of the console's table of steps: which metrics they show, and how wide they are."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of numbers: the mean of the metrics whose name matches the first of ``patterns`` that any name matches."""

    title: str
    patterns: tuple[str, ...]
    form: str = ".3f"
    measured_apart: bool = False  # from training, by an evaluation: its row is never left out

    @property
    def width(self) -> int:
        return max(len(self.title), 8)

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The number to show; ``None`` where the metrics have no finite one.

        >>> metrics = {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 1.0}
        >>> Column("accuracy", (r"val-core/.*/acc/mean@\\d+",)).value(metrics)
        0.75
        """
        for pattern in self.patterns:
            values = [value for name, value in metrics.items() if re.fullmatch(pattern, name) and math.isfinite(value)]
            if values:
                return math.fsum(values) / len(values)
        return None


HELD_OUT_ACCURACY = Column("held-out acc", (r"val-core/.*/acc/mean@\d+",), measured_apart=True)
HELD_OUT_REWARD = Column("held-out reward", (r"val-core/.*/reward/mean@\d+",), measured_apart=True)
HELD_OUT_LOSS = Column("held-out loss", ("val/loss",), measured_apart=True)
LOSS = Column("loss", ("train/loss",))
REWARD = Column("reward", ("critic/score/mean",))
KL = Column("KL", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), form=".4f")
LENGTH = Column("length", ("response_length/mean", "row_length/mean"), form=",.1f")
THROUGHPUT = Column("tokens/s/device", ("perf/throughput",), form=",.0f")

COLUMNS = (HELD_OUT_ACCURACY, HELD_OUT_LOSS, LOSS, REWARD, KL, LENGTH, THROUGHPUT)
GAP = "  "
LEFT = "left"
LEFT_WIDTH = 8


class StepTable:
    """Rows of numbers under a header. A column appears with its first number, and stays."""

    def __init__(self, total: int, repeat: int = 20) -> None:
        """``total``: steps of the run; ``repeat``: rows after which the header is printed again."""
        self.total, self.repeat = total, repeat
        self.columns: tuple[Column, ...] = ()
        self._rows_since_header = repeat

    def lines(self, step: int, metrics: Mapping[str, float], left: str = "") -> list[str]:
        """The row of a step, below a header where one is due.

        >>> table = StepTable(10)
        >>> for line in table.lines(1, {"critic/score/mean": 0.25, "perf/throughput": 1234.5}, "0:09"):
        ...     print(line)
         step    reward  tokens/s/device      left
         1/10     0.250            1,234      0:09
        >>> table.lines(2, {"critic/score/mean": 0.5, "perf/throughput": float("nan")})
        [' 2/10     0.500']
        """
        values = {column: column.value(metrics) for column in COLUMNS}
        shown = tuple(column for column in COLUMNS if column in self.columns or values[column] is not None)
        header = shown != self.columns or self._rows_since_header == self.repeat
        self.columns = shown
        self._rows_since_header = 1 if header else self._rows_since_header + 1
        cells = ["" if (value := values[column]) is None else f"{value:{column.form}}" for column in shown]
        row = self._line(f"{step}/{self.total}", cells, left)
        return [self._line("step", [column.title for column in shown], LEFT), row] if header else [row]

    def _line(self, step: str, cells: Sequence[str], left: str) -> str:
        widths = [column.width for column in self.columns]
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return GAP.join(
            [step.rjust(max(len("step"), 2 * len(str(self.total)) + 1)), *padded, left.rjust(LEFT_WIDTH)]
        ).rstrip()
