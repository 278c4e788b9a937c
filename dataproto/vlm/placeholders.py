"""Placeholder tokens: how many an image needs, and their expansion in token ids.

Unexpanded ids hold one placeholder for each image or video, expanded ids one for each of its features.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataproto.errors import InvalidMedia, MediaMismatch
from dataproto.vlm.mrope import IMAGE, VIDEO

Ids = npt.NDArray[np.int64]
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class MediaTokens:
    """Ids of the placeholder tokens of media and of the tokens that enclose them."""

    image: int | None
    video: int | None = None
    vision_start: int | None = None
    vision_end: int | None = None


def image_grid(
    height: int, width: int, min_pixels: int, max_pixels: int, patch_size: int, merge_size: int
) -> tuple[int, int]:
    """Rows and columns of patches of an image after the resizing of the Qwen-VL processors ("smart resize").

    Sides become multiples of ``patch_size * merge_size``. The area is between ``min_pixels`` and ``max_pixels``, and the aspect
    ratio is about the same. Raises `InvalidMedia`, as the processor does, if the image is empty or one side is more than 200
    times the other.

    >>> image_grid(480, 640, min_pixels=3136, max_pixels=1003520, patch_size=14, merge_size=2)
    (34, 46)
    """
    if min(height, width) <= 0 or max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise InvalidMedia(
            f"image of height {height} and width {width}: one side may be at most {MAX_ASPECT_RATIO} times the other"
        )
    factor = patch_size * merge_size
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return rows * merge_size, columns * merge_size


def expand_ids(ids: Ids, tokens: MediaTokens, images: Ids, videos: Ids) -> tuple[Ids, npt.NDArray[np.int8]]:
    """Repeat each placeholder once per feature of its medium; ``images`` and ``videos`` hold the numbers of features in order.

    Returns ids ``(P,)`` and token types ``(P,)``: 0 text, 1 image, 2 video. Raises `MediaMismatch` if the number of placeholders
    and of media differ.

    >>> tokens = MediaTokens(image=7, video=8, vision_start=5, vision_end=6)
    >>> expand_ids(np.array([1, 5, 7, 6, 2]), tokens, np.array([3]), np.array([], dtype=int))
    (array([1, 5, 7, 7, 7, 6, 2]), array([0, 0, 1, 1, 1, 0, 0], dtype=int8))
    """
    repeats = np.ones_like(ids)
    types = np.zeros(len(ids), dtype=np.int8)
    for kind, token, counts, name in ((IMAGE, tokens.image, images, "image"), (VIDEO, tokens.video, videos, "video")):
        found = ids == token
        if found.sum() != len(counts):
            raise MediaMismatch(f"{found.sum()} {name} placeholders in the prompt, but {len(counts)} {name}s")
        types[found] = kind
        repeats[found] = counts
    return np.repeat(ids, repeats), np.repeat(types, repeats)


def enclose(ids: Ids, placeholder: int, texts: Sequence[Sequence[Sequence[int]]]) -> Ids:
    """Replace each image's placeholder by its texts with one placeholder between neighbours.

    ``texts[image]`` holds the token ids of at least two texts: one before the first placeholder, one between each two, and one
    after the last. Raises `MediaMismatch` if the number of placeholders and of images differ.

    >>> enclose(np.array([1, 7, 2, 7]), 7, [[[5], [6]], [[5], [8, 8], [6]]])
    array([1, 5, 7, 6, 2, 5, 7, 8, 8, 7, 6])
    """
    places = np.flatnonzero(ids == placeholder).tolist()
    if len(places) != len(texts):
        raise MediaMismatch(f"{len(places)} image placeholders in the prompt, but {len(texts)} images")
    parts: list[Ids] = []
    done = 0
    for place, (first, *others) in zip(places, texts):
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
    places = np.flatnonzero(ids == tokens.video)
    if len(places) != len(frames):
        raise MediaMismatch(f"{len(places)} video placeholders in the prompt, but {len(frames)} videos")
    parts: list[Ids] = []
    done = 0
    for place, texts in zip(places.tolist(), frames):
        enclosed = place > 0 and ids[place - 1 : place + 2].tolist() == [
            tokens.vision_start,
            tokens.video,
            tokens.vision_end,
        ]
        frame = (tokens.vision_start, tokens.video, tokens.vision_end)
        parts += [
            ids[done : place - enclosed],
            np.array([i for text in texts for i in (*text, *frame)], dtype=np.int64),
        ]
        done = place + 1 + enclosed
    return np.concatenate([*parts, ids[done:]])


def frame_texts(
    grids: Ids, encode_text: Callable[[str], Sequence[int]] | None, seconds: Sequence[Sequence[float]] | None
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
