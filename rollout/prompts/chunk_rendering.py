"""Chunks to tokens and images. Only here do image chunks become pixels and tokens.

The position of an image is that of its chunk; token ids are never searched for placeholders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataproto.chunks import Chunk, EncodedTextChunk, ImageChunk
from dataproto.errors import DataProtoError, InvalidChunk, InvalidPrompt, raised_as
from dataproto.vlm import media_grids
from rollout.image_features import RecentlyUsed
from rollout.prompts.image_processing import ProcessedImage
from rollout.prompts.images import load_image
from rollout.prompts.prompt_builder import PromptBuilder

Ids = npt.NDArray[np.int64]
Seen = RecentlyUsed[ProcessedImage] | dict[bytes, ProcessedImage]


class Part(NamedTuple):
    """The tokens of a chunk: ids and token types with one placeholder per feature of an image, and ids with one per image."""

    ids: Ids
    types: npt.NDArray[np.int8]
    raw_ids: list[int]
    is_image: bool


@dataclass(frozen=True)
class TokenSequence:
    """The L tokens of a model input, with one placeholder per feature of an image, and its images in order."""

    input_ids: Tensor  # (L,) int64
    token_types: Tensor  # (L,) int8
    images: tuple[ProcessedImage, ...]
    prompt_ids: tuple[int, ...] = ()  # with one placeholder for each image

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class PlacedSequence(TokenSequence):
    """A sequence with its positions ``(4, L)`` or ``(L,)``."""

    position_ids: Tensor = field(kw_only=True)


class ChunkRenderer:
    """Sequences of `dataproto.chunks` to tokens and images.

    An image chunk becomes the tokens by which the model's processor replaces a placeholder.
    """

    def __init__(self, builder: PromptBuilder) -> None:
        """``builder`` has the tokenizer and the image processor."""
        self.builder = builder
        self._placeholder = builder.family.image_placeholder(builder.config)
        self._vocabulary = int(builder.config.get_text_config().vocab_size)

    def sequence(self, chunks: Sequence[Chunk], seen: Seen) -> TokenSequence:
        """One sequence, with images from ``seen`` where it has them; other images are added.

        Args:
            seen: images by the digests of their files, such as `images_by_content` has, or an empty dict.

        Raises:
            InvalidChunk: a chunk cannot be rendered, or is not of its claimed size; names its number.
            InvalidPrompt: there is no token.
        """
        images: list[ProcessedImage] = []
        parts: list[Part] = []
        for number, chunk in enumerate(chunks):
            kind = getattr(chunk, "type", type(chunk).__name__)
            with raised_as(InvalidChunk, f"chunk {number} ({kind})", DataProtoError):
                if isinstance(chunk, EncodedTextChunk):
                    parts.append(self._text(chunk))
                elif isinstance(chunk, ImageChunk):
                    image = self._image(chunk, seen)
                    parts.append(self._image_tokens(image, chunk.expected_tokens))
                    images.append(image)
                else:
                    raise InvalidChunk("only text and images are known")
        self._check_neighbours(parts)
        if not any(len(part.ids) for part in parts):
            raise InvalidPrompt("its model input is empty")
        ids, types = (torch.from_numpy(np.concatenate(column)) for column in list(zip(*parts, strict=True))[:2])
        return TokenSequence(ids, types, tuple(images), tuple(_raw_ids(parts)))

    def placed(self, sequences: Sequence[TokenSequence]) -> list[PlacedSequence]:
        """The sequences with their positions, computed for all of them at once."""
        if not sequences:
            return []
        types = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int8)
        mask = torch.zeros_like(types, dtype=torch.int64)
        for row, one in enumerate(sequences):
            types[row, : len(one)], mask[row, : len(one)] = one.token_types, 1
        grids = media_grids([tuple(image.inputs for image in one.images) for one in sequences])
        positions = self.builder.family.position_ids(types, mask, **grids, config=self.builder.config)
        return [
            PlacedSequence(**vars(one), position_ids=positions[row, ..., : len(one)].clone())
            for row, one in enumerate(sequences)
        ]

    def _check_neighbours(self, parts: Sequence[Part]) -> None:
        """Raises `InvalidChunk` if the model's tokenizer would join the text around an image with the tokens next to it: the
        tokens of a chunk are kept as they are, so the model would read other tokens than in a prompt of messages.
        """
        family, config, place = self.builder.family, self.builder.config, 0
        ids = _raw_ids(parts)
        for number, part in enumerate(parts):
            beside = ids[max(place - 1, 0) : place + 2]
            if part.is_image and family.joined_tokens(beside, config, self.builder.encode_text):
                raise InvalidChunk(
                    f"chunk {number} is an image, and models of type {family.model_type} join the line breaks around it with "
                    "those next to it in one token: leave them out of the chunks next to it, or make such prompts with a "
                    "PromptBuilder"
                )
            place += len(part.raw_ids)

    def _text(self, chunk: EncodedTextChunk) -> Part:
        ids = chunk.ids()
        if ids.size and ids.view(np.uint64).max() >= self._vocabulary:  # negative ones too
            place = int(np.argmax((ids < 0) | (ids >= self._vocabulary)))
            raise InvalidChunk(f"token {place} is {ids[place]}, but the model has tokens 0 to {self._vocabulary - 1}")
        return Part(ids, np.zeros(len(ids), dtype=np.int8), ids.tolist(), False)

    def _image(self, chunk: ImageChunk, seen: Seen) -> ProcessedImage:
        self.builder.check_taken("image")
        if self.builder.family.numbers_images:
            raise InvalidChunk(
                f"models of type {self.builder.family.model_type} number the images of a prompt, and a chunk does not tell its "
                "number: make such prompts with a PromptBuilder"
            )
        data = bytes(chunk.data)
        key = blake2b(data, digest_size=32).digest()
        if (found := seen.get(key)) is None:
            seen[key] = found = self.builder.process_image(load_image(data))
        return found

    def _image_tokens(self, image: ProcessedImage, expected: int | None) -> Part:
        raw_ids = [] if self._placeholder is None else [self._placeholder]
        ids, types = self.builder.expand(raw_ids, [image])
        if expected is not None and expected != len(ids):
            width, height = image.image.size
            raise InvalidChunk(f"expected_tokens={expected}, but its {width} x {height} pixels make {len(ids)} tokens")
        return Part(ids, types, raw_ids, True)


def _raw_ids(parts: Sequence[Part]) -> list[int]:
    return [token for part in parts for token in part.raw_ids]
