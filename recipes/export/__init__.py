"""A checkpoint of a run as a model that others load: ``python -m recipes.export RUN/global_step_100 OUTPUT --dtype bfloat16``.

Runs in any layout, and of adapters, save whole float32 weights; this makes them an ordinary Hugging Face directory in the dtype
that they are served in, which `from_pretrained`, vLLM and ``--model-path`` take.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from transformers import AutoModelForImageTextToText

from dataproto.errors import CheckpointError, InvalidConfig

__all__ = ["ModelExportConfig", "export_model"]


@dataclass(frozen=True)
class ModelExportConfig:
    """What is exported, and how."""

    checkpoint: Annotated[Path, tyro.conf.Positional]  # a run's global_step_N, or the actor directory in it
    output: Annotated[Path, tyro.conf.Positional]  # a directory that does not exist yet
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the weights


def export_model(config: ModelExportConfig) -> Path:
    """Writes model, tokenizer and image processor to ``config.output``, and returns it.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete.
        InvalidConfig: the output exists already.
    """
    actor = config.checkpoint / "actor" if (config.checkpoint / "actor").is_dir() else config.checkpoint
    source = actor / "huggingface"
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"{config.checkpoint} holds no checkpoint of an actor: name a global_step_N directory of a run"
        )
    if config.output.exists():
        raise InvalidConfig(f"{config.output} exists already")
    model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=getattr(torch, config.dtype))
    draft = config.output.with_name(f".{config.output.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    for file in source.iterdir():  # tokenizer, image processor and chat template
        if "safetensors" not in file.name and not (draft / file.name).exists():
            shutil.copy2(file, draft / file.name)
    draft.rename(config.output)
    return config.output
