"""GRPO on geometry problems: ``python -m recipes.geo3k_grpo``.

With no arguments it draws problems, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With ``--model-path``
and ``--data-path`` the same loop runs any Qwen2-VL, Qwen2.5-VL or Qwen3-VL checkpoint on Geometry3K or data of its kind.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
from torch.utils.data import Subset

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.options import AlgorithmConfig, spelled_out
from recipes.data.drawn_rows import ProblemRows
from recipes.data.loader import EvaluationLoader, OnBadRow, PromptLoader, drop_overlong
from recipes.data.problem_rows import INSTRUCTION, load_rows
from recipes.grpo import GRPOConfig, grpo_step
from recipes.report.page import write_report
from recipes.rewards import RewardFunction, load_reward
from recipes.run.command_line import names_a_model, names_an_algorithm, parse_config, run_from_command_line
from recipes.run.dynamic_sampling import More
from recipes.run.evaluation import evaluate_answers, save_processors
from recipes.run.loop import Loader, RunConfig, train, with_restarts
from recipes.run.one_step_off import LookAhead, RolloutAhead
from recipes.run.phases import Progression
from recipes.run.place import check_place
from recipes.run.run_directory import open_run_directory, over_the_run, with_schedules
from recipes.synthetic import LEVELS
from recipes.tiny import tiny_checkpoint
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder
from workers import Roles, launch
from workers.cluster.ray_config import RayConfig
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig
from workers.roles.critic import CriticConfig
from workers.roles.rollout_worker import RolloutConfig
from workers.training.loading import checkpoint_family
from workers.training.optimizer import OptimizerConfig

Tiny = TypeVar("Tiny", bound="Geo3KConfig")
# (roles, prompts, config.algorithm, sampling, progression, more) -> rollouts, metrics
Step = Callable[[Roles, DataProto, Any, SamplingParams, Progression, More], tuple[DataProto, dict[str, float]]]


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they come from and what fits."""

    data_path: str | None = None  # parquet file, folder, or data set name; drawn problems by default
    # held-out problems; default: the "test" split of --data-path, or a single file's last rows
    eval_data_path: str | None = None
    level: int = 1  # of the drawn problems
    batch_size: int = 512  # prompts of a step
    eval_rows: int = 256  # held-out problems: the first ones of their split
    max_prompt_length: int = 2048  # tokens, image tokens included; longer prompts are left out
    max_response_length: int = 2048  # tokens
    min_pixels: int | None = None  # smaller images are enlarged; default: as the checkpoint says
    max_pixels: int | None = None  # larger images are shrunk; default: as the checkpoint says
    on_bad_row: OnBadRow = "stop"  # at an unusable row: stop, or skip it and take the next good one
    instruction: str = INSTRUCTION  # added to the problem of a row in EasyR1's schema
    num_workers: int = 0  # processes that prepare images ahead

    def __post_init__(self) -> None:
        if self.eval_data_path and not self.data_path:
            raise InvalidConfig("eval_data_path without data_path: drawn problems come with held-out ones of their own")
        for name in ("batch_size", "eval_rows", "max_prompt_length", "max_response_length"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)}: must be at least 1")
        if self.level not in LEVELS:
            raise InvalidConfig(f"level={self.level}: choose one of {sorted(LEVELS)}")
        if self.num_workers < 0:
            raise InvalidConfig(f"num_workers={self.num_workers}: must be at least 0")


@dataclass(frozen=True)
class Geo3KConfig:
    """Everything the run depends on; written to config.json in its directory."""

    model_path: str | None = None  # checkpoint directory or hub name; a small Qwen2.5-VL made on the spot by default
    reward: str | None = None  # FILE.py:FUNCTION in verl's or TRL's form; Geo3K's reward by default
    engine: str = "hf"  # what generates: hf or vllm
    engine_options: dict[str, int | float | bool | str] = field(default_factory=dict)  # of the engine: NAME VALUE ...
    compute: tyro.conf.OmitArgPrefixes[ModelConfig] = field(default_factory=ModelConfig)
    on: Literal["local", "ray"] = "local"  # in this process, or in a Ray process for each rank of the layout
    layout: Layout = field(default_factory=Layout)  # how actor and reference are spread over processes
    ray: RayConfig = field(default_factory=RayConfig)
    max_restarts: int = 0  # after a worker has failed: start again from the last checkpoint, at most so often
    one_step_off: bool = False  # generate the next batch during the update, on --ray.rollout-processes of its own
    data: tyro.conf.OmitArgPrefixes[DataConfig] = field(default_factory=DataConfig)
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=RunConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        check_place(self)
        if self.one_step_off and (
            self.on == "local" or not self.ray.rollout_processes or self.algorithm.settings.dynamic_sampling
        ):
            raise InvalidConfig(
                "one_step_off overlaps the engines' work with the actor's: give the engines devices of their own by --on ray "
                "--ray.rollout-processes N, and leave dynamic sampling off"
            )
        if self.one_step_off and self.algorithm.compares_engine:
            raise InvalidConfig(
                f"algorithm.correction={self.algorithm.correction}, rejection={self.algorithm.rejection} compare the actor's old "
                "log-probs with the engine's, which one_step_off takes for equal: choose one"
            )
        if self.one_step_off and self.algorithm.needs_greedy:
            raise InvalidConfig(
                f"algorithm.advantage={self.algorithm.settings.advantage} asks the engines for greedy responses, which are busy "
                "with the next batch in one_step_off: choose one"
            )
        minibatch, batch = self.algorithm.minibatch, self.data.batch_size
        if minibatch is not None and minibatch > batch:
            raise InvalidConfig(f"algorithm.minibatch={minibatch} is more than the {batch} prompts of batch_size")
        longest = self.data.max_response_length
        buffer = self.algorithm.overlong_tokens(longest)
        if buffer > longest:
            raise InvalidConfig(f"algorithm.overlong_buffer={buffer} is more than max_response_length={longest}")


@dataclass(frozen=True)
class Geo3KGRPOConfig(Geo3KConfig):
    """A run of GRPO."""

    algorithm: GRPOConfig = field(default_factory=GRPOConfig)


# What a model of under a million parameters learns from drawn problems within minutes on two cores.
TINY = Geo3KGRPOConfig(
    data=DataConfig(batch_size=16, max_prompt_length=256, max_response_length=24, instruction=""),
    algorithm=GRPOConfig(n=16, kl_coef=0.1),
    optimizer=OptimizerConfig(lr=5e-4, schedule="linear", warmup_steps=10),
    run=RunConfig(steps=500, eval_every=50, save_every=100),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit status; a user's mistake is one line on stderr."""
    return run_from_command_line(run, parse, sys.argv[1:] if arguments is None else arguments)


def parse(arguments: Sequence[str]) -> Geo3KGRPOConfig:
    """The configuration of a command line. Defaults are the tiny model's, or with ``--model-path`` those for real ones.

    Raises:
        InvalidConfig: an unknown or ill-typed option, or an impossible combination, in one line.
    """
    default = Geo3KGRPOConfig() if names_a_model(arguments) else tiny_default(TINY, arguments)
    return parse_config(arguments, default, __doc__, "recipes.geo3k_grpo")


def tiny_default(tiny: Tiny, arguments: Sequence[str]) -> Tiny:
    """The tiny model's defaults; its KL term only where the command line leaves the algorithm to them."""
    if not names_an_algorithm(arguments):
        return tiny
    return replace(tiny, algorithm=replace(tiny.algorithm, kl_coef=None))


def run(config: Geo3KConfig, step: Step = grpo_step, critic: OptimizerConfig | None = None) -> Path:
    """Runs the recipe and returns the path of its report, which an interrupted run leaves too.

    Args:
        step: the algorithm, which takes ``config.algorithm``.
        critic: how its critic learns, if it has one.
    """
    config = with_schedules(config.run, config, optimizer=config.algorithm.updates(config.data.batch_size))
    reward = load_reward(config.reward or "geo3k")
    model_path = str(tiny_checkpoint(config.run.seed)) if config.model_path is None else config.model_path
    checkpoint_family(model_path)  # refuses what cannot run before anything is written
    data = config.data
    builder = PromptBuilder.from_pretrained(model_path, data.max_prompt_length, data.min_pixels, data.max_pixels)
    loader, held_out = load_data(config, builder)
    directory = open_run_directory(config.run, replace(config, algorithm=spelled_out(config.algorithm)))

    def attempt(run: RunConfig) -> None:
        progression = Progression(config.algorithm.kl_controller())

        def make_step(prompts: DataProto, more: More) -> tuple[DataProto, dict[str, float]]:
            data, metrics = step(roles, prompts, config.algorithm, sampling(config), progression, more)
            if isinstance(roles.rollout, RolloutAhead):
                metrics["training/staleness"] = roles.rollout.staleness
            return data, metrics

        with start(config, model_path, reward, critic) as roles:
            batches: Loader = loader
            if config.one_step_off:
                batches = ahead = LookAhead(loader)
                roles.rollout = RolloutAhead(roles.rollout, ahead, lambda: progression.steps + 1 < run.steps)
            train(
                run,
                roles,
                batches,
                make_step,
                lambda step: evaluate(roles, held_out, config, step),
                lambda target: save_processors(builder, target),
                progression,
            )

    try:
        with_restarts(attempt, config.run, loader, config.max_restarts)
    finally:
        report = write_report(directory)
    return report


def start(config: Geo3KConfig, model_path: str, reward: RewardFunction, critic: OptimizerConfig | None = None) -> Roles:
    updates = config.run.steps * config.algorithm.updates(config.data.batch_size)
    optimizer = over_the_run(config.optimizer, updates)
    actor = ActorConfig(
        model_path,
        temperature=config.algorithm.temperature,
        optimizer=optimizer,
        **vars(config.compute),
    )
    return launch(
        actor=actor,
        reference=actor.frozen() if config.algorithm.settings.kl_coef else None,
        reward=reward,
        rollout=rollout_config(config, model_path),
        on=config.on,
        layout=config.layout,
        critic=critic_config(config, model_path, critic) if critic else None,
        **(vars(config.ray) if config.on == "ray" else {}),
    )


def rollout_config(config: Geo3KConfig, model_path: str) -> RolloutConfig:
    """The engine; one that processes images itself is told of their limits and of the longest row."""
    if config.engine != "vllm":
        return RolloutConfig(model_path, config.engine, dict(config.engine_options))
    data = config.data
    builder = PromptBuilder.from_pretrained(model_path, data.max_prompt_length, data.min_pixels, data.max_pixels)
    options = {
        "max_model_len": data.max_prompt_length + data.max_response_length,
        "image_options": builder.image_options,
    }
    return RolloutConfig(model_path, config.engine, options | dict(config.engine_options))


def critic_config(config: Geo3KConfig, model_path: str, optimizer: OptimizerConfig) -> CriticConfig:
    """A critic that starts from the policy's checkpoint."""
    return CriticConfig(model_path, optimizer=optimizer, **vars(config.compute))


def sampling(config: Geo3KConfig) -> SamplingParams:
    return config.algorithm.sampling(config.data.max_response_length, config.run.seed)


def load_data(config: Geo3KConfig, builder: PromptBuilder) -> tuple[PromptLoader, EvaluationLoader]:
    """Training prompts without end, and the held-out ones."""
    data, seed = config.data, config.run.seed
    if data.data_path is None:
        train_rows: Any = ProblemRows(data.level, seed, "train", data.instruction)
        test_rows: Any = ProblemRows(data.level, 0, "test", data.instruction)[: data.eval_rows]
    else:
        train_rows, test_rows = open_data_set(data, builder)
    loader = PromptLoader(
        train_rows,
        builder,
        data.batch_size,
        seed,
        shuffle=data.data_path is not None,
        on_bad_row=data.on_bad_row,
        num_workers=data.num_workers,
    )
    return loader, EvaluationLoader(test_rows, builder, data.batch_size * config.algorithm.n, data.on_bad_row)


def open_data_set(data: DataConfig, builder: PromptBuilder) -> tuple[Any, Any]:
    """Training and held-out rows that fit; a single file gives its last rows, at most a fifth, as held-out ones."""
    path = str(data.data_path)
    rows = fitting_rows(path, "train", data, builder)
    if data.eval_data_path or not Path(path).is_file():
        held_out = fitting_rows(data.eval_data_path or path, "test", data, builder)
        return rows, Subset(held_out, range(min(data.eval_rows, len(held_out))))
    kept = len(rows) - min(data.eval_rows, len(rows) // 5)
    if kept == len(rows):
        raise InvalidConfig(f"{path} has {len(rows)} rows, too few to hold some out: give --eval-data-path")
    return Subset(rows, range(kept)), Subset(rows, range(kept, len(rows)))


def fitting_rows(path: str, split: str, data: DataConfig, builder: PromptBuilder) -> Any:
    """The rows of a data set whose prompts are not too long; says how many were."""
    rows, dropped = drop_overlong(load_rows(path, split, instruction=data.instruction), builder)
    if dropped:
        print(f"{path}: {len(dropped)} prompts of {split} exceed {data.max_prompt_length} tokens and are left out")
    return rows


def evaluate(roles: Roles, held_out: EvaluationLoader, config: Geo3KConfig, step: int) -> dict[str, float]:
    """Greedy answers to the held-out problems: their metrics, and some of them kept for the report."""
    metrics, _ = evaluate_answers(roles, held_out, config.data.max_response_length, config.run.output_dir, step)
    return metrics | {"data/skipped_eval_rows": len(held_out.skipped)}


if __name__ == "__main__":
    sys.exit(main())
