"""Policy-gradient training of a vision-language model on problems with images, for any algorithm.

`PolicyGradientConfig` holds all options, `run` the rest of a recipe around its step function.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
from torch.utils.data import Subset

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.options import AlgorithmConfig, spelled_out
from recipes.console import start_phase
from recipes.data.column_keys import ColumnKeys
from recipes.data.drawn_rows import ProblemRows
from recipes.data.loader import EvaluationLoader, OnBadRow, PromptLoader, drop_overlong
from recipes.data.problem_rows import INSTRUCTION, load_rows
from recipes.report.kept_rollouts import KeptRollouts
from recipes.report.page import REPORT_FILE
from recipes.rewards import RewardFunction, load_reward
from recipes.run.command_line import announce_small_model, check_placement, parse_recipe
from recipes.run.evaluation import held_out_evaluation
from recipes.run.loop import Loader, Measure, RunConfig, attempts, measure_rollouts, train
from recipes.run.one_step_off import generate_ahead
from recipes.run.phases import Progression
from recipes.run.run_directory import over_epochs, over_the_run, recorded_run, with_schedules
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
from workers.roles.model_worker import PolicyConfig
from workers.roles.rollout_worker import RolloutConfig
from workers.training.loading import checkpoint_family
from workers.training.optimizer import OptimizerConfig

AlgorithmStep = Callable[..., tuple[DataProto, dict[str, float]]]
"""``step(roles, prompts, config, sampling, progression, more)`` -> rollouts, metrics; as `recipes.grpo.grpo_step`."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they come from and what fits."""

    data_path: str | None = None  # parquet file, folder, or data set name; drawn problems by default
    # held-out problems; default: the "test" split of --data-path, or a single file's last rows
    eval_data_path: str | None = None
    level: int = 1  # of the drawn problems
    batch_size: int = 512  # prompts of a step
    eval_rows: int = 256  # held-out problems: the first ones of their split
    eval_samples: int = 1  # answers to each: 1 greedy one, or several sampled as in training, for pass@k
    max_prompt_length: int = 2048  # tokens, image tokens included; longer prompts are left out
    max_response_length: int = 2048  # tokens; longer responses are cut
    min_pixels: int | None = None  # smaller images are enlarged; default: as the checkpoint says
    max_pixels: int | None = None  # larger images are shrunk; default: as the checkpoint says
    on_bad_row: OnBadRow = "stop"  # at an unusable row: stop, or skip it and take the next good one
    keys: tyro.conf.OmitArgPrefixes[ColumnKeys] = field(default_factory=ColumnKeys)
    instruction: str = INSTRUCTION  # added to the problem of a row in EasyR1's schema, or to the text of --prompt-key
    num_workers: int = 0  # processes that prepare images ahead

    def __post_init__(self) -> None:
        if self.eval_data_path and not self.data_path:
            raise InvalidConfig("eval_data_path without data_path: drawn problems have their own held-out problems")
        if self.keys.given() and not self.data_path:
            raise InvalidConfig(
                f"{next(iter(self.keys.given()))} without data_path: drawn problems have their own columns"
            )
        for name in ("batch_size", "eval_rows", "eval_samples", "max_prompt_length", "max_response_length"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)}: must be at least 1")
        if self.level not in LEVELS:
            raise InvalidConfig(f"level={self.level}: choose one of {sorted(LEVELS)}")
        if self.num_workers < 0:
            raise InvalidConfig(f"num_workers={self.num_workers}: must be at least 0")


@dataclass(frozen=True)
class PolicyGradientConfig:
    """All options of a run; written to config.json in its directory."""

    model_path: str | None = None  # checkpoint directory or hub name; a small Qwen2.5-VL made on the spot by default
    # FILE.py:FUNCTION in verl's, EasyR1's or TRL's form, classifier:MODEL, or the URL of a server; Geo3K's by default
    reward: str | None = None
    engine: str = "hf"  # what generates: hf or vllm
    engine_options: dict[str, int | float | bool | str] = field(default_factory=dict)  # of the engine: NAME VALUE ...
    compute: tyro.conf.OmitArgPrefixes[ModelConfig] = field(default_factory=ModelConfig)
    on: Literal["local", "ray"] = "local"  # in this process, or in a Ray process for each rank of the layout
    layout: Layout = field(default_factory=Layout)  # how actor and reference are spread over processes
    ray: RayConfig = field(default_factory=RayConfig)
    max_restarts: int = 0  # how often to restart from the last checkpoint after a worker has failed
    keep_rollouts: int = 64  # rows of each step, in whole groups, kept in output_dir for the viewer; 0: none
    one_step_off: bool = False  # generate the next batch during the update, on --ray.rollout-processes of its own
    data: tyro.conf.OmitArgPrefixes[DataConfig] = field(default_factory=DataConfig)
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=RunConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        check_placement(self)
        if self.one_step_off and (
            self.on == "local" or not self.ray.rollout_processes or self.algorithm.settings.dynamic_sampling
        ):
            raise InvalidConfig(
                "one_step_off generates during the update: give the engines separate devices with --on ray "
                "--ray.rollout-processes N, and leave dynamic sampling off"
            )
        if self.one_step_off and self.algorithm.compares_engine:
            raise InvalidConfig(
                f"algorithm.correction={self.algorithm.correction}, rejection={self.algorithm.rejection} compare the actor's old "
                "log-probs with the engine's, which one_step_off assumes to be equal: choose one of them"
            )
        if self.one_step_off and self.algorithm.needs_greedy:
            raise InvalidConfig(
                f"algorithm.advantage={self.algorithm.settings.advantage} needs greedy responses, but with one_step_off the "
                "engines generate the next batch: choose one of them"
            )
        if self.run.epochs is not None and not self.data.data_path:
            raise InvalidConfig("epochs without data_path: drawn problems do not repeat; give --steps")
        minibatch, batch = self.algorithm.minibatch, self.data.batch_size
        if minibatch is not None and minibatch > batch:
            raise InvalidConfig(f"algorithm.minibatch={minibatch} is more than the {batch} prompts of batch_size")
        longest = self.data.max_response_length
        buffer = self.algorithm.overlong_tokens(longest)
        if buffer > longest:
            raise InvalidConfig(f"algorithm.overlong_buffer={buffer} is more than max_response_length={longest}")

    @property
    def updates(self) -> dict[str, int]:
        """Optimizer steps in each step of the run, by the name of the optimizer's field."""
        return {"optimizer": self.algorithm.updates(self.data.batch_size)}

    @property
    def critic(self) -> OptimizerConfig | None:
        """The optimizer of the critic; ``None`` without one."""
        return None

    def check_models(self, model_path: str) -> None:
        """Raises `UnknownModel` or `InvalidConfig` for a model that this run cannot use; ``model_path`` is the policy's."""
        checkpoint_family(model_path)

    def reference(self, actor: ActorConfig) -> PolicyConfig | None:
        """The policy that a KL term or the advantage compares with: the actor before its training; ``None`` without either."""
        return actor.frozen() if self.algorithm.needs_reference else None

    def sampling(self) -> SamplingParams:
        """How responses are sampled for training."""
        return self.algorithm.sampling(self.data.max_response_length, self.run.seed)

    def eval_sampling(self) -> SamplingParams:
        """How held-out problems are answered: greedily, or ``data.eval_samples`` times, the same streams in each evaluation."""
        if self.data.eval_samples == 1:
            return SamplingParams(temperature=0, max_tokens=self.data.max_response_length)
        return replace(self.sampling(), n=self.data.eval_samples)


Config = TypeVar("Config", bound=PolicyGradientConfig)

# What the presets of a size share. 7B: the settings of the step that was measured on four H200 (benchmarks/RESULTS.md, "A whole
# GRPO step at scale"). 3B: the same batch on one; docs/command_line.md says why.
PUBLISHED_BATCH: dict[str, Any] = {
    "engine": "vllm",
    "data": DataConfig(level=4, max_prompt_length=1024),
}
SIZES: dict[str, dict[str, Any]] = {
    "3b": PUBLISHED_BATCH
    | {
        "model_path": "Qwen/Qwen2.5-VL-3B-Instruct",
        "engine_options": {"max_num_seqs": 512, "memory_share": 0.3},
        "compute": ModelConfig(token_budget=8192, activation_checkpointing="selective", compile=True),
    },
    "7b": PUBLISHED_BATCH
    | {
        "model_path": "Qwen/Qwen2.5-VL-7B-Instruct",
        "engine_options": {"max_num_seqs": 512, "memory_share": 0.4},
        "compute": ModelConfig(token_budget=10_240, activation_checkpointing="selective", compile=True),
        "on": "ray",
        "layout": Layout(dp=4),
    },
}


def parse_with_defaults(
    arguments: Sequence[str], real: Config, presets: Mapping[str, Config], description: str | None, prog: str
) -> Config:
    """The configuration of a command line: over a preset, or ``real`` with ``--model-path``; see `parse_recipe`.

    The KL term of a preset is dropped where the command line names an algorithm, whose paper then sets it.

    Raises:
        InvalidConfig: an unknown, ill-typed or idle option, or an impossible combination, in one line.
    """
    return parse_recipe(arguments, real, presets, description, prog, _without_kl)


def _without_kl(config: Config) -> Config:
    without: Config = replace(config, algorithm=replace(config.algorithm, kl_coef=None, kl_in=None))
    return without


def run(config: PolicyGradientConfig, step: AlgorithmStep) -> Path:
    """Trains by an algorithm's step function, with data, reward, evaluation, checkpoints, resume and report by the options.

    Your own algorithm needs only a step function::

        def my_step(roles, prompts, config, sampling, progression, more):
            data = roles.rollout.generate(prompts, sampling)
            data |= roles.reward.score(data)
            data["advantages"] = my_advantage(data["token_level_rewards"], data["response_mask"])
            metrics = roles.actor.update(data, policy_loss(config, entropy_coef=0.0), config.minibatch, entropy=True)
            roles.sync_weights()
            return data, metrics

        run(recipes.grpo.parse(["--steps", "10", "--output-dir", "outputs/mine"]), my_step)

    Args:
        config: e.g. from `recipes.grpo.parse`, or `recipes.ppo.parse` for a step that has a critic.
        step: see `AlgorithmStep`; ``config`` is ``config.algorithm``, ``sampling`` has its ``n`` and temperature.

    Returns:
        The path of the report, which an interrupted run leaves too.

    Raises:
        InvalidConfig, CheckpointError: the run directory or the data do not fit the options.
    """
    asked, started = config, time.monotonic()
    announce_small_model(config.model_path, config.data.data_path)
    reward = load_reward(config.reward or "geo3k")
    model_path = config.model_path
    if model_path is None:
        model_path = str(tiny_checkpoint(config.run.seed, phase=start_phase))
    config.check_models(model_path)  # before anything is written
    data = config.data
    with start_phase("loading the tokenizer and the image processor"):
        builder = PromptBuilder.from_pretrained(model_path, data.max_prompt_length, data.min_pixels, data.max_pixels)
    with start_phase("reading data"):
        loader, held_out = load_data(config, builder)
    config = replace(config, run=over_epochs(config.run, loader))
    config = with_schedules(config.run, config, **config.updates)
    evaluate = held_out_evaluation(held_out, config.eval_sampling(), config.run.output_dir)
    kept = KeptRollouts(config.run.output_dir, config.keep_rollouts, builder.tokenizer)
    recorded = replace(config, algorithm=spelled_out(config.algorithm))
    with recorded_run(config.run, recorded, asked, started) as directory:
        for attempt in attempts(config.run, loader, config.max_restarts):
            progression = Progression(config.algorithm.kl_controller())
            options = {"config": config.algorithm, "sampling": config.sampling(), "progression": progression}
            with attempt, launch_roles(config, model_path, builder, reward) as roles:
                batches: Loader = loader
                measure: Measure = measure_rollouts
                if config.one_step_off:
                    batches, measure = generate_ahead(roles, loader, progression, attempt.run.steps)
                train(
                    attempt.run, roles, batches, partial(step, **options), evaluate, builder, progression, measure, kept
                )
    return directory / REPORT_FILE


def launch_roles(
    config: PolicyGradientConfig, model_path: str, builder: PromptBuilder, reward: RewardFunction
) -> Roles:
    """The roles of a run: actor, engine and reward; a reference and a critic if the options have them."""
    actor = ActorConfig(
        model_path,
        temperature=config.algorithm.temperature,
        optimizer=over_the_run(config.optimizer, config.run.steps * config.updates["optimizer"]),
        **vars(config.compute),
    )
    options: dict[str, Any] = {}
    if config.engine == "vllm":  # it processes images itself
        options["max_model_len"] = config.data.max_prompt_length + config.data.max_response_length
        options["image_options"] = builder.image_options
    return launch(
        actor=actor,
        reference=config.reference(actor),
        reward=reward,
        rollout=RolloutConfig(model_path, config.engine, options | dict(config.engine_options)),
        on=config.on,
        layout=config.layout,
        critic=CriticConfig(model_path, optimizer=config.critic, **vars(config.compute)) if config.critic else None,
        phase=start_phase,
        **(vars(config.ray) if config.on == "ray" else {}),
    )


def load_data(config: PolicyGradientConfig, builder: PromptBuilder) -> tuple[PromptLoader, EvaluationLoader]:
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
    at_a_time = max(data.batch_size * config.algorithm.n // data.eval_samples, 1)
    return loader, EvaluationLoader(test_rows, builder, at_a_time, data.on_bad_row)


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
    rows, dropped = drop_overlong(load_rows(path, split, instruction=data.instruction, keys=data.keys), builder)
    if dropped:
        print(f"{path}: {len(dropped)} prompts of {split} exceed {data.max_prompt_length} tokens and are left out")
    return rows
