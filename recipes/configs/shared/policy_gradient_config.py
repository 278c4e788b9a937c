"""The options of policy-gradient training, for any algorithm, and the presets of a size of model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import tyro

from dataproto.errors import InvalidConfig
from recipes.algorithms.options import OF_THE_PAPER, AlgorithmConfig
from recipes.configs.shared.carrying_config import CarryingConfig
from recipes.configs.shared.device_preset import Machine, fitting, on_devices, this_machine
from recipes.configs.shared.run_config import RunConfig, check_kept, check_placement
from recipes.data.column_keys import ColumnKeys, OnBadRow
from recipes.data.problem_rows import INSTRUCTION
from recipes.data.row_values import read_instruction
from recipes.demo.problems import LEVELS
from recipes.options import parse_recipe
from rollout.engine import SamplingParams, check_early_rewards, engine_ranks, slots_for
from workers.cluster.ray_config import RayConfig
from workers.model.model_config import ModelConfig, OptimizerConfig
from workers.ranks.layout import Layout

if TYPE_CHECKING:
    from workers.roles.actor import ActorConfig
    from workers.roles.model_worker import PolicyConfig


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they come from and what fits."""

    data_path: str | None = None  # parquet file, folder, or data set name; drawn problems by default
    # held-out problems; default: the "test" split of --data-path, or a single file's last rows
    eval_data_path: str | None = None
    media_root: str | None = (
        None  # folder at which relative paths of images and videos start; default: that of the file
    )
    level: int = 1  # of the drawn problems
    batch_size: int = 512  # prompts of a step
    eval_rows: int = 256  # held-out problems: the first ones of their split
    eval_samples: int = 1  # answers to each: 1 greedy one, or several sampled as in training, for pass@k
    max_prompt_length: int = 2048  # tokens, image tokens included; longer prompts are left out
    max_response_length: int = 2048  # tokens; longer responses are cut
    min_pixels: int | None = None  # smaller images are enlarged; default: as the checkpoint says
    max_pixels: int | None = None  # larger images are shrunk; default: as the checkpoint says
    # of the chat template, in training and evaluation: NAME VALUE ..., such as enable_thinking false
    template_arguments: dict[str, int | float | bool | str] = field(default_factory=dict)
    on_bad_row: OnBadRow = "stop"  # at an unusable row: stop, or skip it and take the next good one
    keys: tyro.conf.OmitArgPrefixes[ColumnKeys] = field(default_factory=ColumnKeys)
    # added to the problem of a row in EasyR1's schema, or to the text of --prompt-key; or a template around it of jinja, such as
    # "{{ content }} Think first.", or a file of either
    instruction: str = INSTRUCTION
    num_workers: int = 0  # processes that prepare images ahead

    def __post_init__(self) -> None:
        if self.eval_data_path and not self.data_path:
            raise InvalidConfig("eval_data_path without data_path: drawn problems have their own held-out problems")
        if self.media_root and not self.data_path:
            raise InvalidConfig("media_root without data_path: drawn problems name no files")
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
class RolloutOptions(CarryingConfig):
    """Which tokens are sampled, beside ``temperature``, ``top_p`` and ``top_k`` of the algorithm, and which samples when."""

    min_p: float = 0.0  # sample from tokens with at least this share of the likeliest token's probability; 0: from all
    stop: tuple[str, ...] = ()  # texts that end a response, in the evaluation too; the response keeps the text
    # tokens drafted for a row at a time, from its own tokens and from the other samples of its prompt; responses stay the same
    speculate: int = 0
    # score whole groups while others are decoded, in the engine's process, where the reward function then runs too
    early_rewards: bool = False
    quantization: Literal["none", "fp8"] = "none"  # of vLLM's weights; needs --algorithm.correction

    def engine_options(self) -> dict[str, Any]:
        """What these options ask of the engine."""
        quantized = {} if self.quantization == "none" else {"quantization": self.quantization}
        return quantized | ({"speculate": self.speculate} if self.speculate else {})

    def check_engine(self, engine: str, options: Mapping[str, Any], correction: str) -> None:
        """Raises `InvalidConfig` for an engine, further ``options`` of it, or an algorithm, that these options do not fit."""
        own = self.engine_options()
        for name in own.keys() & options.keys():
            raise InvalidConfig(f"{name} is given twice: leave out --engine-options {name}, or --rollout.{name}")
        if self.speculate < 0:
            raise InvalidConfig(f"rollout.speculate={self.speculate}: must be 0 (no drafts) or more")
        if self.early_rewards and not self.in_order:
            raise InvalidConfig(
                f"rollout.early_rewards is for steps that decode their own samples to the end: leave out rollout.{self._first}"
            )
        if self.early_rewards:
            check_early_rewards(options)
        quantization = (own | dict(options)).get("quantization")
        if quantization is None:
            return
        if engine != "vllm":
            raise InvalidConfig(f"rollout.quantization={quantization} is of another engine: add --engine vllm")
        if correction == "none":
            raise InvalidConfig(
                f"rollout.quantization={quantization}: the engine then samples from another policy than the actor's, for "
                "which the loss must correct: add --algorithm.correction token (or sequence, geometric)"
            )


@dataclass(frozen=True)
class PolicyGradientConfig:
    """All options of a run; written to config.json in its directory."""

    preset: str = "any"  # whose defaults these are
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
    # rows of each step, or below 1 a share of them, in whole groups, kept in output_dir for the viewer; 0: none
    keep_rollouts: int | float = 64
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    data: tyro.conf.OmitArgPrefixes[DataConfig] = field(default_factory=DataConfig)
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=RunConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        check_placement(self)
        check_kept("keep_rollouts", self.keep_rollouts)
        engine_ranks(self.engine_options, self._ranks_with_engines)  # raises for a size that does not divide them
        self.sampling()  # raises for invalid sampling options
        self.rollout.check_engine(self.engine, self.engine_options, self.algorithm.correction)
        if not self.rollout.in_order:
            needs = self._needs_own_prompts(), self._needs_whole_batches()
            self.rollout.check(self.on, self.ray.rollout_processes, *needs)
        if self.run.keep_best == "loss":
            raise InvalidConfig("keep_best=loss: held-out responses have no loss; give --keep-best accuracy")
        if self.run.epochs is not None and not self.data.data_path:
            raise InvalidConfig("epochs without data_path: drawn problems do not repeat; give --steps")
        parts, batch = self.rollout.parts, self.data.batch_size
        if parts > batch:
            raise InvalidConfig(f"rollout.parts={parts} is more than the {batch} prompts of batch_size")
        longest = self.data.max_response_length
        buffer = self.algorithm.overlong_tokens(longest)
        if buffer > longest:
            raise InvalidConfig(f"algorithm.overlong_buffer={buffer} is more than max_response_length={longest}")

    def _needs_own_prompts(self) -> list[str]:
        """Why a step can only learn from samples of its own prompts; empty if it can learn from others."""
        algorithm = self.algorithm
        reasons = ["dynamic sampling draws further prompts in a step"] if algorithm.dynamic_sampling else []
        if algorithm.needs_greedy:
            reasons.append(f"algorithm.advantage={algorithm.advantage} needs greedy responses to the step's prompts")
        return reasons

    def _needs_whole_batches(self) -> list[str]:
        """Why an update needs the whole batch; empty if its groups can come in parts."""
        algorithm, reasons = self.algorithm, []
        if self.critic is not None:
            reasons.append("a critic learns from whole batches")
        if algorithm.updates(self.data.batch_size) > 1:
            reasons.append(
                f"algorithm.minibatch={algorithm.minibatch}, epochs={algorithm.epochs} make several updates a step "
                "(--algorithm.minibatch None makes one)"
            )
        return reasons + algorithm.needs_whole_batches

    def engine_slots(self) -> int:
        """Samples that an engine of vLLM decodes at a time by default: all of its share of a step, with those that go on."""
        ranks = self._ranks_with_engines
        groups = math.ceil(self.data.batch_size * self.rollout.over_ask)
        return slots_for(groups * self.algorithm.n, ranks // engine_ranks(self.engine_options, ranks))

    @property
    def _ranks_with_engines(self) -> int:
        apart = self.ray.rollout_processes if self.on == "ray" else 0
        return apart or self.layout.world_size

    @property
    def updates(self) -> dict[str, int]:
        """Optimizer steps in each step of the run, by the name of the optimizer's field."""
        return {"optimizer": self.algorithm.updates(self.data.batch_size)}

    @property
    def longest_response(self) -> int:
        """The largest number of tokens behind a prompt."""
        return self.data.max_response_length

    @property
    def critic(self) -> OptimizerConfig | None:
        """The optimizer of the critic; ``None`` without one."""
        return None

    def check_models(self, model_path: str) -> None:
        """Raises `UnknownModel` or `InvalidConfig` for a model that this run cannot use; ``model_path`` is the policy's."""
        from workers.training.loading import checkpoint_family

        family = checkpoint_family(model_path)
        if not self.rollout.replay_routing and family.experts is None:
            raise InvalidConfig(
                f"--rollout.no-replay-routing would do nothing: {model_path} has no experts; leave it out"
            )

    def reference(self, actor: "ActorConfig") -> "PolicyConfig | None":
        """The policy that a KL term or the advantage compares with: the actor before its training; ``None`` without either."""
        return actor.frozen() if self.algorithm.needs_reference else None

    def sampling(self) -> SamplingParams:
        """How responses are sampled for training."""
        sampling = self.algorithm.sampling(self.data.max_response_length, self.run.seed)
        return replace(sampling, min_p=self.rollout.min_p, stop=self.rollout.stop)

    def eval_sampling(self) -> SamplingParams:
        """How held-out problems are answered: greedily, or ``data.eval_samples`` times, the same streams in each evaluation."""
        if self.data.eval_samples == 1:
            return SamplingParams(temperature=0, max_tokens=self.data.max_response_length, stop=self.rollout.stop)
        return replace(self.sampling(), n=self.data.eval_samples)


Config = TypeVar("Config", bound=PolicyGradientConfig)

# What the presets of a size share; `recipes.configs.shared.device_preset` fits them to the devices that there are. 7B: the
# settings of the step that was measured on four H200 (benchmarks/RESULTS.md, "A whole GRPO step at scale"). 3B: the same batch
# on one; docs/command_line.md says why.
PUBLISHED_BATCH: dict[str, Any] = {
    "engine": "vllm",
    "data": DataConfig(level=4, max_prompt_length=1024),
}
SIZES: dict[str, dict[str, Any]] = {
    "3b": PUBLISHED_BATCH
    | {
        "model_path": "Qwen/Qwen2.5-VL-3B-Instruct",
        "engine_options": {"memory_share": 0.3},
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
    arguments: Sequence[str],
    presets: Mapping[str, Config],
    description: str | None,
    prog: str,
    machine: Machine | None = None,
) -> Config:
    """The configuration of a command line, over a preset; see `parse_recipe`.

    The KL term of a preset is dropped where the command line names an algorithm, whose paper then sets it. A preset of a size
    fits its settings to the devices.

    Args:
        machine: the devices; by default those of this machine.

    Raises:
        InvalidConfig: an unknown, ill-typed or idle option, or an impossible combination, in one line.
    """

    def on_machine(default: Config, given: Sequence[str], read: Callable[[Config], Config]) -> Config:
        if default.preset not in SIZES or (found := machine or this_machine()) is None:
            return read(default)
        default = on_devices(default, given, found)
        return read(fitting(default, read(default), found))

    config = parse_recipe(arguments, presets, description, prog, _without_kl, on_machine)
    return replace(config, data=replace(config.data, instruction=read_instruction(config.data.instruction)))


def _without_kl(config: Config) -> Config:
    without: Config = replace(config, algorithm=replace(config.algorithm, kl_coef=OF_THE_PAPER, kl_in=OF_THE_PAPER))
    return without
