"""A checkpoint of a run as a model that others load: ``dataproto export RUN/global_step_100 OUTPUT --dtype bfloat16``.

Runs in any layout, and of adapters, save whole weights; this makes them an ordinary Hugging Face directory in the dtype that they
are served in, which `from_pretrained`, vLLM and ``--model-path`` take.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoProcessor
from transformers.utils.logging import disable_progress_bar

from dataproto.errors import CheckpointError, InvalidConfig, undoing, writing
from dataproto.vlm import family_of
from recipes.configs.export_config import ModelExportConfig, parse
from recipes.directory_lock import locked
from recipes.options import exit_status, write_options
from workers.roles.critic import HEAD_FILE
from workers.weights.sharded_export import copy_weights

WAY_OUT = "; make room there, or choose another output"


def export_model(config: ModelExportConfig) -> Path:
    """Writes model, tokenizer and image processor to ``config.output``, and returns the directory.

    The weights are copied file by file, of at most 2 GiB each, so the model need not fit into memory.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete.
        InvalidConfig: the output exists already, or another process writes it.
        FileNotWritten: the disk is full, say; nothing is left then.
    """
    actor = config.checkpoint / "actor" if (config.checkpoint / "actor").is_dir() else config.checkpoint
    source = actor / "huggingface"
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{config.checkpoint} holds no checkpoint of an actor: name a global_step_N of a run")
    with locked(config.output, "choose another output", inside=False):
        if config.output.exists():
            raise InvalidConfig(f"{config.output} exists already")
        model_config, dtype = AutoConfig.from_pretrained(source), getattr(torch, config.dtype)
        draft = config.output.with_name(f".{config.output.name}.partial")  # so that the model is whole or not there
        shutil.rmtree(draft, ignore_errors=True)
        with undoing(lambda: shutil.rmtree(draft, ignore_errors=True)), writing(config.output, way_out=WAY_OUT):
            copy_weights(str(source), family_of(model_config), draft, dtype, headless=(source / HEAD_FILE).exists())
            model_config.update({"dtype": dtype})
            model_config.save_pretrained(draft)
            # tokenizer, processors, chat template, generation settings, the head of a reward model
            for file in source.iterdir():
                if not file.match("model*.safetensors*") and not (draft / file.name).exists():
                    shutil.copy2(file, draft / file.name)
            write_options(draft, config)
            draft.rename(config.output)
    return config.output


def how_to_load(model: Path) -> str:
    """How transformers loads the processor of a model here, in one line."""
    try:
        AutoProcessor.from_pretrained(model)
    except Exception as error:  # of the class that the model names, which may need torchvision for its videos
        reason = " ".join(str(error).split()).partition(". ")[0]
        return f"processor: AutoTokenizer and AutoImageProcessor load its parts; AutoProcessor does not here: {reason}"
    return "processor: AutoProcessor loads it"


def main(arguments: Sequence[str] | None = None, config: ModelExportConfig | None = None) -> int:
    """Parses the command line, exports, and returns the exit status; a user's mistake is one line on stderr."""
    with exit_status(arguments, resumes=False) as status:
        config = config or parse(status.arguments)
        disable_progress_bar()
        print(f"model: {export_model(config)}")
        print(how_to_load(config.output))
    return status.code
