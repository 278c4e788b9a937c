"""Image processors by PIL of families for which transformers has one only for torchvision: Kimi K2.5 and Muse Glimmer."""

from typing import Any

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

from dataproto.vlm.families.kimi_k25 import scaled_size
from dataproto.vlm.families.muse_glimmer import fitted_size

PUBLISHED_SETTINGS = {
    "patch_size": "patch_size",
    "merge_size": "merge_kernel_size",
    "max_patches": "in_patch_limit",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
"""Settings of Kimi's, and their names in the files of published checkpoints."""
ONLY_PUBLISHED = {
    "fixed_output_tokens": None,
    "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None,
    "temporal_merge_kernel_size": 4,
}
"""Settings in the files of published checkpoints that images do not need, but vLLM asks for."""


class PatchProcessor(PilBackend):
    """Images of whole features, as patches row by row."""

    do_resize = True
    do_rescale = True
    do_normalize = True
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    do_convert_rgb = True
    patch_size = 14
    merge_size = 2
    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012 - as in classes of transformers

    def fitted(self, image: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
        """An image ``(C, H, W)`` in the size of whole features."""
        raise NotImplementedError

    def patches(self, cut: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
        """The patches that a model takes, of ``cut (patches, C, side, side)``: by default these."""
        return cut

    def _preprocess(self, images: list[np.ndarray], *_: Any, **settings: Any) -> BatchFeature:
        side, patches, grids = int(settings["patch_size"]), [], []
        for image in images:
            image = self.rescale(self.fitted(image, settings), settings["rescale_factor"])
            image = self.normalize(image, settings["image_mean"], settings["image_std"])
            rows, columns = (length // side for length in image.shape[-2:])
            cut = image.reshape(len(image), rows, side, columns, side).transpose(1, 3, 0, 2, 4)
            patches.append(self.patches(cut.reshape(rows * columns, len(image), side, side), settings))
            grids.append([1, rows, columns])
        found = {
            "pixel_values": np.concatenate(patches).astype(np.float32),
            "image_grid_thw": np.array(grids, dtype=np.int64),
        }
        return BatchFeature(found, tensor_type=settings.get("return_tensors"))


class KimiImageKwargs(ImagesKwargs, total=False):
    """Settings in addition to those of all image processors."""

    max_patches: int
    patch_size: int
    merge_size: int


class KimiImageProcessor(PatchProcessor):
    """Images scaled down to at most ``max_patches`` and filled up with black to whole features.

    Settings are read as published checkpoints have them (``media_proc_cfg``), which vLLM reads, and as transformers writes them.
    They are written as both.
    """

    resample = PILImageResampling.BICUBIC
    size = {"max_height": 512, "max_width": 512}  # noqa: RUF012 - in patches
    max_patches = 16384
    valid_kwargs = KimiImageKwargs

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **settings: Any) -> None:
        found = dict(media_proc_cfg or {})
        own = {name: found[published] for name, published in PUBLISHED_SETTINGS.items() if published in found}
        if isinstance(own.get("merge_size"), (list, tuple)):
            own["merge_size"] = own["merge_size"][0]
        if "patch_limit_on_one_side" in found:
            own["size"] = dict.fromkeys(("max_height", "max_width"), found["patch_limit_on_one_side"])
        settings.pop("auto_map", None)  # code in the checkpoint, which is not executed
        super().__init__(**(own | settings))
        self.media_proc_cfg = ONLY_PUBLISHED | found

    def to_dict(self) -> dict[str, Any]:
        """The settings, and the same as published checkpoints have them."""
        written: dict[str, Any] = super().to_dict()
        own = {published: getattr(self, name) for name, published in PUBLISHED_SETTINGS.items()}
        written["media_proc_cfg"] |= own | {"patch_limit_on_one_side": self.size["max_height"]}
        return written

    def fitted(self, image: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
        """See `PatchProcessor.fitted`."""
        side, merge = int(settings["patch_size"]), int(settings["merge_size"])
        limits = int(settings["max_patches"]), int(settings["size"].max_height)
        size = scaled_size(image.shape[-2], image.shape[-1], side, *limits)
        if size != image.shape[-2:]:
            image = self.resize(image, SizeDict(height=size[0], width=size[1]), settings["resample"])
        return np.pad(image, ((0, 0), *((0, -length % (merge * side)) for length in size)))


class MuseImageKwargs(ImagesKwargs, total=False):
    """Settings in addition to those of all image processors."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    max_image_tokens: int


class MuseImageProcessor(PatchProcessor):
    """Images of at most ``max_image_tokens``, each patch ``temporal_patch_size`` times."""

    resample = PILImageResampling.LANCZOS
    size = {"height": 1, "width": 1}  # noqa: RUF012 - not read, but asked for
    temporal_patch_size = 2
    max_image_tokens = 4096
    valid_kwargs = MuseImageKwargs

    def fitted(self, image: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
        """See `PatchProcessor.fitted`."""
        unit = int(settings["patch_size"]) * int(settings["merge_size"])
        _, height, width = image.shape
        height, width = fitted_size(height, width, unit, int(settings["max_image_tokens"]))
        return self.resize(image, SizeDict(height=height * unit, width=width * unit), settings["resample"])

    def patches(self, cut: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
        """See `PatchProcessor.patches`."""
        return np.tile(cut.reshape(len(cut), -1), (1, int(settings["temporal_patch_size"])))
