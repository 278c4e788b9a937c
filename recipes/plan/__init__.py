"""What a run will take, before anything is loaded: ``python -m recipes.plan grpo|ppo|sft [options of the recipe]``.

Reads the checkpoint's config, tokenizer and image processor, and the headers of the data's images, and prints the memory of each
role in each phase, the operations and the time of a step, and the time and disk of the run. Ends with status 1 if it does not
fit. Options of its own, beside those of the recipe:

    --device NAME           h200, h100, a100-80g, or cpu, which is measured; default: the machine's GPU, or h200
    --mean-response TOKENS  expected length of a response; default: half of --max-response-length
    --fit                   choose layout, token budget, checkpointing and the engine's share of memory
    --devices N             how many devices --fit may use; default: those of the layout
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from dataproto.errors import InvalidConfig
from recipes import grpo, ppo, sft
from recipes.data.conversation_rows import conversation_rows, conversation_stream
from recipes.data.drawn_rows import DrawnTalks, ProblemRows
from recipes.data.problem_rows import load_rows
from recipes.forecast import (
    DEVICES,
    BatchSizes,
    Device,
    Setting,
    StepForecast,
    calibrate_cpu,
    device_named,
    forecast,
    forecast_lines,
    measure_conversations,
    measure_prompts,
    policy_gradient_batch,
    policy_gradient_setting,
    supervised_setting,
    this_device,
)
from recipes.plan.fitting import as_options, fit
from recipes.run.command_line import exit_status
from recipes.tiny import make_tiny_model
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers.training.loading import checkpoint_family

__all__ = ["PlanOptions", "as_options", "fit", "main", "plan"]

RECIPES = ("grpo", "ppo", "sft")


class PlanOptions(argparse.Namespace):
    """The options of this command alone."""

    recipe: str
    device: str | None
    mean_response: int | None
    fit: bool
    devices: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan and returns the exit status: 1 if the run does not fit, 2 after a user's mistake."""
    with exit_status() as status:
        options, others = parse(sys.argv[1:] if arguments is None else arguments)
        found = plan(options, others)
        print("\n".join(forecast_lines(found)))
        if options.fit:
            print(f"options: {as_options(found.setting)}")
        status.code = int(not found.fits)
    return status.code


def parse(arguments: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """The options of this command, and those of the recipe.

    Raises:
        InvalidConfig: an option of this command is missing or ill-typed.
    """
    parser = argparse.ArgumentParser(
        "recipes.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("recipe", choices=RECIPES, help="whose options follow")
    parser.add_argument("--device", help=f"{', '.join(DEVICES)} or cpu")
    parser.add_argument("--mean-response", type=int, help="expected tokens of a response")
    parser.add_argument("--fit", action="store_true", help="choose what fits and is fastest")
    parser.add_argument("--devices", type=int, help="how many --fit may use")
    if not arguments or arguments[0] not in (*RECIPES, "-h", "--help"):
        raise InvalidConfig(f"plan which recipe? give one of {', '.join(RECIPES)} first, then its options")
    try:
        options, others = parser.parse_known_args(list(arguments), PlanOptions())
    except argparse.ArgumentError as error:
        raise InvalidConfig(str(error)) from None
    for name in ("mean_response", "devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidConfig(f"{name}={value}: must be at least 1")
    return options, others


def plan(options: PlanOptions, others: Sequence[str]) -> StepForecast:
    """The forecast for a command line; with ``--fit`` that of the chosen setting."""
    recipe: Any = {"grpo": grpo, "ppo": ppo, "sft": sft}[options.recipe]
    config = recipe.parse(others)
    with tempfile.TemporaryDirectory() as folder:
        path = config.model_path or str(make_tiny_model(Path(folder) / "model", config.run.seed))
        checkpoint_family(path)  # raises for an unknown model
        batch = read_batch(options, config, path)
    device = chosen_device(options.device, config.model_path, batch)
    setting: Setting = (supervised_setting if options.recipe == "sft" else policy_gradient_setting)(
        config, batch, device
    )
    if options.fit:
        return fit(setting, options.devices or setting.layout.world_size)
    return forecast(setting)


def read_batch(options: PlanOptions, config: Any, path: str) -> BatchSizes:
    """The sizes of a step's rows, from the first rows of the data."""
    data, seed, checkpoint = config.data, config.run.seed, AutoConfig.from_pretrained(path)
    if options.recipe == "sft":
        if data.streaming:
            rows: Any = conversation_stream(data.data_path[0], buffer=data.shuffle_buffer)
        else:
            rows = conversation_rows(data.data_path[0]) if data.data_path else DrawnTalks(seed)
        limits = (data.max_length, data.min_pixels, data.max_pixels)
        conversations = SupervisedBuilder.from_pretrained(path, *limits).learning(data.turns)
        return measure_conversations(rows, conversations, data.batch_size, seed)
    rows = load_rows(data.data_path, "train", instruction=data.instruction) if data.data_path else None
    if rows is None:
        rows = ProblemRows(data.level, seed, "train", data.instruction)
    builder = PromptBuilder.from_pretrained(path, data.max_prompt_length, data.min_pixels, data.max_pixels)
    return policy_gradient_batch(config, checkpoint, measure_prompts(rows, builder, seed), options.mean_response)


def chosen_device(name: str | None, model_path: str | None, batch: BatchSizes) -> Device:
    """The named device; without a name the machine's GPU, and without one its CPU for the small model, an H200 for others."""
    if name is None and (model_path is None or torch.cuda.is_available()):
        return this_device(batch)
    name = name or "h200"
    return calibrate_cpu(batch) if name == "cpu" else device_named(name)
