"""The setting of a forecast, and how it is made from a recipe's options.

Options are read by attribute, without the recipes' own types: recipes may import this package, and it may not import them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from recipes.forecast.batch_sizes import (
    VARIATION,
    BatchSizes,
    EpisodeSizes,
    MicroBatchSize,
    PromptSizes,
    patch_bytes,
    response_lengths,
)
from recipes.forecast.devices import Device
from recipes.forecast.model_size import ModelSize, model_size
from recipes.forecast.role_memory import exported_bytes, feature_bytes, moment_bytes, route_bytes, tower_bytes
from rollout.engine import returns_experts
from workers.cluster.ray_config import RayConfig
from workers.model.kept_features import MAX_BYTES
from workers.model.model_config import ModelConfig, OptimizerKind
from workers.ranks.layout import Layout
from workers.training.checkpoint_files import FILE_BYTES as STATE_FILE
from workers.weights.sharded_export import FILE_BYTES as EXPORT_FILE

PATCH = 14  # pixels, of towers whose config does not say


@dataclass(frozen=True)
class Setting:
    """Everything that a forecast depends on."""

    config: Any  # the checkpoint's
    batch: BatchSizes  # all rows of a step
    device: Device
    compute: ModelConfig = field(default_factory=ModelConfig)
    layout: Layout = field(default_factory=Layout)
    engine: str | None = "hf"  # None: nothing is generated in a step
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    engine_apart: bool = False  # on devices of its own
    longest: int = 4096  # tokens of a prompt and its response together
    minibatch: int | None = None  # prompts of an optimizer step
    epochs: int = 1
    old_log_probs: float = 0.0  # share of the rows whose old log-probs are computed in a pass of their own
    reference: bool = False
    teacher: bool = False  # the reference is another model than the policy
    critic_epochs: int = 0  # 0: no critic
    replays_routing: bool = False  # the engine records the experts of each token for the actor
    kept_images: int = 0  # bytes of processed images that the driver's process keeps at the end of the run
    variation: float = VARIATION  # memory is that of a step with a share of so many tokens more or fewer
    steps: int = 1
    eval_every: int = 0
    eval_rows: int = 0
    answered: int = 0  # held-out prompts that are answered at a time
    eval_samples: int = 1  # answers to each of them
    save_every: int = 0
    save_behind: bool = False
    keep_checkpoints: int = 2
    optimizer: OptimizerKind = "adamw"
    critic_optimizer: OptimizerKind = "adamw"

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return len(self.batch.prompts.tokens)

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        return self.epochs * -(-self.prompts // (self.minibatch or self.prompts))

    @cached_property
    def share(self) -> BatchSizes:
        """The rows of one data-parallel rank."""
        return self.batch.part(-(-self.prompts // self.layout.dp))

    @cached_property
    def micro_batches(self) -> list[MicroBatchSize]:
        """Those of an optimizer step on one rank."""
        prompts = -(-(self.minibatch or self.prompts) // self.layout.dp)
        return self.batch.part(prompts).micro_batches(self.compute.token_budget * self.layout.sp)

    @cached_property
    def fullest_micro_batches(self) -> list[MicroBatchSize]:
        """Those that take the most memory, see `BatchSizes.fullest_micro_batches`."""
        prompts = -(-(self.minibatch or self.prompts) // self.layout.dp)
        budget = self.compute.token_budget * self.layout.sp
        return self.batch.part(prompts).fullest_micro_batches(budget, self.variation)

    @cached_property
    def scoring_micro_batches(self) -> list[MicroBatchSize]:
        """Those of a pass without gradients on one rank."""
        return self.share.micro_batches(self.compute.budget(backward=False) * self.layout.sp)

    @cached_property
    def fullest_scoring_micro_batches(self) -> list[MicroBatchSize]:
        """Those of a pass without gradients that take the most memory."""
        budget = self.compute.budget(backward=False) * self.layout.sp
        return self.share.fullest_micro_batches(budget, self.variation)

    @cached_property
    def pictures(self) -> int:
        """Bytes, on a CPU, of the pictures of a step as they were opened, and of what an evaluation takes to read its own:
        opened, joined after they are processed, and in a layer of the tower. The allocator gets these large blocks anew and
        keeps most of them. 0 on a GPU, whose memory has none of them.
        """
        mean = float(self.batch.patches.double().mean())
        if not self.device.on_cpu or not mean:
            return 0
        side = getattr(self.config.vision_config, "patch_size", PATCH)
        opened = 4 * int(side if isinstance(side, int) else side[0]) ** 2  # four bytes a pixel
        read = tower_bytes(self.config, ModelConfig(), self.device, True).passing + patch_bytes(self.config)
        return round(mean * (self.prompts * opened + self.answered * (opened + read)))

    @property
    def state_bytes(self) -> int:
        """Bytes of the training states in a checkpoint: what is trained, in float32, and its moments."""
        found = 4 * self.size.trained + moment_bytes(self.size.trained, self.size, self.optimizer)
        if self.critic_epochs:
            found += 4 * self.critic_size.trained
            found += moment_bytes(self.critic_size.trained, self.critic_size, self.critic_optimizer)
        return found

    @property
    def export_bytes(self) -> int:
        """Bytes of the exported weights of the policy, adapters merged, in the dtype that it computes in."""
        return exported_bytes(self.reference_size.total, self.compute, self.device)

    @property
    def saving(self) -> int:
        """Bytes of host memory on a rank while a checkpoint is written: files that are filled or written, or with
        ``save_behind`` all that the rank writes.
        """
        ranks = self.layout.world_size
        state, export = -(-self.state_bytes // ranks), -(-self.export_bytes // ranks)
        if self.save_behind:
            return state + export
        return max(min(state, STATE_FILE), min(export, 2 * EXPORT_FILE))  # one after the other; two files of an export

    @cached_property
    def feature_bytes(self) -> int:
        """Bytes of the features of a step's media on one rank, if the policy's tower is not trained."""
        return feature_bytes(self.share, self.size, self.compute, self.layout, self.device)

    @property
    def kept_share(self) -> float:
        """The share of these features that is kept for the next pass."""
        return min(1.0, MAX_BYTES / self.feature_bytes) if self.feature_bytes else 0.0

    @cached_property
    def route_bytes(self) -> int:
        """Bytes of a token's experts, if the engine records them."""
        return route_bytes(self.config, self.size) if self.replays_routing else 0

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the actor's model with its adapters off."""
        return self.compute.lora_rank > 0 and not self.teacher

    @cached_property
    def size(self) -> ModelSize:
        """The policy's."""
        return model_size(self.config, self.compute)

    @cached_property
    def critic_size(self) -> ModelSize:
        return model_size(self.config, self.compute, makes_logits=False)

    @cached_property
    def reference_size(self) -> ModelSize:
        return model_size(self.config, _frozen(self.compute), trains=False)


def _frozen(compute: ModelConfig) -> ModelConfig:
    return replace(compute, lora_rank=0, lora_vision=False, load_in_4bit=False, activation_checkpointing="none")


def policy_gradient_batch(
    options: Any, config: Any, prompts: PromptSizes, mean_response: int | None = None
) -> BatchSizes:
    """The rows of a step of policy gradients.

    Args:
        options: a `recipes.run.PolicyGradientConfig`.
        config: the checkpoint's.
        prompts: some of the data's.
        mean_response: expected tokens of a response; by default half of the longest.
    """
    data, samples = options.data, options.algorithm.n
    mean = mean_response or max(math.ceil(data.max_response_length / 2), 1)
    responses = response_lengths(data.batch_size * samples, mean, data.max_response_length)
    return BatchSizes(config, prompts.repeated(data.batch_size), responses, samples)


def episode_batch(options: Any, config: Any, sizes: EpisodeSizes, mean_response: int | None = None) -> BatchSizes:
    """The rows of a step of policy gradients over episodes, all of which are like the measured one.

    Args:
        options: an `EpisodeRunConfig`.
        config: the checkpoint's.
        mean_response: expected tokens of a turn; by default those of the measured actions, or half of the longest turn.
    """
    data, turns, rows = options.data, options.episodes.turns, options.data.batch_size * options.algorithm.n
    if mean_response is None and sizes.sampled is not None:
        responses: tuple[int, ...] = (sizes.sampled,) * rows
    else:
        mean = mean_response or max(math.ceil(data.max_response_length / 2), 1)
        responses = response_lengths(rows, turns * mean, turns * data.max_response_length)
    prompts, shown = sizes.prompts.repeated(data.batch_size), sizes.shown.repeated(rows)
    return BatchSizes(config, prompts, responses, options.algorithm.n, shown)


def policy_gradient_setting(options: Any, batch: BatchSizes, device: Device) -> Setting:
    """The setting of a run of GRPO or PPO.

    Args:
        options: a `recipes.run.PolicyGradientConfig`.
        batch: from `policy_gradient_batch` or `episode_batch`.
    """
    algorithm, data = options.algorithm, options.data
    whole = options.rollout.in_order and not hasattr(
        options, "episodes"
    )  # such responses alone come with their experts
    return Setting(
        batch.config,
        batch,
        device,
        minibatch=algorithm.minibatch,
        epochs=algorithm.epochs,
        old_log_probs=float(not algorithm.skip_old_log_probs and algorithm.needs_old_log_probs(data.batch_size)),
        reference=algorithm.needs_reference,
        teacher=getattr(options, "teacher", None) is not None,
        critic_epochs=algorithm.critic_epochs if options.critic else 0,
        replays_routing=whole and options.rollout.replay_routing and returns_experts(options.engine),
        critic_optimizer=options.critic.kind if options.critic else "adamw",
        longest=data.max_prompt_length + options.longest_response,
        eval_rows=data.eval_rows,
        **_shared(options),
    )


def supervised_setting(options: Any, batch: BatchSizes, device: Device, longest: int) -> Setting:
    """The setting of a supervised run; the engine, which answers held-out questions, is not part of a step.

    Args:
        options: a `recipes.run.SupervisedConfig`.
        batch: its rows, each with the learnt tokens as response.
        longest: tokens of the longest row that fits.
    """
    shared = _shared(options) | {"engine": None}
    return Setting(batch.config, batch, device, longest=longest, **shared)


def _shared(options: Any) -> dict[str, Any]:
    """What all recipes have."""
    ray: RayConfig = options.ray
    return {
        "compute": options.compute,
        "optimizer": options.optimizer.kind,
        "layout": options.layout,
        "engine": options.engine,
        "engine_options": dict(options.engine_options),
        "engine_apart": options.on == "ray" and bool(ray.rollout_processes),
        "steps": options.run.steps,
        "eval_every": options.run.eval_every,
        "save_every": options.run.save_every,
        "save_behind": options.run.save_behind,
        "keep_checkpoints": options.run.keep_checkpoints,
    }
