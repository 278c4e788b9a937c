"""How images and videos are laid out in a model's inputs, for example as patches with a grid for each medium.

``inputs`` are a row's ``multi_modal_inputs``, or part of them. A kind is ``"image"`` or ``"video"``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidConfig, MediaMismatch
from dataproto.vlm.placeholders import Ids, image_grid


class MediaLayout(Protocol):
    """How a family's images and videos are laid out. The tower reads them as grids ``(N, 3)`` of patches (time, height, width).
    ``merge_size ** 2`` patches become one feature; patches attend to each other within a time step of their grid.
    """

    def names(self, kind: str) -> tuple[str, ...]:
        """Arguments of the Hugging Face forward, each joined along its first dimension, pixels first. Empty if the family has no
        media of this kind.
        """
        ...

    def merge_size(self, config: Any) -> int:
        """Patches along each side of a feature."""
        ...

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """Grids ``(N, 3)`` int64 that the tower reads. Raises `MediaMismatch` if the inputs contradict each other."""
        ...

    def feature_counts(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Ids:
        """Number of features ``(M,)`` of each medium."""
        ...

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Keywords that make the image processor keep these limits (default: its own). Raises `InvalidConfig`."""
        ...

    def image_inputs(self, made: Mapping[str, Any]) -> dict[str, Tensor]:
        """The inputs of one image, from what the image processor makes of it alone. Default: those that the forward takes."""
        return {name: made[name] for name in self.names("image")}

    def count_image_features(
        self, height: int, width: int, processor: Any, options: Mapping[str, Any], config: Any
    ) -> int:
        """Number of features of an image of this size in pixels, processed with the options. Raises `InvalidMedia` for a size
        that the processor refuses.
        """
        ...

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """Inputs of the smallest image, all zero."""
        ...


@dataclass(frozen=True)
class PatchGrids(MediaLayout):
    """The layout of Qwen-VL's processors: patches ``(patches, dim)`` of media of any size, one medium after another, and their
    grids ``(media, 3)``.
    """

    def names(self, kind: str) -> tuple[str, ...]:
        """Pixels and grids."""
        return {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}[kind]

    def merge_size(self, config: Any) -> int:
        """From the config of the tower."""
        return int(config.vision_config.spatial_merge_size)

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """The grids of the inputs, compared with the pixels if those are present."""
        pixel_name, grid_name = self.names(kind)
        if inputs.get(grid_name) is None:
            if inputs.get(pixel_name) is not None:
                raise MediaMismatch(f"{pixel_name} without {grid_name}")
            return torch.zeros(0, 3, dtype=torch.int64)
        grid, merge = torch.as_tensor(inputs[grid_name]).long(), self.merge_size(config)
        if grid.ndim != 2 or grid.shape[-1] != 3 or bool((grid[:, 1:] % merge).any()):
            raise MediaMismatch(f"{kind} grid {grid.tolist()} is not (N, 3) with height and width divisible by {merge}")
        patches, pixels = int(grid.prod(-1).sum()), inputs.get(pixel_name)
        if pixels is not None and patches != len(pixels):
            raise MediaMismatch(f"{kind} grid {grid.tolist()} counts {patches} patches, but there are {len(pixels)}")
        return grid

    def feature_counts(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Ids:
        """Each grid is one medium."""
        return np.asarray(self.grids(kind, inputs, config).cpu().prod(-1) // self.merge_size(config) ** 2)

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Limits of an image's area."""
        least = int(processor.size["shortest_edge"] if min_pixels is None else min_pixels)
        most = int(processor.size["longest_edge"] if max_pixels is None else max_pixels)
        check_limits(least, most)
        return {"size": {"shortest_edge": least, "longest_edge": most}}

    def count_image_features(
        self, height: int, width: int, processor: Any, options: Mapping[str, Any], config: Any
    ) -> int:
        """Computed by `image_grid`."""
        size, merge = options["size"], self.merge_size(config)
        patch = int(config.vision_config.patch_size)
        rows, columns = image_grid(height, width, size["shortest_edge"], size["longest_edge"], patch, merge)
        return rows * columns // merge**2

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """An image of one feature."""
        vision, merge = config.vision_config, self.merge_size(config)
        dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.zeros(merge**2, dim), "image_grid_thw": torch.tensor([[1, merge, merge]])}


PATCH_GRIDS = PatchGrids()


def check_limits(min_pixels: int, max_pixels: int) -> None:
    """Raises `InvalidConfig` unless ``0 < min_pixels <= max_pixels``."""
    if not 0 < min_pixels <= max_pixels:
        raise InvalidConfig(f"min_pixels={min_pixels} and max_pixels={max_pixels}: must be 0 < min <= max")
