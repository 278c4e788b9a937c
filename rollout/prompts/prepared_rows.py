"""Prepared rows: what `PromptBuilder` makes of a row of a data set, and the batch of several.

Letters: B rows, P tokens of the longest prompt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto, object_array
from dataproto.columns import IMAGE_KEYS
from dataproto.errors import InvalidPrompt, InvalidRow
from dataproto.vlm import media_grids
from dataproto.vlm.family import VLMFamily
from dataproto.vlm.media import MediaLayout
from rollout.continuation import joined_media
from rollout.prompts.image_processing import ProcessedImage, ProcessedMedium, inputs_key
from rollout.prompts.messages import MEDIA, VIDEO_SOUND, Conversation, read_conversation, read_tools
from rollout.prompts.sources import media_list
from rollout.prompts.videos import ProcessedVideo

M = TypeVar("M", bound=ProcessedMedium)

CONSUMED_COLUMNS = ("prompt", *MEDIA.values(), "media_root", "where", VIDEO_SOUND)
"""What a row's messages and media are read from, and where it is, for errors. All other values become columns of the batch."""


@dataclass(frozen=True)
class Prompt:
    """A row that is prepared for `PromptBuilder.collate`."""

    input_ids: np.ndarray  # (P,) int64, placeholders expanded
    token_types: np.ndarray  # (P,) int8
    raw_ids: list[int]  # one placeholder for each medium
    conversation: Conversation
    media: tuple[ProcessedMedium, ...]  # in the order of the conversation
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
    """The error for a row. It names the row's number, if its ``index`` is not that number its index, and ``where`` it is.

    >>> str(invalid_row({"index": 7, "where": "line 9 of b.jsonl"}, 0, "no prompt"))
    'row 7: line 9 of b.jsonl: no prompt'
    """
    number, index, where = row_number(row, place), row.get("index"), row.get("where")
    if index is not None and index != number:
        reason = f"index {index!r}: {reason}"
    return InvalidRow(number, reason if where is None or reason.startswith(where) else f"{where}: {reason}")


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """The messages, media and tools of a row. Raises `InvalidPrompt`."""
    media = {kind: media_list(row.get(column)) for kind, column in MEDIA.items()}
    found = read_conversation(row.get("prompt"), media)
    for video in found.of_kind("video"):
        own: Mapping[str, Any] = video if isinstance(video, Mapping) else {}
        if own.get(VIDEO_SOUND, row.get(VIDEO_SOUND)) and own.get("audio") is None:
            raise InvalidPrompt(
                f"{VIDEO_SOUND}: the sound of a video is not read from its file: write it to one of its own (ffmpeg -i clip.mp4 "
                'clip.wav) and give both, {"video": "clip.mp4", "audio": "clip.wav"}; without the setting the video is silent'
            )
    return replace(found, tools=read_tools(row.get("tools")))


def by_kind(media: Iterable[M]) -> list[M]:
    """Media sorted by their kinds, in the order of `MEDIA`; those of a kind keep theirs."""
    kinds = list(MEDIA)
    return sorted(media, key=lambda medium: kinds.index(medium.kind))


def media_objects(media: Iterable[ProcessedMedium]) -> dict[str, list[Any]]:
    """The ``multi_modal_data`` of a row or of a turn."""
    data: dict[str, list[Any]] = {}
    for medium in by_kind(media):
        data.setdefault(medium.kind, []).append(medium.content)
    return data


def keys_of_images(media: Iterable[ProcessedMedium]) -> list[bytes]:
    """Of each image among media, in the order of `media_objects`."""
    return [medium.key for medium in media if medium.kind == "image"]


def prompt_batch(prompts: Sequence[Prompt], pad_token_id: int, family: VLMFamily, config: Any) -> DataProto:
    """The batch of prepared rows without their ``uid``; see `PromptBuilder.collate`."""
    if not prompts:
        raise InvalidPrompt("a prompt batch needs at least one row")
    mask = pad_left([np.ones_like(prompt.input_ids) for prompt in prompts])
    types = pad_left([prompt.token_types for prompt in prompts], dtype=np.int8)
    data, inputs = share_media(prompts)
    positions = family.position_ids(types, mask, **media_grids(inputs), config=config)
    objects: dict[str, list[Any]] = {
        "raw_prompt_ids": [prompt.raw_ids for prompt in prompts],
        "multi_modal_data": data,
        "multi_modal_inputs": inputs,
        IMAGE_KEYS: [image_keys(each.media, family.media_layout) for each in prompts],
        "raw_prompt": [prompt.conversation.with_media(media) for prompt, media in zip(prompts, data)],
        **row_columns(prompts),
    }
    tensors = {"input_ids": pad_left([prompt.input_ids for prompt in prompts], pad_token_id), "attention_mask": mask}
    tensors |= {"position_ids": positions, "mm_token_type_ids": types}
    return DataProto.from_dict(tensors, non_tensors={name: object_array(values) for name, values in objects.items()})


def pad_left(rows: Sequence[np.ndarray], value: int = 0, dtype: Any = np.int64) -> Tensor:
    """Rows ``(P,)`` of any lengths as ``(B, P)``, with ``value`` before each of them."""
    width = max(map(len, rows), default=1)
    padded = np.full((len(rows), width), value, dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        target[width - len(row) :] = row
    return torch.from_numpy(padded)


def image_keys(media: Iterable[ProcessedMedium], layout: MediaLayout) -> list[tuple[bytes, dict[str, int]]]:
    """The value of `IMAGE_KEYS` for a row with these media: for each image its key, and its share of each of the row's inputs."""
    shown = (each.images if isinstance(each, ProcessedVideo) else [each] for each in media)
    images = [image for each in shown for image in each if isinstance(image, ProcessedImage)]
    return [
        (inputs_key(image.key, layout), {name: len(tensor) for name, tensor in image.inputs.items()})
        for image in images
    ]


def share_media(prompts: Sequence[Prompt]) -> tuple[list[dict[str, Any]], list[dict[str, Tensor]]]:
    """``multi_modal_data`` and ``multi_modal_inputs`` of each row. Rows with equal media share the objects."""
    distinct: dict[bytes, ProcessedMedium] = {}
    joined: dict[tuple[bytes, ...], tuple[dict[str, Any], dict[str, Tensor]]] = {}
    shared = []
    for prompt in prompts:
        media = [distinct.setdefault(medium.key, medium) for medium in prompt.media]
        keys = tuple(medium.key for medium in media)
        if keys not in joined:
            joined[keys] = media_objects(media), joined_media([medium.inputs for medium in media])
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
    media = [medium.key for medium in by_kind(prompt.media)]
    return blake2b(repr((salt, prompt.input_ids.tobytes(), media, values)).encode(), digest_size=8).hexdigest()
