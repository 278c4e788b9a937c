"""Prepared rows: what `PromptBuilder` makes of a row of a data set, and the columns and names that it shares with others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidRow
from rollout.prompts.image_processing import ProcessedImage
from rollout.prompts.images import media_list
from rollout.prompts.messages import Conversation, read_conversation
from rollout.prompts.videos import ProcessedVideo

CONSUMED_COLUMNS = ("prompt", "images", "videos", "media_root")
"""What a row's messages and media are read from. All other values of a row become columns of the batch."""


@dataclass(frozen=True)
class Prompt:
    """A row that is prepared for `PromptBuilder.collate`."""

    input_ids: np.ndarray  # (P,) int64, placeholders expanded
    token_types: np.ndarray  # (P,) int8
    raw_ids: list[int]  # one placeholder for each image or video
    conversation: Conversation
    images: tuple[ProcessedImage, ...]
    videos: tuple[ProcessedVideo, ...]
    columns: dict[str, Any]  # the row's other values


def row_number(row: Mapping[str, Any], place: int) -> int:
    """The row's ``index`` if it is a whole number, else its place.

    >>> row_number({"index": 7}, 0), row_number({"index": "train-7"}, 0), row_number({"index": None}, 0), row_number({}, 0)
    (7, 0, 0, 0)
    """
    index = row.get("index", place)
    whole = isinstance(index, Integral) or (isinstance(index, Real) and float(index).is_integer())
    return int(index) if whole else place


def invalid_row(row: Mapping[str, Any], place: int, reason: str) -> InvalidRow:
    """The error for a row. It names the row's number and, if its ``index`` is not that number, its index."""
    number, index = row_number(row, place), row.get("index")
    return InvalidRow(number, f"index {index!r}: {reason}" if index is not None and index != number else reason)


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """The messages and media of a row. Raises `InvalidPrompt`."""
    return read_conversation(row.get("prompt"), media_list(row.get("images")), media_list(row.get("videos")))


def join_media(images: Sequence[ProcessedImage], videos: Sequence[ProcessedVideo]) -> dict[str, Tensor]:
    """The ``multi_modal_inputs`` of a row or of a turn. The tensors of a single image are not copied."""
    joined: dict[str, Tensor] = {}
    for media in (images, videos):
        for name in media[0].inputs if media else ():
            parts = [medium.inputs[name] for medium in media]
            joined[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined


def media_objects(images: Sequence[ProcessedImage], videos: Sequence[ProcessedVideo] = ()) -> dict[str, Any]:
    """The ``multi_modal_data`` of a row or of a turn."""
    data = {"image": [image.image for image in images], "video": [(video.frames, video.metadata) for video in videos]}
    return {kind: media for kind, media in data.items() if media}


def share_media(prompts: Sequence[Prompt]) -> tuple[list[dict[str, Any]], list[dict[str, Tensor]]]:
    """``multi_modal_data`` and ``multi_modal_inputs`` of each row. Rows with equal media share the objects."""
    images: dict[bytes, ProcessedImage] = {}
    videos: dict[bytes, ProcessedVideo] = {}
    joined: dict[tuple[tuple[bytes, ...], tuple[bytes, ...]], tuple[dict[str, Any], dict[str, Tensor]]] = {}
    shared = []
    for prompt in prompts:
        own_images = [images.setdefault(image.key, image) for image in prompt.images]
        own_videos = [videos.setdefault(video.key, video) for video in prompt.videos]
        keys = (tuple(image.key for image in own_images), tuple(video.key for video in own_videos))
        if keys not in joined:
            joined[keys] = media_objects(own_images, own_videos), join_media(own_images, own_videos)
        shared.append(joined[keys])
    return [dict(data) for data, _ in shared], [dict(inputs) for _, inputs in shared]


def row_columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """The rows' other values, and defaults for the columns that every batch has."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    columns.setdefault("index", list(range(len(prompts))))
    columns.setdefault("data_source", [""] * len(prompts))
    for name in ("reward_model", "extra_info"):
        columns.setdefault(name, [{} for _ in prompts])
    return columns


def row_digest(prompt: Prompt, salt: int | None = None) -> str:
    """A digest of a prompt's tokens, media and plain values, and of ``salt``: 16 hexadecimal digits, equal in all processes."""
    values = sorted(
        (name, str(value)) for name, value in prompt.columns.items() if isinstance(value, str | int | float)
    )
    media = [image.key for image in prompt.images] + [video.key for video in prompt.videos]
    content = (salt, prompt.input_ids.tobytes(), media, values)
    return blake2b(repr(content).encode(), digest_size=8).hexdigest()
