"""The image processor of Muse Glimmer by PIL; transformers has it only for torchvision."""

from typing import Any

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

from dataproto.vlm.families.muse_glimmer import fitted_size


class MuseImageKwargs(ImagesKwargs, total=False):
    """Settings in addition to those of all image processors."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    max_image_tokens: int


class MuseImageProcessor(PilBackend):
    """Images of whole features, at most ``max_image_tokens``, as patches row by row, ``temporal_patch_size`` times each."""

    do_resize = True
    resample = PILImageResampling.LANCZOS
    size = {"height": 1, "width": 1}  # noqa: RUF012 - not read, but asked for; as in classes of transformers
    do_rescale = True
    do_normalize = True
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    do_convert_rgb = True
    patch_size = 14
    temporal_patch_size = 2
    merge_size = 2
    max_image_tokens = 4096
    valid_kwargs = MuseImageKwargs
    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012

    def _preprocess(self, images: list[np.ndarray], *_: Any, **settings: Any) -> BatchFeature:
        side, merge, times = (int(settings[name]) for name in ("patch_size", "merge_size", "temporal_patch_size"))
        patches, grids = [], []
        for image in images:
            height, width = image.shape[-2:]
            most = int(settings["max_image_tokens"])
            height, width = (count * side * merge for count in fitted_size(height, width, side * merge, most))
            size = SizeDict(height=height, width=width)
            image = self.rescale(self.resize(image, size, settings["resample"]), settings["rescale_factor"])
            image = self.normalize(image, settings["image_mean"], settings["image_std"])
            rows, columns = (length // side for length in image.shape[-2:])
            cut = image.reshape(len(image), rows, side, columns, side).transpose(1, 3, 0, 2, 4)
            patches.append(np.tile(cut.reshape(rows * columns, -1), (1, times)).astype(np.float32))
            grids.append([1, rows, columns])
        found = {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, dtype=np.int64)}
        return BatchFeature(found, tensor_type=settings.get("return_tensors"))
