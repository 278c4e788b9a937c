"""The configs of published models by name, so that a run can be fitted to devices, or planned, without their checkpoints."""

import json
from pathlib import Path
from typing import Any

from dataproto.errors import InvalidConfig

PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Qwen2.5-VL of four sizes, and Qwen3-VL's mixtures."""


def published_config(name: str) -> Any:
    """The config of a published model.

    >>> config = published_config("72b")
    >>> config.text_config.num_hidden_layers, config.vision_config.out_hidden_size
    (80, 8192)

    Raises:
        InvalidConfig: the table does not have it.
    """
    from transformers import AutoConfig  # which the presets, that need the table only, do not wait for

    if name not in PUBLISHED:
        raise InvalidConfig(f"preset {name!r} is unknown: choose one of {', '.join(PUBLISHED)}, or give --model-path")
    return AutoConfig.for_model(**PUBLISHED[name])
