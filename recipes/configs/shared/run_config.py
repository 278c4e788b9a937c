"""The options that every run has: its length, what it writes and when, and where it runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dataproto.errors import InvalidConfig, check_at_least
from recipes.watch.loggers import check_loggers
from rollout.engine import ENGINES, check_engine_options
from workers.cluster.ray_config import RayConfig
from workers.model.model_config import ModelConfig, OptimizerConfig
from workers.ranks.layout import Layout

Measured = Literal["accuracy", "loss"]


@dataclass(frozen=True)
class RunConfig:
    """The length of a run, and what it writes and when.

    Attributes:
        steps: steps of the run, each a batch and its update
        epochs: passes over the data, in place of --steps
        eval_every: steps between evaluations; 0: before the first and after the last step only
        eval_first: evaluate before the first step too
        save_every: steps between checkpoints; 0: after the last step only
        save_in_background: write checkpoints while training continues, from a copy in host memory
        keep_checkpoints: number of newest checkpoints to keep
        keep_best: also keep the checkpoint with the best held-out accuracy or loss; best.json names its step
        resume: continue from the newest checkpoint in output_dir, or begin if there is none
        change: options of a run that --resume continues, as NAME=VALUE, which change from here on: steps, rates,
            schedules, evaluation, saving, weights of rewards, clip and KL; config.json records them
        overwrite: begin anew; the run that output_dir holds is deleted once model, data and options have been checked
        seed: seed of data order and sampling, and of the small model's weights
        output_dir: directory of metrics, checkpoints and report
        loggers: trackers in addition to metrics.jsonl: tensorboard, wandb, trackio, swanlab, or a class of yours
            as FILE.py:CLASS; default: tensorboard if it is installed
        console_columns: metrics that the console shows too, such as reward/acc
    """

    steps: int = 100
    epochs: int | None = None
    eval_every: int = 0
    eval_first: bool = True
    save_every: int = 20
    save_in_background: bool = False
    keep_checkpoints: int = 2
    keep_best: Measured | None = None
    resume: bool = False
    change: tuple[str, ...] = ()
    overwrite: bool = False
    seed: int = 0
    output_dir: Path = Path("outputs/grpo")
    loggers: tuple[str, ...] | None = None
    console_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_dir", Path(self.output_dir))
        check_at_least(1, self, "steps", "keep_checkpoints", "epochs")
        check_at_least(0, self, "eval_every", "save_every")
        if self.keep_best and not self.eval_every:
            raise InvalidConfig(f"keep_best={self.keep_best} compares evaluations: give --eval-every")
        if self.resume and self.overwrite:
            raise InvalidConfig("resume and overwrite contradict each other: choose one")
        if not 0 <= self.seed < 2**63:
            raise InvalidConfig(f"seed={self.seed}: must be at least 0 and less than 2**63")
        check_loggers(self.loggers or ())


def announce_small_model(config: Any) -> None:
    """Says in one line what a run with data and without ``--model-path`` trains."""
    data_path = getattr(getattr(config, "data", None), "data_path", None)
    if config.model_path is None and data_path:
        paths = data_path if isinstance(data_path, str) else " ".join(data_path)
        print(
            f"no --model-path: trains the small Qwen2.5-VL made on the spot on {paths}; "
            "choose another model with --model-path or a preset"
        )


def check_kept(option: str, limit: float) -> None:
    """Raises `InvalidConfig` for what is neither a number of rows, nor a share below 1, nor 0."""
    if not limit >= 0 or (limit > 1 and limit % 1):
        raise InvalidConfig(f"{option}={limit}: must be a number of rows, a share below 1, or 0")


@dataclass(frozen=True)
class RecipeConfig:
    """The options of every recipe that trains; written to config.json in its directory.

    Attributes:
        preset: name of the preset whose defaults these are
        model_path: checkpoint directory or hub name; by default a small Qwen2.5-VL is made on the spot
        engine: engine that generates: hf or vllm
        engine_options: options of the engine
        on: where to run: in this process, or in a Ray process for each rank of the layout
        layout: how the model is spread over processes
        max_restarts: how often to restart from the last checkpoint after a worker has failed
    """

    preset: str = "any"
    model_path: str | None = None
    engine: str = "hf"
    engine_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    compute: ModelConfig = field(default_factory=ModelConfig)
    on: Literal["local", "ray"] = "local"
    layout: Layout = field(default_factory=Layout)
    ray: RayConfig = field(default_factory=RayConfig)
    max_restarts: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidConfig(f"engine {self.engine!r} is unknown: choose one of {', '.join(sorted(ENGINES))}")
        check_engine_options(self.engine, self.engine_options)
        check_at_least(0, self, "max_restarts")
        if self.on == "local" and self.layout.world_size + self.layout.rollout > 1:
            raise InvalidConfig(f"{self.layout} needs several processes: add --on ray")
        if self.compute.lora_rank and self.layout.tp > 1:
            raise InvalidConfig("lora_rank with layout.tp: adapters are not split; use dp or sp instead of tp")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        layout = self.layout
        return [
            (self.on == "local", "ray. max-restarts", "this run starts no processes: add --on ray"),
            (layout.pp == 1, "pipeline-layers", "one stage: add --layout.pp"),
            (layout.dp * layout.sp == 1, "unsharded offload", "nothing is sharded: add --layout.dp or --layout.sp"),
        ]
