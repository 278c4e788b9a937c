"""A checkpoint of a run as a model that others load: ``dataproto export RUN/global_step_100 OUTPUT --dtype bfloat16``.

Runs in any layout, and of adapters, save whole weights; this makes them an ordinary Hugging Face directory in the dtype that
they are served in, which `from_pretrained`, vLLM and ``--model-path`` take, and ``hf upload ORG/NAME OUTPUT`` uploads.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from recipes.options import REQUIRED, parse_config


@dataclass(frozen=True)
class ModelExportConfig:
    """What is exported, and how.

    Attributes:
        checkpoint: a run's global_step_N, or the actor directory in it
        output: directory to write, which does not exist yet
        dtype: type of the weights
    """

    checkpoint: Path
    output: Path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


DEFAULT = ModelExportConfig(REQUIRED, REQUIRED)
parse = partial(parse_config, default=DEFAULT, description=__doc__, prog="dataproto export")
