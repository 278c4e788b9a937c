"""The command ``dataproto plan``: from a recipe's options and data, or a step on a cluster, to a forecast as text."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, isqrt
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers.utils.logging import disable_progress_bar

from recipes.classify import classification_task
from recipes.configs.plan_config import ClusterConfig, PlanConfig, parse
from recipes.configs.shared.policy_gradient_config import SIZES
from recipes.configs.shared.published_models import published_config
from recipes.demo.tiny_model import make_tiny_model
from recipes.dpo import dpo_task
from recipes.options import exit_status, settings_line
from recipes.plan.forecast import Forecast, as_options, fastest_layout, forecast, way_out
from recipes.plan.memory import RoleMemory
from recipes.plan.rows import BatchSizes, PromptSizes, measure_answers, measure_prompts, response_lengths
from recipes.plan.setting import GIB, Device, Nodes, Setting, device_named
from recipes.run import policy_gradient
from recipes.run.run_directory import over_epochs
from recipes.run.supervised import SupervisedTask
from recipes.sft import conversation_task
from recipes.watch.pages import render
from rollout.pretrained import family_and_config
from workers.model.model_config import ModelConfig
from workers.training.loading import checkpoint_family

TASKS: dict[str, Callable[[Any, str], SupervisedTask]] = {
    "sft": conversation_task,
    "classify": classification_task,
    "dpo": dpo_task,
}
COLUMNS = [name for name in RoleMemory.__dataclass_fields__ if name not in ("role", "host")]


def main(arguments: Sequence[str] | None = None, config: PlanConfig | ClusterConfig | None = None) -> int:
    """Prints the plan and returns the exit status: 1 if the run does not fit, 2 after a user's mistake."""
    with exit_status(arguments, resumes=False) as status:
        asked = config or parse(status.arguments)
        disable_progress_bar()  # of the small model's files
        if isinstance(asked, ClusterConfig):
            found = simulated(asked)
        else:
            print(settings_line(asked.config))
            found = plan(asked)
        print(forecast_text(found))
        if not found.fits:
            print(f"what fits: {way_out(found.setting)}")
        if isinstance(asked, ClusterConfig):
            print(f"options: {as_options(found.setting)}")
        status.code = int(not found.fits)
    return status.code


def plan(asked: PlanConfig) -> Forecast:
    """The forecast of a recipe's options."""
    with tempfile.TemporaryDirectory() as folder:
        path = model_to_plan(asked, Path(folder) / "model")
        checkpoint_family(path)  # raises for an unknown model
        return forecast(expected_setting(asked, path))


def expected_setting(asked: PlanConfig, path: str) -> Setting:
    """What the forecast depends on, for the model in ``path``: from data and options by the run's own functions."""
    config, device = asked.config, device_named(asked.options.device)
    if asked.recipe in TASKS:
        task = TASKS[asked.recipe](config, path)
        config = replace(config, run=over_epochs(config.run, task.loader))
        loader, scored = task.loader, 0.0
        if asked.recipe == "dpo":
            scored = min(len(loader.rows) / loader.batch_size / config.run.steps, 1.0)
        own = {"engine": None, "longest": task.longest, "reference": scored}
        return _setting(config, measure_answers(loader), device, **own)
    data = config.data
    builder = policy_gradient.prompt_builder(data, path)
    policy_gradient.check_trains(data)
    rows, _ = policy_gradient.open_problems(config, builder)
    loader = policy_gradient.prompt_loader(config, builder, rows, shuffle=data.data_path is not None)
    config = replace(config, run=over_epochs(config.run, loader))
    mean = asked.options.mean_response or max(ceil(data.max_response_length / 2), 1)
    responses = response_lengths(data.batch_size * config.algorithm.n, mean, data.max_response_length)
    prompts = measure_prompts(loader).repeated(data.batch_size)
    return policy_setting(config, BatchSizes(builder.config, prompts, responses, config.algorithm.n), device)


def policy_setting(config: Any, batch: BatchSizes, device: Device) -> Setting:
    """The setting of a run with such rows; ``config`` is a `recipes.run.PolicyGradientConfig`."""
    algorithm = config.algorithm
    in_update = 1 / algorithm.updates(config.data.batch_size) if algorithm.scores_first_update else 0.0
    critic = {"critic_epochs": algorithm.critic_epochs, "critic_optimizer": config.critic.kind} if config.critic else {}
    return _setting(
        *(config, batch, device),
        minibatch=algorithm.minibatch,
        epochs=algorithm.epochs,
        old_log_probs=0 if algorithm.skip_old_log_probs else 1 - in_update,
        reference=float(algorithm.needs_reference),
        teacher=getattr(config, "teacher", None) is not None,
        longest=config.data.max_prompt_length + config.longest_response,
        engine=config.engine,
        engine_options=dict(config.engine_options),
        **critic,
    )


def _setting(config: Any, batch: BatchSizes, device: Device, **own: Any) -> Setting:
    kind, steps = config.optimizer.kind, config.run.steps
    return Setting(batch.config, batch, device, config.compute, config.layout, optimizer=kind, steps=steps, **own)


def model_to_plan(asked: PlanConfig, path: Path) -> str:
    """The model that the options name. A preset's own that is not on this machine is not fetched: the published sizes take its
    place, with the tokenizer of the small model.
    """
    config = asked.config
    if config.model_path is None:
        return str(make_tiny_model(path, config.run.seed))
    named = SIZES.get(config.preset, {}).get("model_path") == config.model_path
    if not named or Path(config.model_path).exists() or try_to_load_from_cache(config.model_path, "config.json"):
        return str(config.model_path)
    print(f"{config.model_path} is not on this machine: its published sizes, and the small model's tokenizer")
    return str(make_published_model(path, config.preset))


def make_published_model(path: Path, preset: str) -> Path:
    """A folder with the config of a published model, and tokenizer and image processor of the small one."""
    config, (_, small) = published_config(preset), family_and_config(str(make_tiny_model(path)))
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, getattr(small, name))
    config.save_pretrained(path)
    file = path / "preprocessor_config.json"
    limits = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16_384}}  # as published
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | limits), encoding="utf-8")
    return path


def simulated(asked: ClusterConfig) -> Forecast:
    """The step of GRPO that ``plan --devices`` asks for: prompts of one length with one image, responses of log-normal lengths.

    Old log-probs of the first mini-batch are those of the update, so they are computed for the others only.

    Raises:
        InvalidConfig: the model or the device is unknown, or nothing fits.
    """
    if asked.model_path is None:
        config = published_config(asked.preset)
    else:
        family, config = family_and_config(str(asked.model_path))
        family.check_supported(config)
    side = 2 * max(isqrt(asked.image_patches) // 2, 1)
    grids = ((1, side, side),) if asked.image_patches else ()
    prompts = PromptSizes((asked.prompt_length,), (grids,)).repeated(asked.batch_size)
    responses = response_lengths(asked.batch_size * asked.n, asked.mean_response, asked.max_response_length)
    budget, checkpointing = asked.token_budget, asked.activation_checkpointing
    setting = Setting(
        config,
        BatchSizes(config, prompts, responses, asked.n),
        device_named(asked.device),
        ModelConfig(token_budget=budget, activation_checkpointing=checkpointing, compile=True),
        engine="vllm",
        longest=asked.prompt_length + asked.max_response_length,
        minibatch=asked.minibatch,
        old_log_probs=1 - asked.minibatch / asked.batch_size,
        reference=1.0,
        variation=0,
        nodes=Nodes(asked.node, network=1e9 * asked.network_gbit / 8),
    )
    layouts = [] if asked.layout.world_size == 1 < asked.devices else [asked.layout]
    return fastest_layout(setting, asked.devices, layouts, asked.tensor_parallel)


def forecast_text(found: Forecast) -> str:
    """Memory by phase and role, operations, seconds and traffic by phase, and the run, as lines of text."""
    degrees = ", ".join(f"{name} {degree}" for name, degree in vars(found.setting.layout).items() if degree > 1)
    columns = [name for name in COLUMNS if any(getattr(role, name) for phase in found.phases for role in phase.roles)]
    return render("plan.txt", found=found, layout=degrees or "one device", columns=columns, gib=GIB).rstrip()
