"""What a run will take, before anything is loaded: ``dataproto plan``; its options are `recipes.configs.plan_config`."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from recipes.classify import open_labelled
from recipes.configs.plan_config import PlanConfig, PlanOptions, parse
from recipes.configs.simulation_config import SimulationConfig
from recipes.data.conversation_rows import conversation_rows, conversation_stream
from recipes.data.drawn_rows import DrawnTalks, ProblemRows
from recipes.data.loader import PromptLoader
from recipes.data.problem_rows import load_rows
from recipes.forecast import (
    BatchSizes,
    Device,
    StepForecast,
    calibrate_cpu,
    device_named,
    episode_batch,
    forecast,
    forecast_lines,
    measure_conversations,
    measure_episode,
    measure_prompts,
    policy_gradient_batch,
    policy_gradient_setting,
    preparation_seconds,
    supervised_setting,
    this_device,
)
from recipes.forecast.calibration import Clock
from recipes.options import exit_status
from recipes.plan.fitting import as_options, fit
from recipes.run.drawn_environment import DrawnEnvironment, episode_rows, open_environment
from recipes.run.policy_gradient import prompt_builder
from recipes.simulation import simulated, simulation_lines
from recipes.tiny import make_tiny_model
from recipes.walk import WALK
from recipes.zoom import environment_of
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers.training.loading import checkpoint_family

__all__ = ["PlanConfig", "PlanOptions", "as_options", "fit", "main", "plan"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan and returns the exit status: 1 if the run does not fit, 2 after a user's mistake."""
    with exit_status(arguments) as status:
        asked = parse(status.arguments)
        disable_progress_bar()  # of the small model's files
        if isinstance(asked, SimulationConfig):
            print("\n".join(simulation_lines(simulated(asked))))
            return 0
        found = plan(asked)
        print("\n".join(forecast_lines(found)))
        if asked.options.fit:
            print(f"options: {as_options(found.setting)}")
        status.code = int(not found.fits)
    return status.code


def plan(asked: PlanConfig, clock: Clock = time.perf_counter) -> StepForecast:
    """The forecast of a recipe's options; with ``--fit`` that of the chosen setting. ``clock`` times a CPU, in seconds."""
    config, options = asked.config, asked.options
    with tempfile.TemporaryDirectory() as folder:
        path = config.model_path or str(make_small_model(asked, Path(folder) / "model"))
        checkpoint_family(path)  # raises for an unknown model
        batch, rows, builder = read_batch(asked, path)
        device = chosen_device(options.device, config.model_path, batch, clock)
        seconds = 0.0
        if device.on_cpu and not config.data.num_workers:
            seconds = preparation_seconds(rows, builder, config.data.batch_size, config.run.seed, clock)
    is_supervised = asked.recipe in ("sft", "classify")
    if is_supervised:
        setting = supervised_setting(config, batch, device, config.data.max_length)
    else:
        setting = policy_gradient_setting(config, batch, device)
    setting = replace(setting, data_seconds=seconds)
    if options.fit:
        return fit(setting, options.devices or setting.layout.world_size)
    return forecast(setting)


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


def read_batch(asked: PlanConfig, path: str) -> tuple[BatchSizes, Any, PromptBuilder]:
    """The sizes of a step's rows, from the first rows of the data of the model in ``path``; the rows, and what prepares them."""
    config, data, seed = asked.config, asked.config.data, asked.config.run.seed
    if asked.recipe in ("sft", "classify"):
        if asked.recipe == "classify":
            rows: Any = open_labelled(data, seed).train
        elif data.streaming:
            rows = conversation_stream(data.data_path[0], buffer=data.shuffle_buffer, keys=data.keys)
        else:
            rows = conversation_rows(data.data_path[0], keys=data.keys) if data.data_path else DrawnTalks(seed)
        limits = (data.max_length, data.min_pixels, data.max_pixels)
        conversations = SupervisedBuilder.from_pretrained(path, *limits, template_arguments=data.template_arguments)
        if asked.recipe == "sft":
            conversations = conversations.learning(data.turns)
        return measure_conversations(rows, conversations, data.batch_size, seed), rows, conversations
    if (drawn := drawn_environment(asked)) is not None:
        builder, played = open_environment(config, drawn, path)
        rows, _ = episode_rows(config, drawn, builder)
        prompts = PromptLoader(rows, builder, 1, seed, shuffle=data.data_path is not None)
        sizes = measure_episode(next(prompts), builder, played.make, played.limits, played.actions)
        return episode_batch(config, builder.config, sizes, asked.options.mean_response), rows, builder
    if data.data_path:
        rows = load_rows(data.data_path, "train", instruction=data.instruction, keys=data.keys)
    else:
        rows = ProblemRows(data.level, seed, "train", data.instruction)
    builder = prompt_builder(data, path)
    measured = measure_prompts(rows, builder, seed)
    batch = policy_gradient_batch(config, AutoConfig.from_pretrained(path), measured, asked.options.mean_response)
    return batch, rows, builder


def chosen_device(
    name: str | None, model_path: str | None, batch: BatchSizes, clock: Clock = time.perf_counter
) -> Device:
    """The named device; without a name the machine's GPU, and without one its CPU for the small model, an H200 for others."""
    if name is None and (model_path is None or torch.cuda.is_available()):
        return this_device(batch, clock)
    name = name or "h200"
    return calibrate_cpu(batch, clock) if name == "cpu" else device_named(name)
