"""Features of images by a frozen vision tower, computed once for each distinct image."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dataproto.transfer import pixels_on
from dataproto.vlm import MediaSpans, VLMFamily

T = TypeVar("T")


class RecentlyUsed(Generic[T]):
    """The most recently used values, in at most ``max_bytes``; a larger one is not kept.

    >>> kept = RecentlyUsed[str](4, len)
    >>> kept["a"], kept["b"], kept["c"] = "xx", "yy", "zz"
    >>> kept.get("a"), kept.get("c")
    (None, 'zz')
    """

    def __init__(self, max_bytes: int, size: Callable[[T], int]) -> None:
        """``size`` tells the bytes of a value."""
        self.max_bytes, self.size, self.bytes = max_bytes, size, 0
        self._values: OrderedDict[Hashable, T] = OrderedDict()  # last used last

    def get(self, key: Hashable) -> T | None:
        """The value, or ``None``."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def __setitem__(self, key: Hashable, value: T) -> None:
        if key in self._values:
            self.bytes -= self.size(self._values.pop(key))
        self._values[key] = value
        self.bytes += self.size(value)
        while self.bytes > self.max_bytes:
            self.bytes -= self.size(self._values.popitem(last=self.size(value) > self.max_bytes)[1])


class KeyedInputs(Protocol):
    """The model's inputs for a medium; ``key`` is equal for equal ones."""

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
        self.model, self.family, self.device = model, family, device
        self.computed = 0
        """Number of images that the tower has read."""
        self.kept: RecentlyUsed[Tensor] = RecentlyUsed(max_bytes, lambda features: features.nbytes)

    def of(self, image: KeyedInputs) -> Tensor:
        """The features of an image, on the device."""
        if (found := self.kept.get(image.key)) is not None:
            return found
        with torch.inference_mode(False), torch.no_grad():  # training reads what a sampler has computed
            found = self.family.features(self.model, pixels_on(image.inputs, self.device))
        self.computed += 1
        self.kept[image.key] = found
        return found

    def placed(self, token_types: Tensor, images: Sequence[Sequence[KeyedInputs]]) -> tuple[Tensor | None, MediaSpans]:
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
