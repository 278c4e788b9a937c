"""`PromptLayout`: how a family of models writes media into prompts, as tokens with positions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataproto.columns import RowMedia, media_parts
from dataproto.errors import InvalidMedia, MediaMismatch
from dataproto.vlm.costs import join_grids
from dataproto.vlm.media import PATCH_GRIDS, DistinctMedia, Ids, MediaLayout, Options, distinct_media, split_media
from dataproto.vlm.positions import TOKEN_TYPES, Pieces, extend_positions, mrope_positions, text_positions

EncodeText = Callable[[str], Sequence[int]]
"""A text to its token ids."""
_MEDIA_TOKENS = (
    *(f"{kind}_token_id" for kind in ("image", "video", "audio", "boi", "eoi", "boa")),
    *(f"{kind}_{end}_token_id" for kind in ("vision", "image", "video", "audio") for end in ("start", "end")),
    "eoa_token_index",
)
"""What configs call placeholders and the tokens that enclose them. A config has some of them."""


@dataclass(frozen=True)
class MediaTokens:
    """Ids of the placeholder tokens of media and of the tokens that enclose them."""

    image: int | None
    video: int | None = None
    vision_start: int | None = None
    vision_end: int | None = None
    audio: int | None = None

    def of(self, kind: str) -> int | None:
        """The placeholder of media of a kind."""
        placeholder: int | None = getattr(self, kind)
        return placeholder


class PromptLayout:
    """The part of `VLMFamily` that makes tokens, positions and joined media, from a config and without a model.

    Letters: B rows, L tokens (of prompts P, of responses R).
    """

    media_layout: MediaLayout = PATCH_GRIDS
    """How images and videos are laid out in the arguments of the model's forward."""
    image_text: tuple[str, str] = ("", "")
    """Special tokens, as text, that the processor puts before and after the placeholders of an image. Empty if the chat template
    writes them.
    """
    processor_tokens: tuple[str, ...] = ()
    """Further special tokens, as text, that the processor writes around and between the parts of an image."""
    typed_content: bool = False
    """The chat template reads only lists of parts: of content that is a string it would write nothing."""
    mrope: bool = True
    """Positions are ``(B, 4, L)``: text, time, height, width. If false, they are ``(B, L)``: ranks of tokens."""
    videos_by_frame: bool = False
    """In token ids a video is a sequence of frames, each with start and end tokens, after a text that states its time."""
    numbers_images: bool = False
    """The text around an image has its number in the prompt, see `numbered`."""
    frames_as_images: bool = False
    """A video's frames are images among the others, between the texts of `frame_captions`; no input is only of videos."""

    # Tokens

    def media_tokens(self, config: Any) -> MediaTokens:
        """Ids of the placeholders and enclosing tokens that the config has."""
        return MediaTokens(
            image=config.image_token_id,
            video=getattr(config, "video_token_id", None),
            vision_start=getattr(config, "vision_start_token_id", None),
            vision_end=getattr(config, "vision_end_token_id", None),
        )

    def banned_ids(self, config: Any) -> tuple[int, ...]:
        """Ids that the policy never samples, ascending: a sampled placeholder has no medium that belongs to it."""
        found = {getattr(config, name, None) for name in _MEDIA_TOKENS}
        return tuple(sorted(token for token in found if token is not None))

    def token_types(self, input_ids: Tensor, config: Any) -> Tensor:
        """Types int8 of the tokens of prompts, in their shape: 0 text, 1 image, 2 video, 3 sound."""
        tokens = self.media_tokens(config)
        types = torch.zeros_like(input_ids, dtype=torch.int8)
        for name, kind in TOKEN_TYPES.items():
            if (token := tokens.of(name)) is not None:
                types += (input_ids == token).to(torch.int8) * kind
        return types

    def merge_size(self, config: Any) -> int:
        """Patches along each side of a merged feature."""
        return self.media_layout.merge_size(config)

    def image_tokens(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """Number of placeholder tokens of an image of this size in pixels, if the image processor runs with ``options`` (see
        `MediaLayout.processor_options`). Raises `InvalidMedia` for a size that the processor refuses.
        """
        if min(height, width) <= 0:
            raise InvalidMedia(f"image of height {height} and width {width} is empty")
        return self.media_layout.count_image_features(height, width, processor, options, config)

    def image_texts(self, media: Mapping[str, Any], config: Any) -> list[tuple[str, ...]]:
        """For each image of ``media`` (``multi_modal_inputs``) the texts that the processor puts before, between and after its
        n runs of placeholders: n + 1 texts. Default: `image_text` around one run.
        """
        return [self.image_text] * len(self.media_layout.feature_counts("image", media, config))

    def size_texts(self, height: int, width: int, processor: Any, options: Options) -> tuple[str, ...]:
        """`image_texts` of an image of this size in pixels."""
        return self.image_text

    def run_counts(self, media: Mapping[str, Any], config: Any) -> Ids:
        """Number of placeholders of each run, of one image after another. Default: all runs of an image are equally long."""
        runs = np.array([len(texts) - 1 for texts in self.image_texts(media, config)], dtype=np.int64)
        return np.repeat(self.media_layout.feature_counts("image", media, config) // runs, runs)

    def numbered(self, texts: Sequence[str], number: int) -> tuple[str, ...]:
        """The `image_texts` of the image that is number ``number`` of its prompt, from 0. Default: the same for all."""
        return tuple(texts)

    def frame_captions(self, seconds: Sequence[float], duration: float) -> list[str]:
        """For a video of n frames at these times, n + 1 texts before, between and after its frames. Only called if
        `frames_as_images`.
        """
        raise NotImplementedError

    def image_placeholder(self, config: Any) -> int | None:
        """The token that the chat template writes for an image. Default: the one of `media_tokens`, which `expand` repeats."""
        return self.media_tokens(config).image

    def expand(
        self,
        ids: Sequence[int] | Ids,
        media: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        config: Any,
        *,
        encode_text: EncodeText | None = None,
        seconds: Sequence[Sequence[float]] | None = None,
        images_before: int = 0,
    ) -> tuple[Ids, np.ndarray[Any, np.dtype[np.int8]]]:
        """Replace the one placeholder of each medium by one placeholder per feature.

        Args:
            media: the row's ``multi_modal_inputs``, or a list with those of each image and video. Some families need the list,
                because the joined inputs do not tell where an image ends.
            encode_text: text to ids without added special tokens. Required by families with `image_text` or `videos_by_frame`.
            seconds: ``seconds[video][frame]``, see `frame_seconds`. Required for videos by families with `videos_by_frame`.
            images_before: number of images of the prompt before these ids, for families with `numbers_images`.

        Returns:
            Ids ``(P,)`` int64 and token types ``(P,)`` int8.

        Raises:
            MediaMismatch: placeholders and media do not agree, or a required argument is missing.
        """
        tokens, parts = self.media_tokens(config), [media] if isinstance(media, Mapping) else media
        expanded = np.asarray(ids, dtype=np.int64)
        counts = {kind: self._counts(kind, parts, config) for kind in TOKEN_TYPES}
        if self.videos_by_frame and len(videos := counts["video"]):
            grids = np.concatenate([np.asarray(self.media_layout.grids("video", part, config)) for part in parts])
            expanded = split_videos(expanded, tokens, frame_texts(grids, encode_text, seconds))
            counts["video"] = np.repeat(videos // grids[:, 0], grids[:, 0])
        if any(self.image_text) and len(counts["image"]) and tokens.image is not None:
            if encode_text is None:
                raise MediaMismatch("an image of this family needs `encode_text`: text around it is part of the prompt")
            texts = [image for part in parts for image in self.image_texts(part, config)]
            texts = [self.numbered(image, images_before + number) for number, image in enumerate(texts)]
            expanded = self.place_texts(expanded, texts, config, encode_text)
            counts["image"] = np.concatenate([self.run_counts(part, config) for part in parts])
        return expand_ids(expanded, tokens, counts)

    def place_texts(self, ids: Ids, texts: Sequence[tuple[str, ...]], config: Any, encode_text: EncodeText) -> Ids:
        """Prompt ids with the `image_texts` of each image in the place of its placeholder, and a placeholder between each two of
        them. Default: the texts are tokenized by themselves. Raises `MediaMismatch`.
        """
        placeholder = self.media_tokens(config).image
        assert placeholder is not None
        return enclose(ids, placeholder, [[encode_text(text) for text in image] for image in texts])

    def joined_tokens(self, ids: Sequence[int] | Ids, config: Any, encode_text: EncodeText) -> int:
        """How many tokens fewer `place_texts` makes of prompt ids than the prompt and the texts have apart. Default: 0."""
        return 0

    def _counts(self, kind: str, media: Sequence[Mapping[str, Any]], config: Any) -> Ids:
        counts = [self.media_layout.feature_counts(kind, part, config) for part in media]
        return np.concatenate([np.zeros(0, dtype=np.int64), *counts])

    # Positions

    def position_ids(
        self,
        token_types: Tensor,
        attention_mask: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        second_per_grid_ts: Tensor | Sequence[float] | None,
        config: Any,
    ) -> Tensor:
        """Positions int64 of ``token_types (B, L)``: ``(B, 4, L)`` (text, time, height, width) or ``(B, L)``. Padding has 0.

        Grids ``(N, 3)`` and the seconds between a video's time steps ``(M,)`` list the media of all rows in row order (see
        `media_grids`). Raises `MediaMismatch`.
        """
        if not self.mrope:
            return text_positions(attention_mask)
        images = videos = Pieces.none()
        if image_grid_thw is not None:
            images = Pieces.of_grids(image_grid_thw, self.merge_size(config))
        if video_grid_thw is not None:
            videos = self.video_pieces(video_grid_thw, second_per_grid_ts, config)
        return mrope_positions(token_types, attention_mask, images, videos)

    def video_pieces(self, grids: Tensor, seconds: Tensor | Sequence[float] | None, config: Any) -> Pieces:
        """The pieces of videos that get positions, from grids ``(M, 3)`` and the seconds between time steps ``(M,)``.

        Default: a video is one piece, and its time steps are one position apart. With `videos_by_frame` each frame is a piece;
        ``seconds`` are not used, since the text before a frame states its time.
        """
        if self.videos_by_frame:
            grids = torch.repeat_interleave(grids, grids[:, 0], dim=0)
            grids[:, 0] = 1
        return Pieces.of_grids(grids, self.merge_size(config))

    def extend_positions(self, position_ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
        """Positions ``(B, 4, R)`` or ``(B, R)`` of ``length`` generated tokens, from those of prompts ``(B, 4, P)`` or ``(B, P)``
        with mask ``(B, P)``.
        """
        return extend_positions(position_ids, attention_mask, length)

    # Media

    def distinct_media(self, rows: Sequence[RowMedia], config: Any) -> DistinctMedia:
        """The joined ``multi_modal_inputs`` of rows. Tensors that several rows share are included once."""
        return distinct_media(rows, self.media_layout, config)

    def feature_counts(self, row: RowMedia, config: Any) -> tuple[int, ...]:
        """Number of features of a row's media of each kind of `TOKEN_TYPES`, from its ``multi_modal_inputs``."""
        parts = media_parts(row)
        return tuple(int(self._counts(kind, parts, config).sum()) for kind in TOKEN_TYPES)

    def split_media(self, row: RowMedia, token_types: Tensor, config: Any) -> tuple[RowMedia, RowMedia] | None:
        """The media of a row's first tokens, of these types ``(n,)``, and its other media; ``None`` if a mapping has both."""
        counts = tuple(int((token_types == kind).sum()) for kind in TOKEN_TYPES.values())
        return split_media(row, counts, lambda part: self.feature_counts(part, config))

    def grids(self, media: RowMedia, config: Any) -> Tensor:
        """Grids ``(N, 3)`` int64 that the towers read, of images, then of videos, then of sounds."""
        layout, parts = self.media_layout, media_parts(media)
        return join_grids(*(layout.grids(kind, part, config) for kind in layout.kinds for part in parts))

    def dummy_media(self, config: Any) -> dict[str, Tensor]:
        """Inputs of the smallest image that the tower takes, all zero; of a family with sounds, of the smallest sound too.

        Embedded with empty spans, they change no output and give every weight of the tower a gradient of zero. So a rank without
        media makes the same collective calls as the others.
        """
        return self.media_layout.smallest(config)


# Unexpanded ids hold one placeholder for each medium, expanded ids one for each of its features.


def expand_ids(ids: Ids, tokens: MediaTokens, counts: Mapping[str, Ids]) -> tuple[Ids, npt.NDArray[np.int8]]:
    """Repeat each placeholder once per feature of its medium; ``counts`` hold the numbers of features by kind, in order.

    Returns ids ``(P,)`` and token types ``(P,)``: 0 text, 1 image, 2 video, 3 sound. Raises `MediaMismatch` if the number of
    placeholders and of media differ.

    >>> tokens = MediaTokens(image=7, video=8, vision_start=5, vision_end=6)
    >>> expand_ids(np.array([1, 5, 7, 6, 2]), tokens, {"image": np.array([3])})
    (array([1, 5, 7, 7, 7, 6, 2]), array([0, 0, 1, 1, 1, 0, 0], dtype=int8))
    """
    repeats = np.ones_like(ids)
    types = np.zeros(len(ids), dtype=np.int8)
    for name, kind in TOKEN_TYPES.items():
        made = counts.get(name, ())
        found = _places(ids, tokens.of(name), name, len(made))
        types[found] = kind
        repeats[found] = made
    return np.repeat(ids, repeats), np.repeat(types, repeats)


def enclose(ids: Ids, placeholder: int, texts: Sequence[Sequence[Sequence[int]]]) -> Ids:
    """Replace each image's placeholder by its texts with one placeholder between neighbours.

    ``texts[image]`` holds the token ids of at least two texts: one before the first placeholder, one between each two, and one
    after the last. Raises `MediaMismatch` if the number of placeholders and of images differ.

    >>> enclose(np.array([1, 7, 2, 7]), 7, [[[5], [6]], [[5], [8, 8], [6]]])
    array([1, 5, 7, 6, 2, 5, 7, 8, 8, 7, 6])
    """
    parts: list[Ids] = []
    done = 0
    for place, (first, *others) in zip(_places(ids, placeholder, "image", len(texts)).tolist(), texts):
        replaced = [*first, *(token for text in others for token in (placeholder, *text))]
        parts += [ids[done:place], np.array(replaced, dtype=np.int64)]
        done = place + 1
    return np.concatenate([*parts, ids[done:]])


def split_videos(ids: Ids, tokens: MediaTokens, frames: Sequence[Sequence[Sequence[int]]]) -> Ids:
    """Replace each video placeholder by its frames: for each, its text, the start token, one placeholder and the end token.

    ``frames[video][frame]`` holds the token ids of the text. Start and end tokens around the video's own placeholder are removed.

    >>> tokens = MediaTokens(image=7, video=8, vision_start=5, vision_end=6)
    >>> split_videos(np.array([1, 5, 8, 6, 2]), tokens, [[[90], [91, 92]]])
    array([ 1, 90,  5,  8,  6, 91, 92,  5,  8,  6,  2])
    """
    parts: list[Ids] = []
    done = 0
    for place, texts in zip(_places(ids, tokens.video, "video", len(frames)).tolist(), frames):
        frame = [tokens.vision_start, tokens.video, tokens.vision_end]
        enclosed = place > 0 and ids[place - 1 : place + 2].tolist() == frame
        shown = np.array([i for text in texts for i in (*text, *frame)], dtype=np.int64)
        parts += [ids[done : place - enclosed], shown]
        done = place + 1 + enclosed
    return np.concatenate([*parts, ids[done:]])


def _places(ids: Ids, placeholder: int | None, kind: str, media: int) -> Ids:
    """Where the placeholders of media of a kind are. Raises `MediaMismatch` if there are more or fewer of them than media."""
    places = np.flatnonzero(ids == placeholder)
    if len(places) != media:
        raise MediaMismatch(f"{len(places)} {kind} placeholders in the prompt, but {media} {kind}s")
    return places


def frame_texts(
    grids: Ids, encode_text: EncodeText | None, seconds: Sequence[Sequence[float]] | None
) -> list[list[Sequence[int]]]:
    """Token ids of each frame's time, written as ``<1.5 seconds>``, for video ``grids (M, 3)``.

    Raises `MediaMismatch` if an argument is missing, or ``seconds[video][frame]`` does not have one time per frame.
    """
    if encode_text is None or seconds is None:
        raise MediaMismatch(
            "a video of this family needs `encode_text` and `seconds`: each frame's time is part of the prompt"
        )
    if [len(times) for times in seconds] != grids[:, 0].tolist():
        raise MediaMismatch(
            f"videos of {grids[:, 0].tolist()} frames, but times for {[len(times) for times in seconds]}"
        )
    return [[encode_text(f"<{time:.1f} seconds>") for time in times] for times in seconds]


def frame_seconds(frame_indices: Sequence[int], fps: float, temporal_patch_size: int) -> list[float]:
    """Time in seconds of each temporal patch: the mean of its first and last frame. The last frame is repeated to fill the last
    patch.

    >>> frame_seconds([0, 12, 24], fps=24, temporal_patch_size=2)
    [0.25, 1.0]
    """
    seconds = [index / fps for index in frame_indices]
    seconds += [seconds[-1]] * (-len(seconds) % temporal_patch_size)
    return [
        (seconds[i] + seconds[i + temporal_patch_size - 1]) / 2 for i in range(0, len(seconds), temporal_patch_size)
    ]
