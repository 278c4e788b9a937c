"""Chunks to prompt batches and training batches. Only here do image chunks become pixels and tokens.

The position of an image is that of its chunk; token ids are never searched for placeholders. Letters: B rows, L tokens of the
longest row, R = L - 1.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataproto import DataProto, RaggedTensor
from dataproto.chunks import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    read_datum,
    read_model_input,
)
from dataproto.collation import pad_rows
from dataproto.errors import DataProtoError, InvalidChunk, InvalidMedia, InvalidPrompt, InvalidRow
from dataproto.vlm import media_grids
from rollout.prompts.conversations import collate_rows
from rollout.prompts.image_processing import ProcessedImage
from rollout.prompts.images import load_image
from rollout.prompts.messages import Conversation
from rollout.prompts.prepared_rows import Prompt
from rollout.prompts.prompt_builder import PromptBuilder

Resolver = Callable[[str], bytes]
"""Maps the ``location`` of an `ImageAssetPointerChunk` to the bytes of its file."""

Ids = npt.NDArray[np.int64]

COLUMN_OF = {"weights": "loss_weights", "logprobs": "rollout_log_probs", "advantages": "advantages"}
"""Columns of loss inputs. ``target_tokens`` are the tokens themselves, and ``mask`` becomes ``response_mask``."""

SETTINGS = ("clip_low_threshold", "clip_high_threshold")
"""Loss inputs that say nothing of whether a token is learned. They are columns of the same name."""


class Part(NamedTuple):
    """The tokens of a chunk: ids and, for an image, token types, with one placeholder per feature."""

    ids: Ids
    types: npt.NDArray[np.int8] | None = None


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
    """Model inputs and data, of `dataproto.chunks` or of the ``tinker`` package, to batches.

    An image chunk becomes the tokens by which the model's processor replaces a placeholder. Images with equal bytes are decoded
    and processed once per batch.
    """

    def __init__(self, builder: PromptBuilder, resolve: Resolver | None = None) -> None:
        """``builder`` has the tokenizer, the image processor and the limits; ``resolve`` fetches assets. Without it, assets are
        refused.
        """
        self.builder = builder
        self.resolve = resolve
        self._placeholder = builder.family.image_placeholder(builder.config)
        self._vocabulary = int(builder.config.get_text_config().vocab_size)
        self._known = np.ones(self._vocabulary, dtype=bool)
        self._known[list(builder.family.banned_ids(builder.config))] = False

    def length(self, model_input: Any) -> int:
        """Number of tokens of a model input, images included. Raises `InvalidChunk`."""
        return len(self.token_ids(model_input))

    def token_ids(self, model_input: Any) -> list[int]:
        """Tokens of a model input, with one placeholder per feature of an image. Raises `InvalidChunk`."""
        parts, _ = self._parts(model_input, {})
        ids: list[int] = _joined(parts)[0].tolist()
        return ids

    def sequence(self, model_input: Any, seen: MutableMapping[Any, ProcessedImage]) -> TokenSequence:
        """One model input, with images from ``seen`` where it has them; other images are added.

        Args:
            seen: images by the bytes of their files, such as a `ContentStore`.

        Raises:
            InvalidChunk: a chunk cannot be rendered, or is not of its claimed size; names its number.
            InvalidPrompt: the input is empty.
        """
        parts, images = self._parts(model_input, seen)
        ids, types = (torch.from_numpy(values.copy()) for values in _joined(parts))
        if not len(ids):
            raise InvalidPrompt("its model input is empty")
        return TokenSequence(ids, types, images, tuple(self._raw_ids(parts)))

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

    # For engines

    def prompts(self, inputs: Sequence[Any]) -> DataProto:
        """The prompt batch of model inputs, with the columns of `PromptBuilder.collate`.

        Raises:
            InvalidRow: an input cannot be rendered, is too long, or is empty; names its number and the chunk.
        """
        seen: dict[Any, ProcessedImage] = {}
        prompts = [self._numbered(number, self._prompt, value, seen) for number, value in enumerate(inputs)]
        return self.builder.collate(prompts)

    def _prompt(self, model_input: Any, seen: MutableMapping[Any, ProcessedImage]) -> Prompt:
        parts, images = self._parts(model_input, seen)
        ids, types = _joined(parts)
        image = self._placeholder
        raw_ids = self._raw_ids(parts)
        if image is not None and raw_ids.count(image) != len(images):
            raise InvalidPrompt(
                f"its text chunks contain token {image}, the placeholder of an image: engines would expect one more image"
            )
        if not len(ids):
            raise InvalidPrompt("it is empty: there is nothing to continue")
        self.builder.check_length(len(ids))
        return Prompt(ids, types, raw_ids, Conversation([], [], []), images, (), {})

    def _raw_ids(self, parts: Sequence[Part]) -> list[int]:
        """Tokens with one placeholder for each image."""
        image = self._placeholder
        one = [] if image is None else [image]
        return [token for part in parts for token in (part.ids.tolist() if part.types is None else one)]

    # For training

    def rows(self, data: Sequence[Any]) -> DataProto:
        """The training batch of data. A row consists of the input of its datum, followed by the last target.

        In addition to the columns of `collate_rows`, ``weights``, ``logprobs`` and ``advantages`` become ``loss_weights``,
        ``rollout_log_probs`` and ``advantages`` ``(B, R)`` float32, and the thresholds of clipping columns of their own names;
        element i of a loss input is in column i. ``response_mask`` is ``mask``, or without a mask 1 where ``weights``,
        ``logprobs`` or ``advantages`` are not 0. Text tokens may have any id, because token types mark images. The column
        ``targets`` exists only if some target is not the next token of its sequence.

        Raises:
            InvalidRow: a datum cannot be rendered, a loss input does not have one number per token, or a masked-in target is a
                token that the policy never samples; names its number.
        """
        seen: dict[Any, ProcessedImage] = {}
        rows, inputs = zip(*(self._numbered(number, self._row, value, seen) for number, value in enumerate(data)))
        names = inputs[0].keys()
        for number, found in enumerate(inputs):
            if found.keys() != names:
                raise InvalidRow(number, f"its loss inputs are {sorted(found)}, those of row 0 {sorted(names)}")
        flat = {name: np.concatenate([found[name] for found in inputs]) for name in names}
        lengths = np.array([len(found["target_tokens"]) for found in inputs])
        mask = self._mask(flat, lengths)
        flat_mask = np.zeros(len(mask) + len(rows), dtype=np.uint8)  # the first token of a row is no target
        flat_mask[_not_first(lengths + 1)] = mask
        batch = collate_rows(
            self.builder,
            rows,
            RaggedTensor(torch.from_numpy(flat_mask), lengths + 1),
            {"uid": self.builder.uids(rows)},
        )
        columns = {COLUMN_OF.get(name, name): flat[name] for name in (*COLUMN_OF, *SETTINGS) if name in names}
        if np.any(np.concatenate([row.input_ids[1:] for row in rows]) != flat["target_tokens"]):
            columns["targets"] = flat["target_tokens"]
        width = batch["response_mask"].shape[1]
        for column, values in columns.items():
            batch[column] = pad_rows(RaggedTensor(torch.from_numpy(values), lengths), width, 0)[0]
        return batch

    def _row(self, value: Any, seen: MutableMapping[Any, ProcessedImage]) -> tuple[Prompt, dict[str, npt.NDArray[Any]]]:
        """The sequence with its last target appended, and the loss inputs."""
        datum = read_datum(value)
        inputs = dict(datum.loss_fn_inputs)
        if "target_tokens" not in inputs:
            raise InvalidPrompt("its loss_fn_inputs lack 'target_tokens'")
        parts, images = self._parts(datum.model_input, seen)
        tokens = sum(len(part.ids) for part in parts)
        for name, values in inputs.items():
            if len(values) != tokens:
                raise InvalidPrompt(f"loss_fn_inputs[{name!r}] has {len(values)} numbers for {tokens} input tokens")
        if not tokens:
            raise InvalidPrompt("its model input is empty")
        ids, types = _joined([*parts, Part(inputs["target_tokens"][-1:])])
        return Prompt(ids, types, [], Conversation([], [], []), images, (), {}), inputs

    def _mask(self, flat: dict[str, npt.NDArray[Any]], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which targets of all rows are learned. Raises `InvalidRow` if the policy has no log-prob for one of them."""
        targets = flat["target_tokens"]
        mask = np.zeros(len(targets), dtype=bool)
        for name in ("mask",) if "mask" in flat else COLUMN_OF:
            if name in flat:
                mask |= flat[name] != 0
        inside = (targets >= 0) & (targets < self._vocabulary)
        wrong = np.flatnonzero(mask & ~(inside & self._known[np.where(inside, targets, 0)]))
        if wrong.size:
            ends = np.cumsum(lengths)
            row = int(np.searchsorted(ends, wrong[0], side="right"))
            raise InvalidRow(
                row,
                f"target_tokens[{wrong[0] - ends[row] + lengths[row]}] = {targets[wrong[0]]} is no token of the model, or is a "
                "media token: the policy gives it no log-prob, so its mask (weight, advantage, logprob) must be 0",
            )
        return mask

    # One input

    def _parts(
        self, value: Any, seen: MutableMapping[Any, ProcessedImage]
    ) -> tuple[list[Part], tuple[ProcessedImage, ...]]:
        images: list[ProcessedImage] = []
        parts: list[Part] = []
        for number, chunk in enumerate(read_model_input(value).chunks):
            try:
                if isinstance(chunk, EncodedTextChunk):
                    parts.append(self._text(chunk))
                else:
                    image = self._image(chunk, seen)
                    parts.append(self._image_tokens(image, chunk.expected_tokens))
                    images.append(image)
            except DataProtoError as error:
                raise InvalidChunk(f"chunk {number} ({chunk.type}): {error}") from error
        self._check_neighbours(parts)
        return parts, tuple(images)

    def _check_neighbours(self, parts: Sequence[Part]) -> None:
        """Raises `InvalidChunk` if the model's tokenizer would join the text around an image with the tokens next to it: the
        tokens of a chunk are kept as they are, so the model would read other tokens than in a prompt of messages.
        """
        family, config, place = self.builder.family, self.builder.config, 0
        ids = self._raw_ids(parts)
        for number, part in enumerate(parts):
            beside = ids[max(place - 1, 0) : place + 2]
            if part.types is not None and family.joined_tokens(beside, config, self.builder.encode_text):
                raise InvalidChunk(
                    f"chunk {number} is an image, and models of type {family.model_type} join the line breaks around it with "
                    "those next to it in one token: leave them out of the chunks next to it, or make such prompts with a "
                    "PromptBuilder"
                )
            place += len(part.ids) if part.types is None else 1

    def _text(self, chunk: EncodedTextChunk) -> Part:
        ids = chunk.ids()
        if ids.size and ids.view(np.uint64).max() >= self._vocabulary:  # negative ones too
            place = int(np.argmax((ids < 0) | (ids >= self._vocabulary)))
            raise InvalidChunk(f"token {place} is {ids[place]}, but the model has tokens 0 to {self._vocabulary - 1}")
        return Part(ids)

    def _image(
        self, chunk: ImageChunk | ImageAssetPointerChunk, seen: MutableMapping[Any, ProcessedImage]
    ) -> ProcessedImage:
        self.builder.check_taken("image")
        if self.builder.family.numbers_images:
            raise InvalidChunk(
                f"models of type {self.builder.family.model_type} number the images of a prompt, and a chunk does not tell its "
                "number: make such prompts with a PromptBuilder"
            )
        key = bytes(chunk.data) if isinstance(chunk, ImageChunk) else chunk.location
        if key not in seen:
            data = chunk.data if isinstance(chunk, ImageChunk) else self._fetch(chunk)
            seen[key] = self.builder.process_image(load_image(bytes(data)))
        return seen[key]

    def _fetch(self, chunk: ImageAssetPointerChunk) -> bytes:
        if self.resolve is None:
            raise InvalidMedia(f"asset {chunk.location!r} cannot be fetched: give the renderer a resolver")
        try:
            data = self.resolve(chunk.location)
        except DataProtoError:
            raise
        except Exception as error:  # the user's function may raise any error
            raise InvalidMedia(f"asset {chunk.location!r} cannot be fetched: {error}") from error
        return bytes(ImageChunk(data, chunk.format).data)

    def _image_tokens(self, image: ProcessedImage, expected: int | None) -> Part:
        placeholder = self._placeholder
        ids, types = self.builder.family.expand(
            [] if placeholder is None else [placeholder],
            [image.inputs],
            self.builder.config,
            encode_text=self.builder.encode_text,
        )
        if expected is not None and expected != len(ids):
            width, height = image.image.size
            raise InvalidChunk(f"expected_tokens={expected}, but its {width} x {height} pixels make {len(ids)} tokens")
        return Part(ids, types)

    def _numbered(
        self, number: int, render: Callable[..., Any], value: Any, seen: MutableMapping[Any, ProcessedImage]
    ) -> Any:
        try:
            return render(value, seen)
        except DataProtoError as error:
            raise InvalidRow(number, str(error)) from error


def _not_first(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """A mask over consecutive rows of these lengths that is true except at the first element of each row."""
    places = np.ones(int(lengths.sum()), dtype=bool)
    places[np.cumsum(lengths) - lengths] = False
    return places


def _joined(parts: Sequence[Part]) -> tuple[Ids, npt.NDArray[np.int8]]:
    """Concatenated ids and token types."""
    ids = np.concatenate([part.ids for part in parts]) if parts else np.zeros(0, np.int64)
    types = np.zeros(len(ids), dtype=np.int8)
    place = 0
    for part in parts:
        if part.types is not None:
            types[place : place + len(part.ids)] = part.types
        place += len(part.ids)
    return ids, types
