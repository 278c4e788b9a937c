"""Language models without a vision tower: dense decoders of the Llama kind, with positions ``(B, L)``.

Rows have no media. Everything else, from prompts to weights in the engine, is as in the other families.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig, InvalidMedia, MediaMismatch
from dataproto.vlm.family import DECODER_PLAN, VLMFamily
from dataproto.vlm.media import MediaLayout, Options
from dataproto.vlm.prompt_layout import MediaTokens


@dataclass(frozen=True)
class NoMedia(MediaLayout):
    """The layout of models that read only text: no media, so every count is 0."""

    def merge_size(self, config: Any) -> int:
        """1, without a meaning."""
        return 1

    def holds(self, kind: str, inputs: Mapping[str, Any]) -> bool:
        """Never. Raises `MediaMismatch` for a row with media."""
        if inputs:
            raise MediaMismatch(f"it has {', '.join(sorted(inputs))}, but the model reads only text")
        return False

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """None. Raises `MediaMismatch` for a row with media."""
        self.holds(kind, inputs)
        return torch.zeros(0, 3, dtype=torch.int64)

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """None. Raises `InvalidConfig` for limits, which would have no effect."""
        if min_pixels is not None or max_pixels is not None:
            raise InvalidConfig(
                f"min_pixels={min_pixels} and max_pixels={max_pixels}: the model reads only text; leave them out"
            )
        return {}

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """Raises `InvalidMedia`."""
        raise InvalidMedia(f"models of type {config.model_type} read only text")

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """Nothing: there is no tower to run."""
        return {}


class TextOnly(VLMFamily):
    """What these models share. A row with media raises an error that names the row."""

    auto_model = "AutoModelForCausalLM"
    media_layout = NoMedia()
    mrope = False
    vision_tower = None
    vision_blocks = None
    mergers = ()
    language_model = "model"
    embedding = "model.embed_tokens"
    decoder_layers = "model.layers"
    final_norm = "model.norm"
    tensor_plan = tuple((path.replace("model.language_model.", "model."), style) for path, style in DECODER_PLAN)

    def media_tokens(self, config: Any) -> MediaTokens:
        """None."""
        return MediaTokens(image=None)

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Zero: there is no tower."""
        return torch.zeros(len(grids), 2, dtype=torch.int64)


class Llama(TextOnly):
    """Llama 2 and 3, and models of its architecture, such as SmolLM2."""

    model_type = "llama"
    published = ("Llama 2", "Llama 3", "SmolLM2")


class Mistral(TextOnly):
    """Mistral 7B, with a sliding window (v0.1) or without."""

    model_type = "mistral"
    published = ("Mistral 7B",)


class Qwen2(TextOnly):
    """Qwen2 and Qwen2.5, dense."""

    model_type = "qwen2"
    published = ("Qwen2", "Qwen2.5")


class Qwen3(TextOnly):
    """Qwen3, dense."""

    model_type = "qwen3"
    published = ("Qwen3",)
