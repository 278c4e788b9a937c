"""The options of policy-gradient training, for any algorithm, and the presets of a size of model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from dataproto.errors import InvalidConfig, check_at_least
from recipes.algorithms.options import AlgorithmConfig
from recipes.configs.shared.device_preset import Machine, fitting, on_devices, this_machine
from recipes.configs.shared.rollout_options import AgentsConfig, RolloutOptions
from recipes.configs.shared.run_config import RecipeConfig, check_kept
from recipes.data.column_keys import ColumnOptions, refuse_without_data
from recipes.data.problem_rows import INSTRUCTION
from recipes.data.row_values import read_instruction
from recipes.demo.sounds import SoundLevel, check_level
from recipes.options import parse_recipe
from rollout.engine import SamplingParams, engine_ranks, slots_for
from workers.model.model_config import ModelConfig, OptimizerConfig
from workers.ranks.layout import Layout

if TYPE_CHECKING:
    from workers.roles.actor import ActorConfig
    from workers.roles.model_worker import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig(ColumnOptions):
    """Prompts: where they come from and what fits.

    Attributes:
        data_path: training data: parquet file, folder, or data set name; default: synthetic problems
        eval_data_path: held-out problems: a set, or several, each as PATH or NAME=PATH; default: the "test" split of
            --data-path, or a single file's last rows
        level: synthetic problems: 1, about pictures; or about sounds: notes, clicks or digits
        batch_size: prompts of a step
        eval_rows: number of held-out problems of each set: the first ones of their split
        eval_samples: answers to each held-out problem: 1 greedy one, or several sampled as in training, for pass@k
        max_prompt_length: tokens of a prompt, image tokens included; longer prompts are left out
        max_response_length: tokens of a response; longer responses are cut
        instruction: text added to the problem of a row in EasyR1's schema, or to the text of --prompt-key; or a template
            of jinja around it, such as "{{ content }} Think first.", or a file of either
        num_workers: processes that prepare images ahead
        curriculum: take problems that are sometimes solved more often, by the weight p (1 - p) of their running success p,
            in place of shuffled epochs
    """

    data_path: str | None = None
    level: int | SoundLevel = 1
    batch_size: int = 512
    eval_samples: int = 1
    max_prompt_length: int = 2048
    max_response_length: int = 2048
    instruction: str = INSTRUCTION
    curriculum: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_data(self, "problems", "media_root")
        if self.curriculum and self.num_workers:
            raise InvalidConfig(
                f"num_workers={self.num_workers}: a curriculum chooses the next problems after each step"
            )
        check_at_least(1, self, "batch_size", "eval_rows", "eval_samples", "max_prompt_length", "max_response_length")
        check_at_least(0, self, "num_workers")
        check_level(self.level)

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        named = bool(self.data_path or self.eval_data_path)
        return [
            (named, "level", "only synthetic data have it: leave out --data-path"),
            (not named, "on-bad-row", "all synthetic rows can be used: add --data-path"),
            (not self.data_path, "curriculum", "synthetic problems do not come twice: add --data-path"),
            (bool(self.keys.messages_key), "instruction", "messages stay as they are: leave it out"),
        ]


@dataclass(frozen=True)
class PolicyGradientConfig(RecipeConfig):
    """All options of a run; written to config.json in its directory.

    Attributes:
        layout: how actor and reference are spread over processes
        reward: reward function: FILE.py:FUNCTION in verl's, EasyR1's or TRL's form, classifier:MODEL, or the URL of a
            server; of several the sum; default: Geo3K's
        reward_weights: weight of each of several rewards; default: 1
        keep_rollouts: rows of each step to keep in output_dir for the viewer, in whole groups; below 1 a share of them;
            0: none
    """

    reward: str | tuple[str, ...] | None = None
    reward_weights: tuple[float, ...] | None = None
    keep_rollouts: int | float = 64
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kept("keep_rollouts", self.keep_rollouts)
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise InvalidConfig(f"{len(self.reward_weights)} reward_weights for {len(self.rewards)} rewards")
        engine_ranks(self.engine_options, self.layout.engine_processes)  # raises for a size that does not divide them
        self.sampling()  # raises for invalid sampling options
        quantization = self.engine_options.get("quantization")
        if quantization is not None and self.algorithm.correction == "none":
            raise InvalidConfig(
                f"engine_options quantization={quantization}: the engine then samples from another policy than the actor's, for "
                "which the loss must correct: add --algorithm.correction token (or sequence, geometric)"
            )
        # asking the algorithm imports it
        if self.rollout.staleness is not None and (reasons := self._needs_own_prompts()):
            raise InvalidConfig(
                f"{'; '.join(reasons)}: leave out rollout.staleness, with which a step takes groups as they are whole"
            )
        if self.run.keep_best == "loss":
            raise InvalidConfig("keep_best=loss: held-out responses have no loss; give keep-best: accuracy")
        if self.run.epochs is not None and not self.data.data_path:
            raise InvalidConfig("epochs without data_path: synthetic problems do not repeat; give --steps")
        if self.data.curriculum:
            self._check_curriculum()
        longest = self.data.max_response_length
        buffer = self.algorithm.overlong_tokens(longest)
        if buffer > longest:
            raise InvalidConfig(f"algorithm.overlong_buffer={buffer} is more than max_response_length={longest}")

    def _check_curriculum(self) -> None:
        """Raises `InvalidConfig` for what a curriculum does not go with."""
        if self.rollout.staleness is not None:
            raise InvalidConfig(
                "curriculum: decoding ahead begins problems before the last step is known; leave out staleness"
            )
        if self.algorithm.dynamic_sampling:
            raise InvalidConfig("curriculum: dynamic sampling hides the groups that it drops; leave out one of the two")
        if self.run.epochs is not None:
            raise InvalidConfig("curriculum: it makes no passes over the data; give --steps in place of --epochs")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        algorithm = self.algorithm
        scores = self.critic is not None or algorithm.needs_reference or not algorithm.skip_old_log_probs
        return [
            *super().idle_options(),
            (self.model_path is None, "rollout.replay-routing", "the small model has no experts: leave it out"),
            (len(self.rewards) == 1, "reward-weights", "one reward has the whole weight: name several"),
            (not scores, "scoring-token-budget", "no pass of this run is without gradients: leave it out"),
            (bool(self.rollout.staleness), "algorithm.skip-old-log-probs", "all have the engine's log-probs anyway"),
        ]

    def _needs_own_prompts(self) -> list[str]:
        """Why a step can only learn from samples of its own prompts; empty if it can learn from others."""
        algorithm = self.algorithm
        reasons = ["dynamic sampling draws further prompts in a step"] if algorithm.dynamic_sampling else []
        if algorithm.needs_greedy:
            reasons.append(f"algorithm.advantage={algorithm.advantage} needs greedy responses to the step's prompts")
        return reasons

    def engine_slots(self) -> int:
        """Samples that an engine of vLLM decodes at a time by default: all of its share of a step, with those that go on."""
        ranks = self.layout.engine_processes
        groups = math.ceil(self.data.batch_size * self.rollout.at_a_time)
        return slots_for(groups * self.algorithm.n, ranks // engine_ranks(self.engine_options, ranks))

    @property
    def rewards(self) -> tuple[str, ...]:
        """The names of the reward functions."""
        return (self.reward,) if isinstance(self.reward, str) else self.reward or ("geo3k",)

    @property
    def updates(self) -> dict[str, int]:
        """Optimizer steps in each step of the run, by the name of the optimizer's field."""
        return {"optimizer": self.algorithm.updates(self.data.batch_size)}

    @property
    def longest_response(self) -> int:
        """The largest number of tokens after a prompt."""
        return self.data.max_response_length

    @property
    def played_agent(self) -> tuple[str, AgentsConfig] | None:
        """The name of the agent whose episodes are the rollouts, and their options; ``None`` for single responses."""
        return None

    @property
    def critic(self) -> OptimizerConfig | None:
        """The optimizer of the critic; ``None`` without one."""
        return None

    def check_models(self, model_path: str) -> None:
        """Raises `UnknownModel` or `InvalidConfig` for a model that this run cannot use; ``model_path`` is the policy's."""
        from workers.training.loading import checkpoint_family

        family = checkpoint_family(model_path)
        if not self.rollout.replay_routing and family.experts is None:
            raise InvalidConfig(f"--rollout.no-replay-routing would do nothing: {model_path} has no experts")

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
PUBLISHED_BATCH: dict[str, Any] = {"engine": "vllm", "data": DataConfig(max_prompt_length=1024)}
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

    A preset of a size fits its settings to the devices.

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

    config = parse_recipe(arguments, presets, description, prog, on_machine)
    algorithm, kl_coef = config.algorithm, presets[config.preset].algorithm.kl_coef
    own = next((f"{n} {each}" for n in ("loss", "advantage") if ":" in (each := getattr(algorithm, n))), None)
    if own and kl_coef and not algorithm.kl_coef and not any("kl" in each and "coef" in each for each in arguments):
        print(f"no KL term: --algorithm.{own} replaces that of {config.preset}; --algorithm.kl-coef {kl_coef} keeps it")
    return replace(config, data=replace(config.data, instruction=read_instruction(config.data.instruction)))
