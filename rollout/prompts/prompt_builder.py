"""Rows of a data set to prompt columns: chat template, tokenizer, image processor, the family's placeholder expansion."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from dataproto import DataProto, object_array
from dataproto.errors import DataProtoError, InvalidConfig, InvalidMedia, InvalidPrompt, raised_as
from dataproto.vlm import family_of
from rollout.pretrained import end_ids, generation_config, load_prompt_parts
from rollout.prompts import prepared_rows
from rollout.prompts.image_processing import Batch, ImageCache, ProcessedImage, ProcessedMedium, image_key, inputs_key
from rollout.prompts.images import check_whole, encoded_image, image_size, load_image
from rollout.prompts.messages import THOUGHTS, Conversation, Messages, as_parts, joined_texts, thoughts_apart
from rollout.prompts.prepared_rows import Prompt
from rollout.prompts.sounds import ProcessedSound, load_sound, mel_frames, process_sound, sound_samples
from rollout.prompts.template_arguments import check_template_arguments, reads_tools
from rollout.prompts.videos import ProcessedVideo, check_files, process_frames, process_video

_HALF = re.compile("[\ud800-\udfff]")  # of a character: a surrogate without the other one
IMAGE_CACHE_BYTES = 2 << 30
"""The default size of a `PromptBuilder`'s cache of processed images."""

MAX_THREADS = 16
"""Threads that prepare rows. Most of the time goes into copies of pixels, for which more threads find no memory bandwidth."""

QUESTION, THOUGHT, ANSWER = "7315498026", "5390718264", "8412906735"
"""Texts that stand for any others when a template is tried out. They are digits: no template strips, escapes or splits them."""

Piece = tuple[list[int], bool]
"""Token ids of a part of a row, with one placeholder for each medium, and whether they are learned."""
T = TypeVar("T")

_TEXT = Lock()
"""Held where a chat template or a tokenizer works: neither promises to work in several threads."""


class PromptBuilder:
    """Rows to a prompt batch: ``builder(rows)``.

    A row is a mapping with ``prompt`` (messages or a string), ``images``, ``videos`` and ``audios`` (where the messages have
    markers, else before the question), and optionally ``media_root`` (the folder of relative paths) and ``tools`` (a list, or the
    JSON of one), which the chat template gets for this row. All values except messages and media become object columns. Within a
    call each distinct image is decoded and processed once. If the cache is large enough, later epochs find all images there.

    A row's ``uid`` identifies one occurrence of the prompt: its samples form a group, and their random streams derive from the
    uid. A row without a uid gets a new one at each occurrence, and the same one in every run that passes the same rows in the
    same order to its builder. To resume a run, set ``occurrences`` to its earlier value. Two builders give the same uid to an
    equal row at the same occurrence.
    """

    counted = "prompt"
    """What ``max_prompt_length`` limits, in errors."""

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        config: Any,
        max_prompt_length: int,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        image_cache_bytes: int = IMAGE_CACHE_BYTES,
        template_arguments: Mapping[str, Any] | None = None,
        end_ids: Sequence[int] | None = None,
        feature_extractor: Any = None,
    ) -> None:
        """``config`` is the model's. A model that reads only text has no image processor (``None``).

        Images are resized to between ``min_pixels`` and ``max_pixels`` (default: the limits of the image processor). Processed
        images are cached in at most ``image_cache_bytes`` of memory; with 0, each call processes its images again.

        ``template_arguments`` are passed to the chat template, such as ``{"tools": [...], "enable_thinking": False}``.
        ``end_ids`` are the tokens at which the model stops (default: the tokenizer's end token). ``feature_extractor`` makes the
        mel frames of sounds, for a model that reads them.

        Raises:
            InvalidConfig: a limit is out of range, or the chat template does not use one of ``template_arguments``.
        """
        if max_prompt_length < 1:
            raise InvalidConfig(f"max_prompt_length={max_prompt_length}: must be at least 1")
        if image_cache_bytes < 0:
            raise InvalidConfig(f"image_cache_bytes={image_cache_bytes}: must be at least 0")
        if template_arguments:
            check_template_arguments(tokenizer, template_arguments)
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.feature_extractor = feature_extractor
        self.config = config
        self.max_prompt_length = max_prompt_length
        self.template_arguments = dict(template_arguments or {})
        self.family = family_of(config)
        self.image_options = self.family.media_layout.processor_options(image_processor, min_pixels, max_pixels)
        self.media_tokens = self.family.media_tokens(config)
        media_tokens = tokenizer.convert_ids_to_tokens(list(self.family.banned_ids(config)))
        written = [*media_tokens, *self.family.image_text, *self.family.processor_tokens]
        self._media_strings = tuple(str(token) for token in written if token)
        self._text_lengths: dict[str, int] = {"": 0}
        own_end = tokenizer.eos_token_id
        self.end_ids = tuple(([] if own_end is None else [own_end]) if end_ids is None else end_ids)
        self.limit_name = "max_prompt_length"
        """What an error calls the limit, for instance the name of a recipe's option."""
        self.occurrences = 0
        """Number of prompts that have been given a uid."""
        self._processed = ImageCache(image_cache_bytes)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        max_prompt_length: int,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        image_cache_bytes: int = IMAGE_CACHE_BYTES,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Self:
        """A builder with what `load_prompt_parts` and `generation_config` read from a checkpoint directory, and with their
        errors.
        """
        tokenizer, processor, config, extractor = load_prompt_parts(path)
        ends = end_ids(generation_config(os.fspath(path), config), config)
        options = (max_prompt_length, min_pixels, max_pixels, image_cache_bytes, template_arguments, ends)
        return cls(tokenizer, processor, config, *options, feature_extractor=extractor)

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Writes all that a checkpoint has in addition to weights and config: the files of tokenizer, image processor and
        processor.
        """
        for part in self.processors:
            part.save_pretrained(path)
        if self.feature_extractor is not None:  # whose settings are in the file of the image processor's
            file = Path(path, "preprocessor_config.json")
            settings = {**self.feature_extractor.to_dict(), **json.loads(file.read_text(encoding="utf-8"))}
            file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, settings in self.family.processor_files(self.config).items():
            Path(path, name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @property
    def processors(self) -> tuple[Any, ...]:
        """What a checkpoint keeps in addition to its weights to make prompts: the tokenizer and, if there is one, the
        image processor.
        """
        return (self.tokenizer,) if self.image_processor is None else (self.tokenizer, self.image_processor)

    @property
    def pad_token_id(self) -> int:
        """The id that pads rows: the tokenizer's pad token, or else its end token."""
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> DataProto:
        """The prompt batch of ``rows``, which are prepared `in_threads`.

        Raises `InvalidRow` with the row's ``index`` (or its place, if that is no number), `InvalidPrompt` for one row by itself.
        """
        if isinstance(rows, Mapping):
            raise InvalidPrompt(f"the builder takes a list of rows, not one row {list(rows)}: write [row]")

        def prepare(place: int, row: Mapping[str, Any]) -> Prompt:
            try:
                return self.prepare(row)
            except DataProtoError as error:
                raise prepared_rows.invalid_row(row, place, str(error)) from error

        return self.collate(self.in_threads(prepare, count(), rows))

    def in_threads(self, prepare: Callable[..., T], *rows: Iterable[Any]) -> list[T]:
        """The results of ``prepare`` for the rows of a batch, as of ``map``, computed in as many threads as torch uses, at most
        `MAX_THREADS`. Each distinct image is processed once.
        """
        batch: Batch = {}

        def prepare_one(*row: Any) -> T:
            with self._processed.one_batch(batch):
                return prepare(*row)

        arguments = list(zip(*rows, strict=False))
        threads = min(torch.get_num_threads(), MAX_THREADS, len(arguments))
        if threads <= 1:
            return [prepare_one(*row) for row in arguments]
        with ThreadPoolExecutor(threads, "preparing") as pool:
            # After an error, it begins no further row.
            return list(pool.map(prepare_one, *zip(*arguments, strict=True)))

    def one_batch(self, batch: Batch | None = None) -> AbstractContextManager[Batch]:
        """A context in which this thread processes each distinct image once, however small the cache is, and none of
        ``batch``.
        """
        return self._processed.one_batch(batch)

    def without_cache(self) -> Self:
        """This builder with a cache that keeps nothing, for rows whose images never come back."""
        found = copy(self)
        found._processed = ImageCache(0)
        return found

    # One row

    def prompt_length(self, row: Mapping[str, Any]) -> int:
        """Number of tokens of the row's prompt with placeholders expanded, read from the headers of its images. Raises
        `InvalidPrompt`, also for images whose files are cut.
        """
        conversation = prepared_rows.conversation_of(row)
        raw_ids = ids_of(self._pieces(self.shown(conversation)))
        for source in conversation.of_kind("image"):
            check_whole(source, row.get("media_root"))
        for source in conversation.of_kind("video"):
            check_files(source, row.get("media_root"))
        return self.length(conversation, raw_ids, row.get("media_root"))

    def prepare(self, row: Mapping[str, Any]) -> Prompt:
        """Prepares one row: images are decoded and processed. Raises `InvalidPrompt`; for a prompt that is too long, before
        images are decoded.
        """
        conversation, pieces, media = self._read(row)
        raw_ids = ids_of(pieces)
        ids, types = self.expand(raw_ids, self.placed(media))
        self.check_length(len(ids))
        return Prompt(ids, types, raw_ids, conversation, media, self.other_columns(row))

    def _read(self, row: Mapping[str, Any]) -> tuple[Conversation, list[Piece], tuple[ProcessedMedium, ...]]:
        """The conversation of a row, its tokens, and its media, which are processed unless the tokens are too many."""
        conversation, root = prepared_rows.conversation_of(row), row.get("media_root")
        frames = self.read_frames(conversation, root)
        pieces = self._pieces(self.shown(conversation, frames))
        self.check_length(self.length(conversation, ids_of(pieces), root))
        read = iter(frames)
        media = tuple(
            next(read) if frames and kind == "video" else self._processes[kind](source, root)
            for kind, source in zip(conversation.kinds(), conversation.media, strict=True)
        )
        return conversation, pieces, media

    def _pieces(self, conversation: Conversation) -> list[Piece]:
        """The tokens of a prompt."""
        self.check_content(conversation)
        ids = self.encode_text(self.render(conversation.messages, add_generation_prompt=True, tools=conversation.tools))
        self.check_placeholders(ids, conversation)
        return [(ids, False)]

    # Parts of a row

    def check_content(self, conversation: Conversation) -> None:
        """Raises `InvalidPrompt` if there are media that the model does not take, or the text contains media tokens."""
        for kind in dict.fromkeys(conversation.kinds()):
            self.check_taken(kind)
        for text in conversation.texts():
            for token in self._media_strings:
                if token in text:
                    raise InvalidPrompt(f"the text contains {token}, which only the chat template may write")

    def check_taken(self, kind: str) -> None:
        """Raises `InvalidPrompt` if the model takes no media of this kind, ``"image"``, ``"video"`` or ``"audio"``."""
        layout = self.family.media_layout
        taken = layout.names(kind) or (kind == "video" and self.family.frames_as_images)
        if not taken or kind not in self._processes:
            way_out = "show a video's frames as images" if kind == "video" else "take a model that hears"
            way_out = way_out if layout.names("image") else "they read only text"
            raise InvalidPrompt(f"models of type {self.family.model_type} take no {kind}s; {way_out}")

    def render(self, messages: Messages, add_generation_prompt: bool = False, tools: Sequence[Any] = ()) -> str:
        """The messages as text, by the chat template; ``tools`` replace those of ``template_arguments``. Raises `InvalidPrompt`
        with the template's error, if it does not read ``tools``, or if the text, such as a call's, is not Unicode: half of a
        character, as JSON's ``"\\ud83d"`` is one.
        """
        apart = [thoughts_apart(message) for message in messages]
        if apart != list(messages) and self._takes_thoughts_apart:
            messages = apart
        if tools and not self._reads_tools[0]:
            raise InvalidPrompt("the row has tools, but the chat template does not use 'tools': leave out the column")
        if any(message.get("tool_calls") for message in messages) and not self._reads_tools[1]:
            raise InvalidPrompt("a message has tool_calls, which the chat template does not write: take one that does")
        return self._rendered(messages, add_generation_prompt, tools)

    @cached_property
    def _reads_tools(self) -> tuple[bool, bool]:
        return reads_tools(self.tokenizer)

    @cached_property
    def _takes_thoughts_apart(self) -> bool:
        """Whether the template writes thoughts before an answer, and reads them in ``reasoning_content`` only, as Qwen3.8's."""

        def written(answer: Mapping[str, Any]) -> str:
            text = self._rendered([{"role": "user", "content": QUESTION}, answer])
            return text.partition(QUESTION)[2].partition(ANSWER)[0]

        begin, end = THOUGHTS
        answer = {"role": "assistant", "content": f"{begin}\n{THOUGHT}\n{end}\n\n{ANSWER}"}
        found = written(thoughts_apart(answer))
        return written(answer).count(begin) > found.count(begin) and THOUGHT in found

    def _rendered(self, messages: Messages, add_generation_prompt: bool = False, tools: Sequence[Any] = ()) -> str:
        if not self.family.vision_parts:
            messages = joined_texts(messages)
        elif self.family.typed_content:
            messages = [{**message, "content": as_parts(message["content"])} for message in messages]
        # Exception: errors of jinja, and those that templates raise
        with raised_as(InvalidPrompt, "the chat template refuses the messages", Exception), _TEXT:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_arguments | ({"tools": list(tools)} if tools else {}),
            )
        if half := _HALF.search(text):
            raise InvalidPrompt(
                f"the text has half of a character, {half[0]!a}, at place {half.start()}: it is not Unicode"
            )
        return str(text)

    def check_placeholders(self, ids: Sequence[int], conversation: Conversation) -> None:
        """Raises `InvalidPrompt` unless the ids have one placeholder for each medium."""
        kinds = conversation.kinds()
        for kind, placeholder in self.placeholders.items():
            if placeholder is not None and ids.count(placeholder) != kinds.count(kind):
                raise InvalidPrompt(
                    f"the chat template wrote {ids.count(placeholder)} {kind} placeholders for {kinds.count(kind)} "
                    f"{kind}s: the checkpoint needs a template that writes one for each"
                )

    @cached_property
    def placeholders(self) -> dict[str, int | None]:
        """For each kind of media the token that the chat template writes for one."""
        tokens = self.media_tokens
        return {"image": self.family.image_placeholder(self.config), "video": tokens.video, "audio": tokens.audio}

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text that already contains its special tokens."""
        with _TEXT:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def length(self, conversation: Conversation, raw_ids: Sequence[int], root: Any) -> int:
        """Number of tokens of a conversation, from the headers of its images. A video counts as one token until it is read."""
        length = len(raw_ids)
        for number, source in enumerate(conversation.of_kind("image")):
            height, width = image_size(source, root)
            length += self._image_length(height, width, number) - 1
        layout = self.family.media_layout
        for source in conversation.of_kind("audio"):
            samples = sound_samples(source, root, self.feature_extractor.sampling_rate)
            frames = {layout.names("audio")[-1]: [mel_frames(samples, self.feature_extractor)]}
            length += int(layout.grid_features(layout.grids("audio", frames, self.config), self.config)) - 1
        return length - self.family.joined_tokens(raw_ids, self.config, self.encode_text)

    def _image_length(self, height: int, width: int, number: int) -> int:
        """Number of tokens of an image of this size, and with this number: its placeholders and the texts around them."""
        processor, options = self.image_processor, self.image_options
        length = self.family.image_tokens(height, width, processor, options, self.config)
        for text in self.family.numbered(self.family.size_texts(height, width, processor, options), number):
            if text not in self._text_lengths:
                self._text_lengths[text] = len(self.encode_text(text))
            length += self._text_lengths[text]
        return length

    def check_length(self, length: int) -> None:
        """Raises `InvalidPrompt` if this number of tokens exceeds ``max_prompt_length``."""
        if length > self.max_prompt_length:
            limit = f"{self.limit_name}={self.max_prompt_length}"
            raise InvalidPrompt(f"the {self.counted} has {length} tokens, more than {limit}")

    @property
    def _processes(self) -> dict[str, Callable[[Any, Any], ProcessedMedium]]:
        """What makes the inputs of a source, by the kind of the medium."""
        found: dict[str, Callable[[Any, Any], ProcessedMedium]] = {
            "image": lambda source, root: self.process_image(self._decoded(source, root)),
            "video": self._process_video,
        }
        return found if self.feature_extractor is None else found | {"audio": self.process_sound}

    def process_sound(self, source: Any, root: Any = None) -> ProcessedSound:
        """Reads and processes a sound, see `load_sound`, of a model that hears."""
        sound = load_sound(source, root, self.feature_extractor.sampling_rate)
        return process_sound(sound, self.feature_extractor, self.family.media_layout)

    def _decoded(self, source: Any, root: Any) -> Image.Image:
        """As `load_image`; within a batch, images of equal bytes are decoded once."""
        encoded = encoded_image(source, root)
        if encoded is None:
            return load_image(source, root)
        return self._processed.once(blake2b(encoded, digest_size=32).digest(), lambda: load_image(source, root))

    def read_frames(self, conversation: Conversation, root: Any) -> tuple[ProcessedVideo, ...]:
        """The videos, if the prompt shows their frames as images: its text depends on them."""
        shows = self.family.frames_as_images
        return tuple(self._process_video(source, root) for source in conversation.of_kind("video")) if shows else ()

    def shown(self, conversation: Conversation, frames: Sequence[ProcessedVideo] = ()) -> Conversation:
        """The conversation as the chat template sees it. Videos of `frames_as_images` that are not read have no frames yet."""
        if not self.family.frames_as_images or "video" not in conversation.kinds():
            return conversation
        read = [(video.seconds, video.metadata.get("duration", video.seconds[-1])) for video in frames]
        unread: list[tuple[list[float], float]] = [([], 0.0)] * conversation.kinds().count("video")
        return conversation.with_frames([self.family.frame_captions(*each) for each in read or unread])

    def placed(self, media: Iterable[ProcessedMedium]) -> list[ProcessedMedium]:
        """What the prompt has placeholders for: in the place of a video whose frames are shown as images, these."""
        shown: list[ProcessedMedium] = []
        for each in media:
            shown += each.images if isinstance(each, ProcessedVideo) and self.family.frames_as_images else [each]
        return shown

    def expand(
        self, ids: Sequence[int], media: Sequence[ProcessedMedium], images_before: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Ids and token types ``(P,)`` of ids with one placeholder for each of the media, see `VLMFamily.expand`."""
        return self.family.expand(
            ids,
            [medium.inputs for medium in media],
            self.config,
            encode_text=self.encode_text,
            seconds=[medium.seconds for medium in media if isinstance(medium, ProcessedVideo)],
            images_before=images_before,
        )

    def process_image(self, image: Image.Image, options: Mapping[str, Any] | None = None) -> ProcessedImage:
        """Processes an RGB image. The result for an equal image is taken from the cache.

        Args:
            options: of the image processor, by default those of the builder's limits.

        Raises:
            InvalidMedia: the image processor refuses the image.
        """
        layout, options = self.family.media_layout, options or self.image_options
        key = image_key(image, self.image_processor, options)

        def make() -> dict[str, Tensor]:
            with raised_as(InvalidMedia, f"the image processor refuses an image of {image.size} pixels", ValueError):
                return layout.image_inputs(self.image_processor(images=[image], return_tensors="pt", **options))

        return ProcessedImage(key, image, self._processed.inputs(inputs_key(key, layout), make))

    def other_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a row except its messages and media."""
        return {name: value for name, value in row.items() if name not in prepared_rows.CONSUMED_COLUMNS}

    def _process_video(self, source: Any, root: Any) -> ProcessedVideo:
        if self.family.frames_as_images:  # as small as the family allows
            options = self.family.media_layout.processor_options(self.image_processor, None, 1)
            return process_frames(source, partial(self.process_image, options=options), root)
        own = source.get("audio") if isinstance(source, Mapping) else None
        if own is None:
            return process_video(source, self.image_processor, self.image_options, root)
        self.check_taken("audio")
        shown = {name: value for name, value in source.items() if name != "audio"}
        video, sound = self._process_video(shown, root), self.process_sound(own, root)
        return replace(video, key=video.key + sound.key, inputs=video.inputs | sound.inputs)

    # Many rows

    def collate(self, prompts: Sequence[Prompt]) -> DataProto:
        """The prompt batch: tensors left-padded to the longest prompt, all other values in object columns.

        Rows with the same images share tensors and PIL objects.
        """
        batch = prepared_rows.prompt_batch(prompts, self.pad_token_id, self.family, self.config)
        batch["uid"] = object_array(self.uids(prompts))
        return batch

    def uids(self, prompts: Sequence[Prompt]) -> list[Any]:
        """Each row's ``uid``. A row without one gets ``"<occurrence>-<digest of the row>"``, unique within this builder.

        The digest distinguishes rows of other builders: two builders give the same uid only to equal rows at the same occurrence.
        """
        uids = [prompt.columns.get("uid") for prompt in prompts]
        worker = get_worker_info()  # the seed of a `DataLoader`'s worker, new in each epoch, is part of the digest
        for place, prompt in enumerate(prompts):
            if uids[place] is None:
                uids[place] = f"{self.occurrences}-{prepared_rows.row_digest(prompt, worker.seed if worker else None)}"
                self.occurrences += 1
        return uids


def ids_of(pieces: Iterable[Piece]) -> list[int]:
    """The token ids of all pieces."""
    return [token for ids, _ in pieces for token in ids]
