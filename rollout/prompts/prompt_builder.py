"""Rows of a data set to prompt columns: chat template, tokenizer, image processor, the family's placeholder expansion.

Letters: B rows, P tokens of the longest prompt.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from dataproto import DataProto, object_array
from dataproto.errors import DataProtoError, InvalidConfig, InvalidMedia, InvalidPrompt, InvalidRow
from dataproto.vlm import family_of, media_grids
from rollout.prompts.image_cache import ImageCache
from rollout.prompts.images import image_size, load_image, media_list
from rollout.prompts.messages import Conversation, read_conversation
from rollout.prompts.videos import ProcessedVideo, process_video

IMAGE_BACKEND = "pil"
"""The image processor's backend, for the actor and every engine: PIL's and torchvision's pixels differ."""

IMAGE_CACHE_BYTES = 2 << 30
"""What a `PromptBuilder` keeps of processed images, unless it is told otherwise."""

_CONSUMED = ("prompt", "images", "videos", "media_root")


@dataclass(frozen=True)
class ProcessedImage:
    """An RGB image and the model's inputs for it, such as patches ``(patches, dim)`` float32 and a grid ``(1, 3)`` int64;
    ``key`` tells its content.
    """

    key: bytes
    image: Image.Image
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class Prompt:
    """A row made ready for `PromptBuilder.collate`."""

    input_ids: np.ndarray  # (P,) int64, placeholders expanded
    token_types: np.ndarray  # (P,) int8
    raw_ids: list[int]  # one placeholder for each image or video
    conversation: Conversation
    images: tuple[ProcessedImage, ...]
    videos: tuple[ProcessedVideo, ...]
    columns: dict[str, Any]  # the row's other values


def load_image_processor(path: str | os.PathLike[str]) -> Any:
    """The checkpoint's image processor on `IMAGE_BACKEND`, whatever else is installed. Raises `InvalidConfig`."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # older top levels want torchvision

    try:
        processor = AutoImageProcessor.from_pretrained(path, backend=IMAGE_BACKEND)
    except ValueError as error:
        if "Could not load any image processor class" in str(error):
            raise InvalidConfig(
                f"{path}: transformers has its image processor for torchvision alone; prompts are made with the "
                f"{IMAGE_BACKEND} backend, on every machine the same"
            ) from error
        # The first Qwen2.5-VL checkpoints name a class that no longer exists; its successor reads their settings.
        if "Unrecognized image processor" not in str(error):
            raise
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_pretrained(path)
    if getattr(processor, "backend", None) != IMAGE_BACKEND:
        raise InvalidConfig(f"{path}: its image processor {type(processor).__name__} has no {IMAGE_BACKEND} backend")
    return processor


class PromptBuilder:
    """Rows to a prompt batch: ``builder(rows)``.

    A row is a mapping with ``prompt`` (messages or a string), ``images`` and ``videos`` (where the messages have
    markers for them), and optionally ``media_root`` (where relative paths start); everything else in it becomes an
    object column. Each distinct image of a call is processed once, however many rows show it; as long as the cache has room, an
    epoch finds there what the one before has processed.

    A row's ``uid`` names this occurrence of the prompt: samples of one uid are one group, and their random streams derive from
    it. A row without one gets a uid that is new each time the row is shown, and the same in every run that shows the
    builder the same rows in the same order. A run that resumes sets ``occurrences`` to what it was. Two builders that show an
    equal row at the same occurrence give it the same uid.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        config: Any,
        max_prompt_length: int,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        image_cache_bytes: int = IMAGE_CACHE_BYTES,
    ) -> None:
        """``config`` is the model's; images are resized to between ``min_pixels`` and ``max_pixels`` (default: as the
        image processor says). Of processed images the last ones are kept, in at most ``image_cache_bytes`` of memory; with 0,
        each is processed again in every call.
        """
        if max_prompt_length < 1:
            raise InvalidConfig(f"max_prompt_length={max_prompt_length}: must be at least 1")
        if image_cache_bytes < 0:
            raise InvalidConfig(f"image_cache_bytes={image_cache_bytes}: must be at least 0")
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.config = config
        self.max_prompt_length = max_prompt_length
        self.family = family_of(config)
        self.image_options = self.family.media_layout.processor_options(image_processor, min_pixels, max_pixels)
        self.media_tokens = self.family.media_tokens(config)
        around = [text for text in self.family.image_text if text]
        media_tokens = tokenizer.convert_ids_to_tokens(list(self.family.banned_ids(config)))
        self._media_strings = tuple(str(token) for token in [*media_tokens, *around] if token)
        self._tokens_around = sum(len(self.encode_text(text)) for text in around)
        self.occurrences = 0
        """How many prompts have been given a uid so far."""
        self._processed = ImageCache(image_cache_bytes)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        max_prompt_length: int,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        image_cache_bytes: int = IMAGE_CACHE_BYTES,
    ) -> Self:
        """Everything from one checkpoint directory."""
        from transformers import AutoConfig, AutoTokenizer

        try:
            tokenizer, config = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path)
            processor = load_image_processor(path)
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"{path} lacks a part of a checkpoint: {str(error).splitlines()[0]}") from error
        return cls(tokenizer, processor, config, max_prompt_length, min_pixels, max_pixels, image_cache_bytes)

    @property
    def pad_token_id(self) -> int:
        """What stands behind the end of a row."""
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> DataProto:
        """The prompt batch of ``rows``. Raises `InvalidRow` with the row's ``index`` (or its place, where that is no number)."""
        prompts = []
        with self._processed.one_batch():
            for place, row in enumerate(rows):
                try:
                    prompts.append(self.prepare(row))
                except DataProtoError as error:
                    raise invalid_row(row, place, str(error)) from error
        return self.collate(prompts)

    # One row

    def prompt_length(self, row: Mapping[str, Any]) -> int:
        """Tokens of the row's prompt with placeholders expanded, from the images' headers alone. Raises
        `InvalidPrompt`.
        """
        conversation = conversation_of(row)
        return self.length(conversation, self._encode(conversation), row.get("media_root"))

    def prepare(self, row: Mapping[str, Any]) -> Prompt:
        """One row, images decoded and processed. Raises `InvalidPrompt`, before images are decoded if it is too
        long.
        """
        conversation = conversation_of(row)
        raw_ids = self._encode(conversation)
        root = row.get("media_root")
        self.check_length(self.length(conversation, raw_ids, root))
        images, videos = self.process_media(conversation, root)
        ids, types = self.family.expand(
            raw_ids,
            [image.inputs for image in images] + [video.inputs for video in videos],
            self.config,
            encode_text=self.encode_text,
            seconds=[video.seconds for video in videos],
        )
        self.check_length(len(ids))
        return Prompt(ids, types, raw_ids, conversation, images, videos, self.other_columns(row))

    def _encode(self, conversation: Conversation) -> list[int]:
        """Token ids with one placeholder for each image and video."""
        self.check_text(conversation)
        ids = self.encode_text(self.render(conversation.messages, add_generation_prompt=True))
        self.check_placeholders(ids, conversation)
        return ids

    # What a row is made of

    def check_text(self, conversation: Conversation) -> None:
        """Refuses text with tokens that stand for media."""
        for text in conversation.texts():
            for token in self._media_strings:
                if token in text:
                    raise InvalidPrompt(f"the text contains {token}, which only the chat template may write")

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
        """The messages as the chat template writes them. Raises `InvalidPrompt` with the template's complaint."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:  # jinja's and the template's own
            raise InvalidPrompt(f"the chat template refuses the messages: {error}") from error
        return str(text)

    def check_placeholders(self, ids: Sequence[int], conversation: Conversation) -> None:
        """Refuses ids that do not have one placeholder for each image and video."""
        tokens = self.media_tokens
        for kind, placeholder, media in (
            ("image", tokens.image, conversation.images),
            ("video", tokens.video, conversation.videos),
        ):
            if media and not self.family.media_layout.names(kind):
                raise InvalidPrompt(
                    f"models of type {self.family.model_type} take no {kind}s; show a video's frames as images"
                )
            if placeholder is not None and ids.count(placeholder) != len(media):
                raise InvalidPrompt(
                    f"the tokenizer's chat template wrote {ids.count(placeholder)} {kind} placeholders for {len(media)} "
                    f"{kind}s: the checkpoint needs a template that writes one for each"
                )

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text in which special tokens are already written."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def length(self, conversation: Conversation, raw_ids: Sequence[int], root: Any) -> int:
        """Tokens of a conversation from the headers of its images. A video counts as one: its length is known when it is read."""
        length = len(raw_ids)
        for source in conversation.images:
            height, width = image_size(source, root)
            tokens = self.family.image_tokens(height, width, self.image_processor, self.image_options, self.config)
            length += tokens + self._tokens_around - 1
        return length

    def check_length(self, length: int) -> None:
        if length > self.max_prompt_length:
            raise InvalidPrompt(f"the prompt has {length} tokens, more than max_prompt_length={self.max_prompt_length}")

    def process_media(
        self, conversation: Conversation, root: Any
    ) -> tuple[tuple[ProcessedImage, ...], tuple[ProcessedVideo, ...]]:
        """The conversation's images and videos, decoded and processed."""
        images = tuple(self.process_image(load_image(source, root)) for source in conversation.images)
        return images, tuple(self._process_video(source, root) for source in conversation.videos)

    def process_image(self, image: Image.Image) -> ProcessedImage:
        """An RGB image made ready; one with the content of an earlier one is taken from the cache."""
        key = self._image_key(image)
        inputs = self._processed.get(key)
        if inputs is None:
            try:
                made = self.image_processor(images=[image], return_tensors="pt", **self.image_options)
            except ValueError as error:
                raise InvalidMedia(f"the image processor refuses an image of {image.size} pixels: {error}") from error
            inputs = {name: made[name] for name in self.family.media_layout.names("image")}
            self._processed.put(key, inputs)
        return ProcessedImage(key, image, inputs)

    def _image_key(self, image: Image.Image) -> bytes:
        """Tells all that an image's inputs depend on: its pixels, and the processor with its settings as they are now."""
        processor = self.image_processor
        settings = [type(processor).__qualname__, processor.to_dict(), self.image_options, image.mode, image.size]
        digest = blake2b(json.dumps(settings, sort_keys=True, default=repr).encode(), digest_size=16)
        digest.update(image.tobytes())
        return digest.digest()

    def other_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What a row holds besides its messages and media."""
        return {name: value for name, value in row.items() if name not in _CONSUMED}

    def _process_video(self, source: Any, root: Any) -> ProcessedVideo:
        return process_video(source, self.image_processor, self.image_options, root)

    # Many rows

    def collate(self, prompts: Sequence[Prompt]) -> DataProto:
        """The prompt batch: tensors left-padded to the longest prompt, everything else in object columns.

        Rows that show the same images hold the same tensors and the same PIL objects.
        """
        if not prompts:
            raise InvalidPrompt("a prompt batch needs at least one row")
        width = max(len(prompt.input_ids) for prompt in prompts)
        input_ids = _pad_left([prompt.input_ids for prompt in prompts], width, self.pad_token_id, np.int64)
        mask = _pad_left([np.ones_like(prompt.input_ids) for prompt in prompts], width, 0, np.int64)
        types = _pad_left([prompt.token_types for prompt in prompts], width, 0, np.int8)
        data, inputs = share_media(prompts)
        positions = self.family.position_ids(types, mask, **media_grids(inputs), config=self.config)
        objects: dict[str, list[Any]] = {
            "raw_prompt_ids": [prompt.raw_ids for prompt in prompts],
            "multi_modal_data": data,
            "multi_modal_inputs": inputs,
            "raw_prompt": [
                prompt.conversation.with_media(media.get("image", ()), media.get("video", ()))
                for prompt, media in zip(prompts, data)
            ],
            **row_columns(prompts),
            "uid": self.uids(prompts),
        }
        tensors = {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": positions,
            "mm_token_type_ids": types,
        }
        return DataProto.from_dict(
            tensors, non_tensors={name: object_array(values) for name, values in objects.items()}
        )

    def uids(self, prompts: Sequence[Prompt]) -> list[Any]:
        """Each row's own ``uid``, or one that no other occurrence of any prompt has: ``"<occurrence>-<digest of the row>"``.

        The occurrence tells apart what this builder shows, the digest what another one does. Two builders give the same uid
        only to equal rows that each of them shows in the same place.
        """
        uids = [prompt.columns.get("uid") for prompt in prompts]
        worker = get_worker_info()  # in a worker of a `DataLoader` also its seed counts, new in each epoch
        for place, prompt in enumerate(prompts):
            if uids[place] is None:
                uids[place] = f"{self.occurrences}-{row_digest(prompt, worker.seed if worker else None)}"
                self.occurrences += 1
        return uids


def row_number(row: Mapping[str, Any], place: int) -> int:
    """The row's ``index`` where it has a whole number there, else its place.

    >>> row_number({"index": 7}, 0), row_number({"index": "train-7"}, 0), row_number({"index": None}, 0), row_number({}, 0)
    (7, 0, 0, 0)
    """
    index = row.get("index", place)
    whole = isinstance(index, Integral) or (isinstance(index, Real) and float(index).is_integer())
    return int(index) if whole else place


def invalid_row(row: Mapping[str, Any], place: int, reason: str) -> InvalidRow:
    """The error that names a row: by its number and, where its ``index`` is something else, by that too."""
    number, index = row_number(row, place), row.get("index")
    named = f"index {index!r}: {reason}" if index is not None and index != number else reason
    return InvalidRow(number, named)


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    return read_conversation(row.get("prompt"), media_list(row.get("images")), media_list(row.get("videos")))


def _join(images: Sequence[ProcessedImage], videos: Sequence[ProcessedVideo]) -> dict[str, Tensor]:
    """A row's ``multi_modal_inputs``; a single image's tensors stay the objects they are."""
    joined: dict[str, Tensor] = {}
    for media in (images, videos):
        for name in media[0].inputs if media else ():
            parts = [medium.inputs[name] for medium in media]
            joined[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined


def share_media(prompts: Sequence[Prompt]) -> tuple[list[dict[str, Any]], list[dict[str, Tensor]]]:
    """``multi_modal_data`` and ``multi_modal_inputs`` of each row; equal media are one object."""
    images: dict[bytes, ProcessedImage] = {}
    videos: dict[bytes, ProcessedVideo] = {}
    joined: dict[tuple[tuple[bytes, ...], tuple[bytes, ...]], tuple[dict[str, Any], dict[str, Tensor]]] = {}
    shared = []
    for prompt in prompts:
        own_images = [images.setdefault(image.key, image) for image in prompt.images]
        own_videos = [videos.setdefault(video.key, video) for video in prompt.videos]
        keys = (tuple(image.key for image in own_images), tuple(video.key for video in own_videos))
        if keys not in joined:
            data = {"image": [i.image for i in own_images], "video": [(v.frames, v.metadata) for v in own_videos]}
            joined[keys] = ({kind: media for kind, media in data.items() if media}, _join(own_images, own_videos))
        shared.append(joined[keys])
    return [dict(data) for data, _ in shared], [dict(inputs) for _, inputs in shared]


def row_columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """The rows' other values, and what every batch has in case they do not tell."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    columns.setdefault("index", list(range(len(prompts))))
    columns.setdefault("data_source", [""] * len(prompts))
    for name in ("reward_model", "extra_info"):
        columns.setdefault(name, [{} for _ in prompts])
    return columns


def row_digest(prompt: Prompt, salt: int | None = None) -> str:
    """Of a prompt's tokens, media and plain values, and of ``salt``: 16 hexadecimal digits, the same in every process."""
    values = sorted(
        (name, str(value)) for name, value in prompt.columns.items() if isinstance(value, str | int | float)
    )
    media = [image.key for image in prompt.images] + [video.key for video in prompt.videos]
    told = (salt, prompt.input_ids.tobytes(), media, values)
    return blake2b(repr(told).encode(), digest_size=8).hexdigest()


def _pad_left(rows: Sequence[np.ndarray], width: int, value: int, dtype: Any) -> Tensor:
    padded = np.full((len(rows), width), value, dtype=dtype)
    for target, row in zip(padded, rows):
        target[width - len(row) :] = row
    return torch.from_numpy(padded)
