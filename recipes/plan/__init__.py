"""What a run will take, before anything is loaded: ``dataproto plan``; its options are `recipes.configs.plan_config`."""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from recipes.classify import classification_task, open_labelled
from recipes.configs.plan_config import PlanConfig, PlanOptions, parse
from recipes.configs.shared.device_preset import preset_line
from recipes.configs.shared.policy_gradient_config import SIZES
from recipes.configs.simulation_config import SimulationConfig
from recipes.data.loader import PromptLoader
from recipes.demo.tiny_model import make_tiny_model
from recipes.forecast import (
    BatchSizes,
    Device,
    Setting,
    StepForecast,
    as_options,
    device_named,
    fit,
    forecast,
    forecast_lines,
    this_cpu,
    this_device,
    way_out,
)
from recipes.forecast.calibration import Clock, with_host
from recipes.options import exit_status
from recipes.run import policy_gradient, supervised
from recipes.run.drawn_environment import DrawnEnvironment, episode_rows, open_environment
from recipes.run.run_directory import over_epochs
from recipes.sft import conversation_task
from recipes.simulation import published_config, simulated, simulation_lines
from recipes.walk import WALK
from recipes.zoom import environment_of
from workers.model.model_config import ModelConfig
from workers.training.loading import checkpoint_family

__all__ = ["PlanConfig", "PlanOptions", "as_options", "fit", "main", "plan"]


def main(arguments: Sequence[str] | None = None, config: PlanConfig | SimulationConfig | None = None) -> int:
    """Prints the plan and returns the exit status: 1 if the run does not fit, 2 after a user's mistake."""
    with exit_status(arguments, resumes=False) as status:
        asked = config or parse(status.arguments)
        disable_progress_bar()  # of the small model's files
        if isinstance(asked, SimulationConfig):
            print("\n".join(simulation_lines(simulated(asked))))
            return 0
        if asked.machine is not None and asked.config.preset in SIZES and not asked.options.fit:
            print(preset_line(asked.config, asked.machine))
        found = plan(asked)
        print("\n".join(forecast_lines(found)))
        if not found.fits:
            print(f"what fits: {way_out(found.setting)}")
        if asked.options.fit:
            print(f"options: {as_options(found.setting)}")
        status.code = int(not found.fits)
    return status.code


def plan(asked: PlanConfig, clock: Clock = time.thread_time) -> StepForecast:
    """The forecast of a recipe's options; with ``--fit`` that of the chosen setting. ``clock`` times a CPU, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = model_to_plan(asked, Path(folder) / "model")
        checkpoint_family(path)  # raises for an unknown model
        setting = expected_setting(asked, path, clock)
    if asked.options.fit:
        return fit(setting, asked.options.devices or setting.layout.world_size)
    return forecast(setting)


def expected_setting(asked: PlanConfig, path: str, clock: Clock = time.thread_time) -> Setting:
    """What the forecast depends on, for the model in ``path``: from data and options by the run's own functions."""
    config, device = asked.config, partial(chosen_device, asked, clock)
    if asked.recipe in ("sft", "classify"):
        if asked.recipe == "sft":
            task = conversation_task(config, path)
        else:
            task = classification_task(config, open_labelled(config.data, config.run.seed), path)
        config = replace(config, run=over_epochs(config.run, task.loader))
        return supervised.expected_setting(config, task, device)
    data, played = config.data, None
    if (drawn := drawn_environment(asked)) is not None:
        builder, played = open_environment(config, drawn, path)
        rows, (held_out, *_) = episode_rows(config, drawn, builder)
    else:
        builder = policy_gradient.prompt_builder(data, path)
        rows, held_out = policy_gradient.open_problems(config, builder)
    loader = policy_gradient.prompt_loader(config, builder, rows, shuffle=data.data_path is not None)
    config = replace(config, run=over_epochs(config.run, loader))
    mean = asked.options.mean_response
    return policy_gradient.expected_setting(config, loader, played, device, mean, len(held_out))


def model_to_plan(asked: PlanConfig, path: Path) -> str:
    """The model that the options name. A preset's own that is not on this machine is not fetched: the published sizes take its
    place, with the tokenizer of the small model.
    """
    config = asked.config
    if config.model_path is None:
        return str(make_small_model(asked, path))
    named = SIZES.get(config.preset, {}).get("model_path") == config.model_path
    if not named or Path(config.model_path).exists() or try_to_load_from_cache(config.model_path, "config.json"):
        return str(config.model_path)
    print(
        f"{config.model_path} is not on this machine: its published sizes, and prompts by the small model's tokenizer"
    )
    return str(make_published_model(path, config.preset))


def make_published_model(path: Path, preset: str) -> Path:
    """A folder with the config of a published model, and tokenizer and image processor of the small one."""
    config, small = published_config(preset), AutoConfig.from_pretrained(make_tiny_model(path))
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, getattr(small, name))
    config.save_pretrained(path)
    file = path / "preprocessor_config.json"
    limits = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16_384}}  # as published
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | limits), encoding="utf-8")
    return path


def make_small_model(asked: PlanConfig, path: Path) -> Path:
    """The model that the recipe makes on the spot, before its warm-up."""
    drawn = drawn_environment(asked)
    if drawn is None:
        return make_tiny_model(path, asked.config.run.seed)
    return make_tiny_model(path, asked.config.run.seed, drawn.model, drawn.texts)


def drawn_environment(asked: PlanConfig) -> DrawnEnvironment | None:
    """The environment of a recipe that plays episodes; ``None`` for others."""
    if asked.recipe == "walk":
        return WALK
    return environment_of(asked.config) if asked.recipe == "zoom" else None


def chosen_device(
    asked: PlanConfig, clock: Clock, batch: BatchSizes, loader: PromptLoader, compute: ModelConfig
) -> Device:
    """The named device; without a name the machine's GPU, and without one its CPU for the small model, an H200 for others."""
    name = asked.options.device
    if name is None and (asked.config.model_path is None or torch.cuda.is_available()):
        return this_device(batch, loader, compute, clock)
    return this_cpu(batch, loader, compute, clock) if name == "cpu" else with_host(device_named(name or "h200"))
