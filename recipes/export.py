"""A checkpoint of a run as a model that others load: ``python -m recipes.export RUN/global_step_100 OUTPUT --dtype bfloat16``.

Runs in any layout, and of adapters, save whole float32 weights; this makes them an ordinary Hugging Face directory in the dtype
that they are served in, which `from_pretrained`, vLLM and ``--model-path`` take.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from transformers import AutoModelForImageTextToText

from dataproto.errors import CheckpointError, InvalidConfig
from recipes.run.command_line import parse_config, run_from_command_line


@dataclass(frozen=True)
class ExportConfig:
    """What is exported and how."""

    checkpoint: Annotated[Path, tyro.conf.Positional]  # a run's global_step_N, or the actor directory in it
    output: Annotated[Path, tyro.conf.Positional]  # a directory that does not exist yet
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, exports, and returns the exit status; a user's mistake is one line on stderr."""
    default = ExportConfig(tyro.MISSING, tyro.MISSING)

    def parse(arguments: Sequence[str]) -> ExportConfig:
        return parse_config(arguments, default, __doc__, "recipes.export")

    return run_from_command_line(export, parse, sys.argv[1:] if arguments is None else arguments, made="model")


def export(config: ExportConfig) -> Path:
    """Writes model, tokenizer and image processor to ``config.output``, and returns it.

    Raises:
        CheckpointError: there is no whole checkpoint.
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


if __name__ == "__main__":
    sys.exit(main())
