"""Inputs of a model as chunks of tokens and images, with the inputs of a loss.

Names and meaning are those of the public ``tinker`` package. Its objects are accepted: `read_model_input` and `read_datum` look
at attributes, not at classes. This module neither decodes an image nor counts its tokens; `rollout.prompts` does.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dataproto.errors import InvalidChunk, InvalidColumn

ImageFormat: TypeAlias = Literal["png", "jpeg"]
_SIGNATURES: dict[str, bytes] = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}

LOSS_INPUTS: dict[str, type] = {
    "target_tokens": np.int64,
    "weights": np.float32,
    "logprobs": np.float32,
    "advantages": np.float32,
    "mask": np.float32,
    "clip_low_threshold": np.float32,
    "clip_high_threshold": np.float32,
}
"""The names and dtypes of ``Datum.loss_fn_inputs``."""


@dataclass(frozen=True)
class EncodedTextChunk:
    """Token ids."""

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    @property
    def length(self) -> int:
        return len(self.tokens)

    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens as ``(n,)`` int64. Raises `InvalidChunk` if they are not whole numbers."""
        try:
            if isinstance(self.tokens, list | tuple):
                return np.frombuffer(struct.pack(f"{len(self.tokens)}q", *self.tokens), dtype=np.int64)
            ids: npt.NDArray[np.int64] = np.asarray(self.tokens).astype(np.int64, casting="same_kind", copy=False)
        except (TypeError, OverflowError, struct.error) as error:
            raise InvalidChunk(f"its tokens are no whole numbers: {error}") from error
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
    format: ImageFormat
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    def __post_init__(self) -> None:
        _check_format(self.format)
        if not isinstance(self.data, bytes | bytearray | memoryview):
            raise InvalidChunk(f"its data are the bytes of a {self.format} file, not {type(self.data).__name__}")
        if bytes(self.data[:8])[: len(_SIGNATURES[self.format])] != _SIGNATURES[self.format]:
            raise InvalidChunk(f"its data are not those of a {self.format} file")

    @property
    def length(self) -> int:
        return _expected(self.expected_tokens)


@dataclass(frozen=True)
class ImageAssetPointerChunk:
    """An image stored elsewhere; the renderer decides how to load ``location``."""

    format: ImageFormat
    location: str
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    def __post_init__(self) -> None:
        _check_format(self.format)

    @property
    def length(self) -> int:
        return _expected(self.expected_tokens)


Chunk: TypeAlias = EncodedTextChunk | ImageChunk | ImageAssetPointerChunk


@dataclass(frozen=True)
class ModelInput:
    """A sequence of chunks. An image is exactly where its chunk is; the text chunks hold any tokens around it.

    >>> ModelInput([EncodedTextChunk([5, 6]), ImageAssetPointerChunk("png", "a.png", expected_tokens=4)]).length
    6
    """

    chunks: Sequence[Chunk]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> "ModelInput":
        return cls([EncodedTextChunk(tokens)])

    @property
    def length(self) -> int:
        """The number of tokens. Raises `InvalidChunk` if an image has no ``expected_tokens``."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True)
class Datum:
    """A sequence and the inputs of its loss: one number a token each, under the names of `LOSS_INPUTS`.

    Position i of the input predicts ``target_tokens[i]``, which usually is token i + 1 of the same sequence.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict)  # Lists, arrays, tensors, or tinker's TensorData.


def read_model_input(value: Any) -> ModelInput:
    """Returns a `ModelInput` of this module for one of this module or of the ``tinker`` package.

    Raises:
        InvalidChunk: a chunk is of another type, or broken; names it. No chunk is skipped.

    >>> from types import SimpleNamespace as Foreign
    >>> read_model_input(Foreign(chunks=[Foreign(type="encoded_text", tokens=[5, 6])]))
    ModelInput(chunks=[EncodedTextChunk(tokens=[5, 6], type='encoded_text')])
    """
    chunks = getattr(value, "chunks", None)
    if not isinstance(chunks, Sequence):
        raise InvalidChunk(f"a model input is a sequence of chunks, not {type(value).__name__}")
    if isinstance(value, ModelInput) and all(isinstance(chunk, Chunk) for chunk in chunks):
        return value
    return ModelInput([_read_chunk(chunk, number) for number, chunk in enumerate(chunks)])


def _read_chunk(chunk: Any, number: int) -> Chunk:
    if isinstance(chunk, Chunk):
        return chunk
    kind = getattr(chunk, "type", None)
    try:
        if kind == "encoded_text":
            return EncodedTextChunk(chunk.tokens)
        if kind == "image":
            return ImageChunk(chunk.data, chunk.format, getattr(chunk, "expected_tokens", None))
        if kind == "image_asset_pointer":
            return ImageAssetPointerChunk(chunk.format, chunk.location, getattr(chunk, "expected_tokens", None))
    except InvalidChunk as error:
        raise InvalidChunk(f"chunk {number} ({kind}): {error}") from error
    raise InvalidChunk(f"chunk {number} is of type {kind or type(chunk).__name__!r}: only text and images are known")


def read_datum(value: Any) -> Datum:
    """Returns a `Datum` of this module, with 1-D arrays of the dtypes of `LOSS_INPUTS`, for one of this module or of ``tinker``.

    Raises:
        InvalidChunk: see `read_model_input`.
        InvalidColumn: a loss input is unknown, or is not one finite number a token; names it.

    >>> read_datum(Datum(ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7]})).loss_fn_inputs
    {'target_tokens': array([6, 7])}
    """
    inputs = getattr(value, "loss_fn_inputs", None)
    if not isinstance(inputs, Mapping):
        raise InvalidColumn(f"a datum holds model_input and loss_fn_inputs, not {type(value).__name__}")
    return Datum(
        read_model_input(value.model_input), {name: _numbers(name, numbers) for name, numbers in inputs.items()}
    )


def _numbers(name: str, value: Any) -> npt.NDArray[Any]:
    if name not in LOSS_INPUTS:
        raise InvalidColumn(f"loss_fn_inputs[{name!r}] is unknown: there may be {', '.join(LOSS_INPUTS)}")
    dtype = LOSS_INPUTS[name]
    try:
        found = (
            _packed(value, dtype)
            if type(value) is list
            else np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
        )
    except (TypeError, ValueError) as error:
        raise InvalidColumn(f"loss_fn_inputs[{name!r}] holds no numbers: {error}") from error
    whole = found.dtype.kind in "iub" or (found.size == 0 and found.ndim == 1)
    if found.ndim != 1 or not (whole or (found.dtype.kind == "f" and dtype is np.float32)):
        raise InvalidColumn(
            f"loss_fn_inputs[{name!r}] is one number of {np.dtype(dtype)} a token, not {found.dtype} of shape {found.shape}"
        )
    with np.errstate(over="ignore"):
        found = found.astype(dtype, copy=False)
    if not np.isfinite(found).all():
        raise InvalidColumn(f"loss_fn_inputs[{name!r}][{int(np.argmin(np.isfinite(found)))}] is not finite")
    return found


def _packed(numbers: list[Any], dtype: type) -> npt.NDArray[Any]:
    """A list as an array; the fastest way if it holds numbers of this dtype."""
    try:
        code = "q" if dtype is np.int64 else "f"
        return np.frombuffer(struct.pack(f"{len(numbers)}{code}", *numbers), dtype=dtype)
    except (struct.error, OverflowError):
        return np.asarray(numbers)


def _check_format(name: str) -> None:
    if name not in _SIGNATURES:
        raise InvalidChunk(f"its format {name!r} is unknown: {' or '.join(_SIGNATURES)}")


def _expected(tokens: int | None) -> int:
    if tokens is None:
        raise InvalidChunk("an image without expected_tokens has no length before it is rendered")
    return tokens
