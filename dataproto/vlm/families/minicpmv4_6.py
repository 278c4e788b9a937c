"""MiniCPM-V 4.6: the language model of Qwen3.5 with one-dimensional positions, and a SigLIP tower that joins patches twice.

An image is shown whole and, if it is large, again in slices, in reading order. The images of a prompt are numbered in its text.
Its own video inputs, with placeholders of another kind, are not read here: videos are refused.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig, MediaMismatch
from dataproto.vlm.families.qwen3_5 import Qwen35
from dataproto.vlm.media import Ids, Options, PartedImages, check_limits


class Slices(PartedImages):
    """Patches ``(patches, 3, size, size)`` of all images, one after another, and ``target_sizes (parts, 2)`` int64, rows and
    columns of patches of each part: of the whole image, then of its slices. A row also has ``image_slices``.
    """

    image_names = ("pixel_values", "target_sizes")
    parts_name = "image_slices"

    def merge_size(self, config: Any) -> int:
        """Patches along each side of a feature: the tower joins squares of 2, the merger too."""
        return int((2 if config.downsample_mode == "16x" else 1) * config.merge_kernel_size[0] ** config.merger_times)

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """One grid per part of an image."""
        sizes = inputs.get("target_sizes") if kind == "image" else None
        if sizes is None:
            return torch.zeros(0, 3, dtype=torch.int64)
        pixels, merge = inputs.get("pixel_values"), self.merge_size(config)
        sizes = torch.as_tensor(sizes).long()
        if sizes.ndim != 2 or sizes.shape[-1] != 2 or bool((sizes % merge).any()):
            raise MediaMismatch(f"target_sizes {sizes.tolist()} is not (parts, 2) with multiples of {merge}")
        patches = int(sizes.prod(-1).sum())
        if pixels is not None and patches != len(pixels):
            raise MediaMismatch(f"target_sizes count {patches} patches, but there are {len(pixels)}")
        return torch.nn.functional.pad(sizes, (1, 0), value=1)

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """The upper limit is a number of slices. The processor enlarges every image to about the area of one slice."""
        if not processor.use_image_id:
            raise InvalidConfig(
                "the image processor has use_image_id=False; prompts of this family number their images"
            )
        area = int(processor.scale_resolution) ** 2
        least = area if min_pixels is None else min_pixels
        most = max(least, processor.max_slice_nums * area) if max_pixels is None else max_pixels
        check_limits(least, most)
        if least > area:
            raise InvalidConfig(f"min_pixels={least}: images of this family are enlarged to {area} pixels, not beyond")
        return {"max_slice_nums": max(1, most // area)}

    def image_inputs(self, made: Mapping[str, Any]) -> dict[str, Tensor]:
        """From pixels ``(1, 3, size, patches * size)``."""
        channels, size, _ = made["pixel_values"][0].shape
        return {
            "pixel_values": made["pixel_values"][0].reshape(channels, size, -1, size).permute(2, 0, 1, 3).contiguous(),
            "target_sizes": torch.as_tensor(made["target_sizes"]).long(),
            "image_slices": torch.tensor([list(made["grids"][0])]),
        }

    def sizes_of(
        self, height: int, width: int, processor: Any, options: Options
    ) -> tuple[tuple[int, int], list[tuple[int, int]]]:
        """Rows and columns of slices, and rows and columns of patches of each part, computed by the processor."""
        size, scale, patch = (height, width), processor.scale_resolution, processor.patch_size
        more = {}
        # Newer versions of transformers have it.
        if "downsample_mode" in signature(processor.find_best_resize).parameters:
            more = {"downsample_mode": processor.downsample_mode}
        grid = processor.get_sliced_grid(size, options["max_slice_nums"], scale) if processor.slice_mode else None
        whole = processor.find_best_resize(size, scale, patch, allow_upscale=grid is None, **more)
        sizes = [(whole[0] // patch, whole[1] // patch)]
        if grid is None:
            return (0, 0), sizes
        fine = processor.get_refine_size(size, grid, scale, patch, allow_upscale=True, **more)
        sizes += [(fine[0] // grid[0] // patch, fine[1] // grid[1] // patch)] * (grid[0] * grid[1])
        return (grid[0], grid[1]), sizes

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """Computed from the sizes of its parts."""
        if processor.downsample_mode != config.downsample_mode:
            raise InvalidConfig(
                f"the image processor has downsample_mode={processor.downsample_mode!r}, the model {config.downsample_mode!r}"
            )
        _, sizes = self.sizes_of(height, width, processor, options)
        return sum(rows * columns for rows, columns in sizes) // self.merge_size(config) ** 2

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """An image of one feature."""
        side, patch = self.merge_size(config), int(config.vision_config.patch_size)
        return {
            "pixel_values": torch.zeros(side**2, 3, patch, patch),
            "target_sizes": torch.tensor([[side, side]]),
            "image_slices": torch.zeros(1, 2, dtype=torch.int64),
        }


class MiniCPMV46(Qwen35):
    """MiniCPM-V 4.6."""

    model_type = "minicpmv4_6"
    published = ("MiniCPM-V 4.6",)
    needs_transformers = (5, 19)
    """The tower of older ones takes all images of a call for images of the first one's size."""
    not_in_vllm = "its processor in vLLM takes no choice of the image backend, whose pixels differ from the actor's"
    media_layout = SLICES = Slices()
    image_text = ("<image>", "</image>")
    processor_tokens = ("<slice>", "</slice>", "<image_id>", "</image_id>")
    numbers_images = True
    videos_by_frame = False
    mrope = False
    vision_tower = "model.vision_tower"
    vision_blocks = "model.vision_tower.encoder.layers"
    mergers = ("model.vision_tower.vit_merger", "model.merger")

    def image_texts(self, media: Mapping[str, Any], config: Any) -> list[tuple[str, ...]]:
        """From the slices of each image."""
        return [self._texts(*slices) for slices in media["image_slices"].tolist()] if "image_slices" in media else []

    def size_texts(self, height: int, width: int, processor: Any, options: Options) -> tuple[str, ...]:
        """From the slices of an image of this size."""
        return self._texts(*self.SLICES.sizes_of(height, width, processor, options)[0])

    def run_counts(self, media: Mapping[str, Any], config: Any) -> Ids:
        """A run of placeholders for each part of an image."""
        return self.SLICES.part_counts(media, config)

    def numbered(self, texts: Sequence[str], number: int) -> tuple[str, ...]:
        """The texts of an image, with the number of the image put before the first one."""
        return (f"<image_id>{number}</image_id>{texts[0]}", *texts[1:])

    def _texts(self, rows: int, columns: int) -> tuple[str, ...]:
        """Each slice between tokens, a line break after each row of slices."""
        start, end = self.image_text
        slices = [
            ("" if not place else "</slice>" if place % columns else "</slice>\n") + "<slice>"
            for place in range(rows * columns)
        ]
        return (start, end + slices[0], *slices[1:], "</slice>") if slices else (start, end)

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, H)`` after the tower and the merger. The tower takes pixels as ``(1, 3, size, patches * size)``."""
        pixels = media["pixel_values"]
        joined = pixels.permute(1, 2, 0, 3).reshape(1, *pixels.shape[1:3], -1)
        output = model.model.get_image_features(joined, media["target_sizes"], **vision_kwargs)
        return torch.cat(tuple(output.pooler_output))

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Full attention within a part in every block; after block ``insert_layer_id`` squares of patches are joined, by
        attention within them and an MLP.
        """
        vision = config.vision_config
        width, inner, depth = int(vision.hidden_size), int(vision.intermediate_size), int(vision.num_hidden_layers)
        square = int(vision.window_kernel_size[0]) ** 2
        joins = config.downsample_mode == "16x"
        first = int(vision.insert_layer_id) + 1 if joins else depth
        patches = grids.prod(-1)
        later = patches // square
        block = 4 * width**2 + 2 * width * inner
        linear = patches * (width * int(vision.num_channels) * int(vision.patch_size) ** 2 + first * block)
        pairs = first * patches**2
        if joins:
            linear += later * (depth - first) * block + patches * 4 * width**2
            linear += later * (square * width * square * inner + square * inner * width)
            pairs += (depth - first) * later**2 + patches * square
        merged = int(config.merge_kernel_size[0]) ** 2
        left = later if joins else patches
        for round_ in range(int(config.merger_times)):
            last = round_ == int(config.merger_times) - 1
            left = left // merged
            linear += left * 4 * width * (4 * width + (int(config.text_config.hidden_size) if last else width))
        return torch.stack([2 * linear, 4 * width * pairs], dim=1)
