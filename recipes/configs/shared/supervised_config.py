"""The options that the recipes of supervised training share, those on preferred answers included."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dataproto.errors import InvalidConfig, check_at_least
from recipes.configs.shared.run_config import RecipeConfig, RunConfig, check_kept
from recipes.data.column_keys import ColumnOptions, RowOptions, refuse_without_data
from workers.model.model_config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class RowsConfig(RowOptions):
    """How rows become batches, wherever they come from.

    Attributes:
        eval_data_path: held-out rows: a set, or several, each as PATH or NAME=PATH; default: the "test" split of a folder or
            data set name, or a part of --data-path
        batch_size: rows of a step
        eval_rows: number of held-out rows of each set
        max_length: tokens of a row, image tokens included; longer rows are left out
        max_response_length: tokens of an answer to a held-out question; 0: none is asked
        num_workers: processes that prepare rows ahead
    """

    max_length: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "batch_size", "eval_rows", "max_length")
        check_at_least(0, self, "num_workers", "max_response_length")


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(RecipeConfig):
    """Model, optimizer and run; written to config.json in the run's directory.

    Attributes:
        engine: engine that answers held-out questions: hf or vllm
        keep_rows: rows of each step to keep in output_dir for the viewer, with the loss of each token; below 1 a share of
            them; 0: none
    """

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="cosine"))
    keep_rows: int | float = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kept("keep_rows", self.keep_rows)


def tiny_schedule(output_dir: Path) -> dict[str, Any]:
    """Optimizer and run for a model of under a million parameters, which learns synthetic rows within minutes on two cores."""
    return {
        "optimizer": OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=20),
        "run": RunConfig(steps=600, eval_every=100, save_every=200, output_dir=output_dir),
    }


@dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(RowsConfig, ColumnOptions):
    """Preferred answers: where they come from.

    Attributes:
        data_path: training data: parquet or JSON file, folder, or data set name; default: synthetic pairs
        eval_data_path: held-out answers: a set, or several, each as PATH or NAME=PATH; default: the "test" split of a folder
            or data set name, or a file's last rows
        batch_size: pairs of a step, or answers without a partner
    """

    data_path: str | None = None

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
