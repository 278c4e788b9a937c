"""The options that the recipes of supervised training share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from dataproto.errors import InvalidConfig
from recipes.configs.shared.run_config import RunConfig, check_kept, check_placement
from recipes.data.column_keys import OnBadRow
from workers.cluster.ray_config import RayConfig
from workers.model.model_config import ModelConfig, OptimizerConfig
from workers.ranks.layout import Layout


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """How rows become batches, wherever they come from."""

    batch_size: int = 64  # rows of a step
    eval_rows: int = 256  # held-out rows
    max_length: int = 4096  # tokens, image tokens included; longer rows are left out
    max_response_length: int = 128  # tokens of an answer to a held-out question; 0: none is asked
    min_pixels: int | None = None  # smaller images are enlarged; default: as the checkpoint says
    max_pixels: int | None = None  # larger images are shrunk; default: as the checkpoint says
    # of the chat template, in training and evaluation: NAME VALUE ..., such as enable_thinking false
    template_arguments: dict[str, int | float | bool | str] = field(default_factory=dict)
    on_bad_row: OnBadRow = "stop"  # at an unusable row: stop, or skip it and take the next good one
    num_workers: int = 0  # processes that prepare rows ahead

    def __post_init__(self) -> None:
        for name in ("batch_size", "eval_rows", "max_length"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("num_workers", "max_response_length"):
            if getattr(self, name) < 0:
                raise InvalidConfig(f"{name}={getattr(self, name)}: must be at least 0")


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """Model, optimizer and run; written to config.json in the run's directory."""

    preset: str = "any"  # whose defaults these are
    model_path: str | None = None  # checkpoint directory or hub name; a small Qwen2.5-VL made on the spot by default
    engine: str = "hf"  # what answers held-out questions
    engine_options: dict[str, int | float | bool | str] = field(default_factory=dict)  # of the engine: NAME VALUE ...
    compute: tyro.conf.OmitArgPrefixes[ModelConfig] = field(default_factory=ModelConfig)
    on: Literal["local", "ray"] = "local"  # in this process, or in a Ray process for each rank of the layout
    layout: Layout = field(default_factory=Layout)  # how the model is spread over processes
    ray: RayConfig = field(default_factory=RayConfig)
    max_restarts: int = 0  # how often to restart from the last checkpoint after a worker has failed
    # rows of each step, or below 1 a share of them, kept in output_dir for the viewer with the loss of each token; 0: none
    keep_rows: int | float = 16
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=RunConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="cosine"))

    def __post_init__(self) -> None:
        check_placement(self)
        check_kept("keep_rows", self.keep_rows)


def tiny_schedule(output_dir: Path) -> dict[str, Any]:
    """Optimizer and run for a model of under a million parameters, which learns drawn rows within minutes on two cores."""
    return {
        "optimizer": OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=20),
        "run": RunConfig(steps=600, eval_every=100, save_every=200, output_dir=output_dir),
    }
