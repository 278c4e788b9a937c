"""Gemma 3 with images: every image has the same size and number of tokens, which see each other; most layers have a sliding
window and rotary angles of their own. Positions are one-dimensional.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import numpy as np
from torch import Tensor

from dataproto.errors import InvalidConfig
from dataproto.vlm.costs import siglip_flops
from dataproto.vlm.family import VLMFamily
from dataproto.vlm.media import EqualImages, Ids, Options
from dataproto.vlm.prompt_layout import EncodeText

MAX_NEWLINES = 31
"""The longest run of line breaks that is one token of Gemma's vocabulary."""


class Squares(EqualImages):
    """Images ``(images, 3, size, size)``."""

    def merge_size(self, config: Any) -> int:
        """Patches along each side of a square whose mean becomes a feature."""
        vision = config.vision_config
        return int(vision.image_size) // int(vision.patch_size) // math.isqrt(int(config.mm_tokens_per_image))

    def shape(self, config: Any) -> tuple[int, ...]:
        """Of an image."""
        return (3, int(config.vision_config.image_size), int(config.vision_config.image_size))

    def feature_counts(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Ids:
        """The same number for each image."""
        return np.full(len(self.grids(kind, inputs, config)), int(config.mm_tokens_per_image), dtype=np.int64)

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Images have one size, so there are no limits to keep; crops next to the image ("pan and scan") are off."""
        if min_pixels is not None or max_pixels is not None:
            size = processor.size
            raise InvalidConfig(
                f"min_pixels={min_pixels} and max_pixels={max_pixels}: models of this family see every image in "
                f"{size['height']} x {size['width']} pixels; leave the limits out"
            )
        return {"do_pan_and_scan": False}

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """The same number for each size."""
        return int(config.mm_tokens_per_image)


class Gemma3(VLMFamily):
    """Gemma 3 with a vision tower."""

    model_type = "gemma3"
    published = ("Gemma-3-4B", "Gemma-3-12B", "Gemma-3-27B")
    media_layout = Squares()
    image_text = ("\n\n<start_of_image>", "<end_of_image>\n\n")
    mrope = False
    numbered_layers = True
    mask_types = "token_type_ids"
    vision_tower = "model.vision_tower"
    vision_blocks = "model.vision_tower.encoder.layers"
    mergers = ("model.multi_modal_projector",)
    checkpoint_names = (
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.vision_tower\.", "vision_tower.vision_model."),
        (r"^model\.", ""),
    )
    """Those from when the output projection belonged to the language model."""

    def mutual_images(self, config: Any) -> Literal["all"]:
        """In all layers."""
        return "all"

    def image_placeholder(self, config: Any) -> int:
        """The start token, to which `expand` adds the image's tokens and the end token."""
        return int(config.boi_token_id)

    def place_texts(self, ids: Ids, texts: Sequence[tuple[str, ...]], config: Any, encode_text: EncodeText) -> Ids:
        """The line breaks around an image join those of the prompt in one token, as if the whole text were tokenized."""
        found = np.where(ids == config.boi_token_id, config.image_token_id, ids)
        return join_newlines(super().place_texts(found, texts, config, encode_text), encode_text)

    def joined_tokens(self, ids: Sequence[int] | Ids, config: Any, encode_text: EncodeText) -> int:
        """Tokens of line breaks."""
        raw = np.asarray(ids, dtype=np.int64)
        count = int((raw == config.boi_token_id).sum())
        if not count:
            return 0
        apart = len(raw) + count * sum(len(encode_text(text)) for text in self.image_text)
        return apart - len(self.place_texts(raw, [self.image_text] * count, config, encode_text))

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, H)`` after the tower, the means over squares of patches, and the projection."""
        output = model.model.get_image_features(media["pixel_values"], return_dict=True, **vision_kwargs)
        features: Tensor = output.pooler_output.flatten(0, 1)
        return features

    def processor_files(self, config: Any) -> dict[str, dict[str, Any]]:
        """The number of tokens of an image."""
        settings = {"processor_class": "Gemma3Processor", "image_seq_length": int(config.mm_tokens_per_image)}
        return {"processor_config.json": settings}

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Full attention within an image, an MLP of two layers, and one matrix for each feature."""
        merger = int(config.vision_config.hidden_size * config.text_config.hidden_size)
        return siglip_flops(config.vision_config, grids, merger, self.merge_size(config))


def join_newlines(ids: Ids, encode_text: EncodeText) -> Ids:
    """Neighbouring tokens of line breaks as the tokens of all these line breaks together.

    >>> tokens = {"\\n": [1], "\\n\\n": [2], "\\n\\n\\n": [3]}
    >>> join_newlines(np.array([9, 1, 2, 7, 7]), lambda text: tokens.get(text, [0, 0])).tolist()
    [9, 3, 7, 7]
    """
    codes = ((list(encode_text("\n" * count)), count) for count in range(1, MAX_NEWLINES + 1))
    counts = {code[0]: count for code, count in codes if len(code) == 1}
    joined: list[int] = []
    for newlines, group in groupby(ids.tolist(), key=counts.__contains__):
        run = list(group)
        joined += encode_text("\n" * sum(counts[token] for token in run)) if newlines else run
    return np.array(joined, dtype=np.int64)
