"""The options of data of preferred answers."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dataproto.errors import InvalidConfig
from recipes.configs.shared.supervised_config import RowsConfig, tiny_schedule
from recipes.data.column_keys import ColumnKeys, refuse_without_data


@dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(RowsConfig):
    """Preferred answers: where they come from.

    Attributes:
        data_path: training data: parquet or JSON file, folder, or data set name; default: synthetic pairs
        eval_data_path: held-out answers: a set, or several, each as PATH or NAME=PATH; default: the "test" split of a folder
            or data set name, or a file's last rows
        media_root: folder at which relative paths of images and videos start; default: that of the file
        batch_size: pairs of a step, or answers without a partner
    """

    data_path: str | None = None
    media_root: str | None = None
    keys: ColumnKeys = field(default_factory=ColumnKeys)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_data(self, "pairs", "eval_data_path", "media_root")
        if self.keys.answer_key:
            raise InvalidConfig(
                "answer_key: the answers of a preference are the columns chosen and rejected, or completion"
            )

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            (not self.data_path, "on-bad-row", "all synthetic rows can be used: add --data-path"),
            (
                True,
                "max-response-length engine engine-options layout.rollout ray.reward-processes ray.reward-timeout-s",
                "nothing is generated: leave it out",
            ),
        ]


def tiny_preferences(output_dir: Path) -> dict[str, Any]:
    """Data, optimizer and run of a small model on synthetic pairs."""
    schedule = tiny_schedule(output_dir)
    run = replace(schedule["run"], steps=200, eval_every=50)
    return schedule | {"data": PreferenceDataConfig(batch_size=32, max_length=128), "run": run}
