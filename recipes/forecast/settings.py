"""Makes the setting of a forecast from a recipe's options.

Options are read by attribute, without the recipes' own types: recipes may import this package, and it may not import them.
"""

import math
from typing import Any

from recipes.forecast.batch_sizes import BatchSizes, PromptSizes, response_lengths
from recipes.forecast.devices import Device
from recipes.forecast.episode_sizes import EpisodeSizes
from recipes.forecast.step_forecast import Setting
from workers.cluster.ray_config import RayConfig


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
        batch: from `policy_gradient_batch`.
    """
    algorithm, data = options.algorithm, options.data
    return Setting(
        batch.config,
        batch,
        device,
        minibatch=algorithm.minibatch,
        epochs=algorithm.epochs,
        old_log_probs=0.0 if algorithm.skip_old_log_probs else algorithm.old_log_prob_share(data.batch_size),
        reference=algorithm.needs_reference,
        teacher=getattr(options, "teacher", None) is not None,
        critic_epochs=algorithm.critic_epochs if options.critic else 0,
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
        "keep_checkpoints": options.run.keep_checkpoints,
    }
