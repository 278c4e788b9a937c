"""Features of images by a frozen vision tower, computed once for each distinct image."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dataproto.transfer import move
from dataproto.vlm import MediaSpans, VLMFamily


class KeyedImage(Protocol):
    """An image with the model's inputs; ``key`` is equal for equal inputs."""

    @property
    def key(self) -> bytes: ...

    @property
    def inputs(self) -> dict[str, Tensor]: ...


class ImageFeatures:
    """Features ``(F, levels, H)`` of the most recently used images, in at most ``max_bytes`` of memory.

    The tower reads one image at a time, so that its features do not depend on which others are asked for with it.
    """

    def __init__(self, model: Any, family: VLMFamily, device: torch.device, max_bytes: int = 1 << 30) -> None:
        """``model``'s tower must not change."""
        self.model, self.family, self.device, self.max_bytes = model, family, device, max_bytes
        self.bytes = 0
        self.computed = 0
        """Number of images that the tower has read."""
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()

    def of(self, image: KeyedImage) -> Tensor:
        """The features of an image, on the device."""
        found = self._features.get(image.key)
        if found is not None:
            self._features.move_to_end(image.key)
            return found
        # Grids stay on the host, which computes bounds of windows from them.
        inputs = {
            name: move(value, self.device) if value.is_floating_point() else value
            for name, value in image.inputs.items()
        }
        with torch.inference_mode(False), torch.no_grad():  # training reads what a sampler has computed
            found = self.family.features(self.model, inputs)
        self.computed += 1
        if found.nbytes <= self.max_bytes:
            self._features[image.key] = found
            self.bytes += found.nbytes
        while self.bytes > self.max_bytes:
            self.bytes -= self._features.popitem(last=False)[1].nbytes
        return found

    def placed(self, token_types: Tensor, images: Sequence[Sequence[KeyedImage]]) -> tuple[Tensor | None, MediaSpans]:
        """The joined features of the distinct images, and the spans of ``token_types (B, L)`` or packed ``(1, T)``.

        Args:
            images: those of each row, in the order of their tokens.

        Returns:
            ``(F, levels, H)``, ``None`` without images; and spans on the device.
        """
        starts: dict[bytes, int] = {}
        parts, places, total = [], [torch.zeros(0, dtype=torch.int64)], 0
        for image in (image for row in images for image in row):
            found = self.of(image)
            if image.key not in starts:
                starts[image.key] = total
                parts.append(found)
                total += len(found)
            places.append(torch.arange(len(found)) + starts[image.key])
        positions = (token_types.flatten() != 0).nonzero().squeeze(-1)
        spans = MediaSpans(positions, torch.cat(places)).to(self.device)
        return torch.cat(parts) if parts else None, spans
