"""A checkpoint of a run as a model that others load: ``dataproto export RUN/global_step_100 OUTPUT --dtype bfloat16``.

With ``--push-to-hub ORG/NAME`` it is uploaded to the Hugging Face hub as well.

Runs in any layout, and of adapters, save whole weights; this makes them an ordinary Hugging Face directory in the dtype
that they are served in, which `from_pretrained`, vLLM and ``--model-path`` take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from recipes.options import parse_config


@dataclass(frozen=True)
class ModelExportConfig:
    """What is exported, and how."""

    checkpoint: Annotated[
        Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")
    ]  # a run's global_step_N, or the actor directory in it
    output: Annotated[
        Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")
    ]  # a directory that does not exist yet
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the weights
    push_to_hub: str | None = None  # ORG/NAME of a model on the hub, private if it is new; log in with `hf auth login`


DEFAULT = ModelExportConfig(tyro.MISSING, tyro.MISSING)


def parse(arguments: Sequence[str]) -> ModelExportConfig:
    """The configuration of a command line; ``--config FILE`` reads options from a file.

    Raises:
        InvalidConfig: an unknown or ill-typed option, in one line.
    """
    return parse_config(arguments, DEFAULT, __doc__, "dataproto export")
