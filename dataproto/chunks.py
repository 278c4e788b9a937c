"""Inputs of a model as chunks of tokens and images, with the names of the public ``tinker`` package.

An image is exactly where its chunk is; the text chunks hold any tokens around it. This module neither decodes an image nor counts
its tokens; `rollout.prompts` does.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dataproto.errors import InvalidChunk, raised_as

_SIGNATURES: dict[str, bytes] = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}


@dataclass(frozen=True)
class EncodedTextChunk:
    """Token ids."""

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens as ``(n,)`` int64. Raises `InvalidChunk` if they are not whole numbers."""
        with raised_as(InvalidChunk, "its tokens are no whole numbers", TypeError, OverflowError, struct.error):
            if isinstance(self.tokens, list | tuple):
                return np.frombuffer(struct.pack(f"{len(self.tokens)}q", *self.tokens), dtype=np.int64)
            ids: npt.NDArray[np.int64] = np.asarray(self.tokens).astype(np.int64, casting="same_kind", copy=False)
        if ids.ndim != 1:
            raise InvalidChunk(f"its tokens have shape {ids.shape}, not (tokens,)")
        return ids


@dataclass(frozen=True)
class ImageChunk:
    """An image as the bytes of a file.

    Args:
        expected_tokens: the number of tokens that the sender counts; rendering fails if it is another.
    """

    data: bytes = field(repr=False)
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    def __post_init__(self) -> None:
        if self.format not in _SIGNATURES:
            raise InvalidChunk(f"its format {self.format!r} is unknown: {' or '.join(_SIGNATURES)}")
        if not isinstance(self.data, bytes | bytearray | memoryview):
            raise InvalidChunk(f"its data are the bytes of a {self.format} file, not {type(self.data).__name__}")
        if bytes(self.data[:8])[: len(_SIGNATURES[self.format])] != _SIGNATURES[self.format]:
            raise InvalidChunk(f"its data are not those of a {self.format} file")


Chunk: TypeAlias = EncodedTextChunk | ImageChunk
