"""Videos: given frames, or a file that ``qwen_vl_utils`` decodes (which requires torchvision).

The image processor processes the frames, under the limits for images, so given frames do not require torchvision. Letters: T
frames, H and W pixels.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dataproto.errors import InvalidMedia, raised_as
from dataproto.vlm.prompt_layout import frame_seconds
from rollout.continuation import joined_media
from rollout.prompts.image_processing import ProcessedImage
from rollout.prompts.images import load_image
from rollout.prompts.sources import Root, check_sizes, file_of, sought_in

DEFAULT_FPS = 2.0  # of frames without metadata, as in qwen_vl_utils
DECODER_MERGE_SIZE = 2  # patches along each side of a feature, as qwen_vl_utils assumes

_PAYLOADS = ("bytes", "video", "video_url", "url", "path")


@dataclass(frozen=True)
class ProcessedVideo:
    """One video: frames ``(T, H, W, 3)`` uint8 with their metadata, for engines, and the model's inputs."""

    kind: ClassVar[str] = "video"
    key: bytes
    frames: np.ndarray
    metadata: dict[str, Any]
    inputs: dict[str, Tensor]  # pixel_values_videos (patches, dim), video_grid_thw (1, 3), second_per_grid_ts (1,)
    seconds: list[float]  # time of each temporal patch
    images: tuple[ProcessedImage, ...] = ()  # its frames, if the prompt shows them as images; `inputs` are theirs

    @property
    def content(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Frames and metadata."""
        return self.frames, self.metadata


def process_video(source: Any, image_processor: Any, options: Mapping[str, Any], root: Root = None) -> ProcessedVideo:
    """Read a video and make the model's inputs, with ``options`` for the image processor. Raises `InvalidMedia`.

    ``source`` is ``(frames, metadata)``, only frames (a list of anything that `load_image` accepts, or an array), a path, or a
    mapping with one of them under ``video``.
    """
    # The decoder resizes frames to multiples of a merged patch, so that the image processor does not resize them again.
    patch_size = int(image_processor.patch_size) * int(image_processor.merge_size) // DECODER_MERGE_SIZE
    frames, metadata = read_video(source, root, patch_size)
    step = int(image_processor.temporal_patch_size)
    patches, grid = _patches(frames, image_processor, options, step)
    indices, fps = metadata["frames_indices"], metadata["fps"]
    sampled_fps = fps * len(indices) / max(1, metadata["total_num_frames"])
    inputs = {
        "pixel_values_videos": patches,
        "video_grid_thw": grid,
        "second_per_grid_ts": torch.tensor([step / sampled_fps]),
    }
    return ProcessedVideo(_key(frames, metadata), frames, metadata, inputs, frame_seconds(indices, fps, step))


def _patches(frames: np.ndarray, image_processor: Any, options: Mapping[str, Any], step: int) -> tuple[Tensor, Tensor]:
    """The inputs ``pixel_values_videos`` and ``video_grid_thw`` of a video.

    The image processor gets the frames of one patch at a time, ``step``: it repeats each of them as often.
    """
    times = [frames[start : start + step] for start in range(0, len(frames), step)]
    patches, grid = torch.empty(0), torch.empty(0)
    for place, own in enumerate(times):
        made = image_processor(images=[Image.fromarray(frame) for frame in own], return_tensors="pt", **options)
        paired = pair_frames(made["pixel_values"].float(), len(own), step, int(image_processor.patch_size))
        if place == 0:
            patches = paired.new_empty(len(times), *paired.shape)
            grid = torch.tensor([[len(times), *made["image_grid_thw"][0, 1:].tolist()]])
        patches[place] = paired
    return patches.flatten(0, 1), grid


def process_frames(source: Any, process: Callable[[Image.Image], ProcessedImage], root: Root = None) -> ProcessedVideo:
    """Read a video, as `process_video`, whose frames become images by ``process``. Raises `InvalidMedia`."""
    frames, metadata = read_video(source, root)
    images = tuple(process(Image.fromarray(frame)) for frame in frames)
    seconds = [index / metadata["fps"] for index in metadata["frames_indices"]]
    return ProcessedVideo(
        _key(frames, metadata), frames, metadata, joined_media([image.inputs for image in images]), seconds, images
    )


def _key(frames: np.ndarray, metadata: Mapping[str, Any]) -> bytes:
    digest = blake2b(repr((frames.shape, metadata)).encode(), digest_size=16)
    digest.update(frames.data)
    return digest.digest()


def pair_frames(patches: Tensor, frames: int, step: int, patch_size: int) -> Tensor:
    """Patches of a video, from patches of its frames processed as images, which repeat each frame ``step`` times.

    ``patches`` is ``(T * n, channels * step * patch_size ** 2)``, the result ``(ceil(T / step) * n, same)``. The last frame is
    repeated to fill the last temporal patch.
    """
    split = patches.view(frames, -1, patches.shape[1] // (step * patch_size**2), step, patch_size**2)[:, :, :, 0]
    split = torch.cat([split, split[-1:].expand(-frames % step, -1, -1, -1)])
    return split.unflatten(0, (-1, step)).permute(0, 2, 3, 1, 4).reshape(-1, patches.shape[1])


def read_video(source: Any, root: Root = None, patch_size: int = 14) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames ``(T, H, W, 3)`` uint8 and metadata ``{"fps", "frames_indices", "total_num_frames", ...}``.

    Frames of a file are resized to multiples of ``patch_size * DECODER_MERGE_SIZE`` pixels; given frames are not resized.
    """
    metadata: Mapping[str, Any] = {}
    options: dict[str, Any] = {}
    while isinstance(source, Mapping):
        options |= {name: value for name, value in source.items() if name not in _PAYLOADS and value is not None}
        source = next((source[name] for name in _PAYLOADS if source.get(name) is not None), None)
    if isinstance(source, tuple) and len(source) == 2 and (source[1] is None or isinstance(source[1], Mapping)):
        source, metadata = source[0], source[1] or {}
    _check_given(source)
    if isinstance(source, (str, os.PathLike)):
        frames, metadata = _decode(source, root, options, patch_size)
    else:
        check_sizes(options, "a video of given frames")
        frames = _stack(source, root)
    described = {
        "fps": options.get("sample_fps", options.get("fps", DEFAULT_FPS)),
        "frames_indices": list(range(len(frames))),
        "total_num_frames": len(frames),
        "do_sample_frames": False,
        **{name: value for name, value in metadata.items() if value is not None},
    }
    what = "a video's fps must be a number, and its frames_indices numbers"
    with raised_as(InvalidMedia, what, TypeError, ValueError):
        fps, indices = float(described["fps"]), [int(index) for index in described["frames_indices"]]
    if not 0 < fps < math.inf or len(indices) != len(frames):
        raise InvalidMedia(f"{len(frames)} frames of a video have metadata for {len(indices)} at {fps} frames a second")
    return frames, described | {"fps": fps, "frames_indices": indices}


def check_files(source: Any, root: Root = None) -> None:
    """Raises `InvalidMedia` for a video that is missing, whose file, or that of one of its frames, does not exist, or for whose
    file there is no decoder.
    """
    while isinstance(source, Mapping):
        source = next((source[name] for name in _PAYLOADS if source.get(name) is not None), None)
    _check_given(source)
    if isinstance(source, list) and not source:
        raise InvalidMedia("the video has no frames")
    for each in source if isinstance(source, list) else [source]:
        file = file_of(each, root, "video") if isinstance(each, (str, os.PathLike)) else None
        if isinstance(file, Path) and not file.is_file():
            raise InvalidMedia(f"video {os.fspath(each)!r}: there is no such file{sought_in(each, root)}")
    if isinstance(source, (str, os.PathLike)):
        _decoder(source)


def _check_given(source: Any) -> None:
    """Raises `InvalidMedia` for nothing, and for the bytes of a file, which a column of `datasets.Video` has in parquet."""
    if source is None:
        raise InvalidMedia("the video is missing (None): an object holds its frames or its path in 'video'")
    if isinstance(source, (bytes, bytearray, memoryview)):
        raise InvalidMedia(
            f"the video is bytes ({len(source)}), which are not decoded: save it to a file, and give its path"
        )


def _stack(frames: Any, root: Root) -> np.ndarray:
    if isinstance(frames, (np.ndarray, Tensor)):
        array = np.asarray(frames)
        if array.ndim == 4 and array.shape[-1] != 3 and array.shape[1] == 3:
            array = array.transpose(0, 2, 3, 1)
        if array.ndim != 4 or array.shape[-1] != 3 or not len(array) or array.dtype != np.uint8:
            raise InvalidMedia(f"video frames must be (T, H, W, 3) uint8, not {array.shape} {array.dtype}")
        return np.ascontiguousarray(array)
    if not isinstance(frames, Sequence) or not len(frames):
        raise InvalidMedia(f"a video must be frames or a path, not {type(frames).__name__}")
    arrays = [np.asarray(load_image(frame, root)) for frame in frames]
    if len({array.shape for array in arrays}) > 1:
        raise InvalidMedia(f"video frames differ in size: {sorted({array.shape[:2] for array in arrays})}")
    return np.stack(arrays)


def _decode(
    path: str | os.PathLike[str], root: Root, options: Mapping[str, Any], patch_size: int
) -> tuple[np.ndarray, dict[str, Any]]:
    check_files(path, root)
    text, file = os.fspath(path), file_of(path, root, "video")
    fetch_video = _decoder(path)
    with raised_as(InvalidMedia, f"video {text!r} cannot be decoded", Exception):
        element = {**options, "video": str(file)}
        frames, metadata = fetch_video(element, image_patch_size=patch_size, return_video_metadata=True)
    array = frames.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return np.ascontiguousarray(array), {**metadata, "duration": metadata["total_num_frames"] / metadata["fps"]}


def _decoder(path: str | os.PathLike[str]) -> Callable[..., Any]:
    try:
        from qwen_vl_utils import fetch_video
    except Exception as error:  # a torchvision that does not fit torch raises other errors than ImportError
        raise InvalidMedia(
            f"video {os.fspath(path)!r}: decoding a video file needs qwen-vl-utils with a torchvision that fits the installed "
            f"torch (pip install torchvision); or pass its frames as (frames, metadata). The import failed: {error}"
        ) from error
    return fetch_video
