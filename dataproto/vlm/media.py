"""Media of rows: how a family's images, videos and sounds are laid out, and features that are computed once and used by every
row that shares them.

A row's media are its ``multi_modal_inputs``, such as ``{"pixel_values": (patches, dim), "image_grid_thw": (images, 3)}`` and the
same for videos and sounds (`MediaLayout` of the family defines the names); ``{}`` for a row of text. The media of a row with
several turns are a sequence of such mappings, one for each turn that shows media, in order (`media_parts`). Rows that are sampled
from one prompt hold the same tensor objects: rows share media if the objects are identical.

In a layout, ``inputs`` are a row's ``multi_modal_inputs``, or part of them. A kind is one of `TOKEN_TYPES`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataproto.columns import RowMedia, media_parts
from dataproto.errors import InvalidConfig, InvalidMedia, MediaMismatch, raised_as
from dataproto.transfer import joined, move
from dataproto.vlm.positions import TOKEN_TYPES

Ids = npt.NDArray[np.int64]
Options = Mapping[str, Any]
"""Keywords of an image processor, see `MediaLayout.processor_options`."""
MAX_ASPECT_RATIO = 200


class MediaLayout(Protocol):
    """How a family's images and videos are laid out. The tower reads them as grids ``(N, 3)`` of patches (time, height, width).
    ``merge_size ** 2`` patches become one feature; patches attend to each other within a time step of their grid. A sound of n
    frames is a grid ``(1, 1, n)``, which no image has, since its sides are even.
    """

    image_names: ClassVar[tuple[str, ...]] = ()
    video_names: ClassVar[tuple[str, ...]] = ()
    audio_names: ClassVar[tuple[str, ...]] = ()

    def names(self, kind: str) -> tuple[str, ...]:
        """Arguments of the Hugging Face forward, each joined along its first dimension, pixels first. Empty if the family has no
        media of this kind: prompts may show a video's frames as images.
        """
        return {"image": self.image_names, "video": self.video_names, "audio": self.audio_names}[kind]

    def holds(self, kind: str, inputs: Mapping[str, Any]) -> bool:
        """Whether the inputs have media of this kind. Raises `MediaMismatch` if they have only some of its arguments."""
        given = [name for name in self.names(kind) if inputs.get(name) is not None]
        if given and len(given) < len(self.names(kind)):
            missing = ", ".join(name for name in self.names(kind) if name not in given)
            raise MediaMismatch(f"{', '.join(given)} without {missing}")
        return bool(given)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that the family has, in the order of their features."""
        return tuple(kind for kind in TOKEN_TYPES if self.names(kind))

    def merge_size(self, config: Any) -> int:
        """Patches along each side of a feature."""
        ...

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """Grids ``(N, 3)`` int64 that the tower reads. Raises `MediaMismatch` if the inputs contradict each other."""
        ...

    def feature_counts(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Ids:
        """Number of features ``(M,)`` int64 of each medium. Default: each grid is one medium."""
        return np.asarray(self.grid_features(self.grids(kind, inputs, config).cpu(), config))

    def grid_features(self, grids: Tensor, config: Any) -> Tensor:
        """Number of features ``(N,)`` int64 that the tower makes of grids ``(N, 3)``."""
        return grids.prod(-1) // self.merge_size(config) ** 2

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Keywords that make the image processor keep these limits (default: its own). Raises `InvalidConfig`."""
        ...

    def image_inputs(self, made: Mapping[str, Any]) -> dict[str, Tensor]:
        """The inputs of one image, from what the image processor makes of it. Default: those that the forward takes."""
        return {name: made[name] for name in self.names("image")}

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """Number of features of an image of this size in pixels, which is not empty, processed with the options. Raises
        `InvalidMedia` for a size that the processor refuses.
        """
        ...

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """Inputs of the smallest image, all zero; of a family with sounds, of the smallest sound too."""
        ...


@dataclass(frozen=True)
class PatchGrids(MediaLayout):
    """The layout of Qwen-VL's processors: patches ``(patches, dim)`` of media of any size, one medium after another, and their
    grids ``(media, 3)``.
    """

    image_names = ("pixel_values", "image_grid_thw")
    video_names: ClassVar[tuple[str, ...]] = ("pixel_values_videos", "video_grid_thw")

    def merge_size(self, config: Any) -> int:
        """From the config of the tower."""
        return int(config.vision_config.spatial_merge_size)

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """The grids of the inputs, compared with the pixels if those are present."""
        names = self.names(kind)
        if all(inputs.get(name) is None for name in names):
            return torch.zeros(0, 3, dtype=torch.int64)
        pixel_name, grid_name = names
        if inputs.get(grid_name) is None:
            raise MediaMismatch(f"{pixel_name} without {grid_name}")
        grid, merge = torch.as_tensor(inputs[grid_name]).long(), self.merge_size(config)
        if grid.ndim != 2 or grid.shape[-1] != 3 or bool((grid[:, 1:] % merge).any()):
            raise MediaMismatch(f"{kind} grid {grid.tolist()} is not (N, 3) with height and width divisible by {merge}")
        patches, pixels = int(grid.prod(-1).sum()), inputs.get(pixel_name)
        if pixels is not None and patches != len(pixels):
            raise MediaMismatch(f"{kind} grid {grid.tolist()} counts {patches} patches, but there are {len(pixels)}")
        return grid

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Limits of an image's area."""
        least = int(processor.size["shortest_edge"] if min_pixels is None else min_pixels)
        most = int(processor.size["longest_edge"] if max_pixels is None else max_pixels)
        check_limits(least, most)
        return {"size": {"shortest_edge": least, "longest_edge": most}}

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """Computed by `image_grid`."""
        size, merge = options["size"], self.merge_size(config)
        patch = int(config.vision_config.patch_size)
        rows, columns = image_grid(height, width, size["shortest_edge"], size["longest_edge"], patch, merge)
        return rows * columns // merge**2

    def patch_shape(self, vision: Any) -> tuple[int, ...]:
        """The shape of a patch, by the config of the tower."""
        return (vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,)

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """An image of one feature."""
        merge, shape = self.merge_size(config), self.patch_shape(config.vision_config)
        return {"pixel_values": torch.zeros(merge**2, *shape), "image_grid_thw": torch.tensor([[1, merge, merge]])}


PATCH_GRIDS = PatchGrids()


@dataclass(frozen=True)
class ShrunkImages(PatchGrids):
    """`PatchGrids` of only images, which the processor makes smaller down to a number of units, and never enlarges."""

    video_names = ()
    limit: ClassVar[str]
    """The processor's setting for the largest number of units."""
    unit: ClassVar[str]
    """What they are."""

    def unit_area(self, processor: Any) -> int:
        """The area of a unit in pixels."""
        raise NotImplementedError

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """The limit of an image's area, in units."""
        if min_pixels is not None:
            raise InvalidConfig(f"min_pixels={min_pixels}: images of this family are never enlarged; leave it out")
        if max_pixels is None:
            return {self.limit: int(getattr(processor, self.limit))}
        area = self.unit_area(processor)
        if max_pixels < area:
            raise InvalidConfig(f"max_pixels={max_pixels}: must be at least {area}, one {self.unit}")
        return {self.limit: max_pixels // area}


@dataclass(frozen=True)
class EqualImages(MediaLayout):
    """Images, or parts of them, of one size, each of which is one grid of patches."""

    image_names = ("pixel_values",)

    def shape(self, config: Any) -> tuple[int, ...]:
        """The shape of one, of which height and width come last."""
        raise NotImplementedError

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """One for each."""
        pixels, shape = inputs.get("pixel_values") if kind == "image" else None, self.shape(config)
        if pixels is not None and tuple(pixels.shape[1:]) != shape:
            raise MediaMismatch(f"images {tuple(pixels.shape)} are not (N, {', '.join(map(str, shape))})")
        sides = np.array(shape[-2:]) // config.vision_config.patch_size
        return torch.tensor([[1, *sides.tolist()]]).expand(0 if pixels is None else len(pixels), 3)

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """One."""
        return {"pixel_values": torch.zeros(1, *self.shape(config))}


@dataclass(frozen=True)
class PartedImages(MediaLayout):
    """Images that are shown whole and, unless they are small, again in parts, each of which is one grid.

    A row also has the rows and columns of each image's parts, ``(images, 2)`` int64, 0 and 0 without parts: the prompt depends on
    them, the tower does not.
    """

    parts_name: ClassVar[str]
    """The name of these."""

    def part_counts(self, inputs: Mapping[str, Any], config: Any) -> Ids:
        """Number of features of each image and each part."""
        return super().feature_counts("image", inputs, config)

    def feature_counts(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Ids:
        """Those of the whole image and of its parts."""
        counts, name = super().feature_counts(kind, inputs, config), self.parts_name
        if not len(counts):
            return counts
        if inputs.get(name) is None:
            parts = name.removeprefix("image_")
            raise MediaMismatch(f"{self.image_names[-1]} without {name}, the rows and columns of each image's {parts}")
        numbers = 1 + np.asarray(inputs[name].cpu()).prod(1)
        if numbers.sum() != len(counts):
            raise MediaMismatch(f"{name} counts {numbers.sum()} parts of images, but there are {len(counts)}")
        return np.add.reduceat(counts, numbers.cumsum() - numbers)


def check_limits(min_pixels: int, max_pixels: int) -> None:
    """Raises `InvalidConfig` unless ``0 < min_pixels <= max_pixels``."""
    if not 0 < min_pixels <= max_pixels:
        raise InvalidConfig(f"min_pixels={min_pixels} and max_pixels={max_pixels}: must be 0 < min <= max")


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


# Media of rows

FeatureCounts = Callable[[Mapping[str, Any]], tuple[int, ...]]
"""From a mapping of media to its number of features of each of the family's kinds."""


@dataclass(frozen=True)
class MediaSpans:
    """Which feature belongs to which media token.

    ``positions (M,)`` int64, ascending, are the indices of the media tokens in the flattened ``(B, L)`` or ``(1, T)`` sequence.
    ``features (M,)`` int64 are the indices of their features in ``[image features, video features, sound features]``. Several
    positions may name one feature; its gradient is the sum over them.
    """

    positions: Tensor
    features: Tensor

    def __len__(self) -> int:
        return len(self.positions)

    def window(self, start: int, stop: int) -> "MediaSpans":
        """The spans of the part from ``start`` to ``stop`` of the sequence, with positions relative to ``start``.

        >>> spans = MediaSpans(torch.tensor([1, 2, 5]), torch.tensor([0, 1, 0]))
        >>> spans.window(2, 6).positions.tolist(), spans.window(2, 6).features.tolist()
        ([0, 3], [1, 0])
        """
        inside = (self.positions >= start) & (self.positions < stop)
        return MediaSpans(self.positions[inside] - start, self.features[inside])

    def to(self, device: torch.device | str) -> "MediaSpans":
        """The same spans on another device."""
        return MediaSpans(move(self.positions, device), move(self.features, device))


@dataclass(frozen=True)
class DistinctMedia:
    """Media of a batch without repetition.

    ``inputs`` are the distinct tensors, joined, under the names of the Hugging Face forward's arguments (empty without media).
    ``images`` and ``videos`` ``(K, 2)`` int64 hold, for each part of each row's media (`media_parts`), the index of its first
    feature in ``[image features, video features, sound features]`` and the number of its features; ``sounds``
    too. ``parts (B,)`` int64 are the numbers of parts of the rows; by default every row has one.
    """

    inputs: dict[str, Tensor]
    images: Tensor
    videos: Tensor
    parts: Tensor | None = None
    sounds: Tensor | None = None


def distinct_media(rows: Sequence[RowMedia], layout: MediaLayout, config: Any) -> DistinctMedia:
    """Join the media of ``rows``, each distinct tensor object once, images first. ``config`` is the model's.

    Raises `MediaMismatch` with the row's number.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    >>> one = {"pixel_values": torch.zeros(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    >>> media = distinct_media([one, {}, one], PatchGrids(), config)
    >>> media.inputs["pixel_values"].shape, media.images.tolist()
    (torch.Size([8, 3]), [[0, 2], [0, 0], [0, 2]])
    """
    inputs: dict[str, Tensor] = {}
    tables: list[Tensor] = []
    parts = [media_parts(row) for row in rows]
    numbered = [(number, part) for number, row in enumerate(parts) for part in row]
    start = 0
    for kind in TOKEN_TYPES:
        names = layout.names(kind)
        distinct: dict[tuple[int, ...], Mapping[str, Any]] = {}
        places: dict[tuple[int, ...], list[int]] = {}
        table = []
        for number, row in numbered:
            with raised_as(MediaMismatch, f"row {number}", MediaMismatch):
                if not layout.holds(kind, row):
                    table.append([0, 0])
                    continue
                key = tuple(id(row[name]) for name in names)
                if key not in distinct:
                    count = int(layout.feature_counts(kind, row, config).sum())
                    distinct[key], places[key] = row, [start, count]
                    start += count
            table.append(places[key])
        if distinct:
            inputs |= {name: joined([row[name] for row in distinct.values()]) for name in names}
        tables.append(torch.tensor(table, dtype=torch.int64).view(-1, 2))
    images, videos, sounds = tables
    return DistinctMedia(inputs, images, videos, torch.tensor([len(row) for row in parts], dtype=torch.int64), sounds)


def distinct_parts(rows: Iterable[RowMedia], layout: MediaLayout) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The kind and the inputs of each distinct medium of the rows, in the order of `distinct_media`.

    >>> cat = {"pixel_values": torch.ones(4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    >>> [kind for kind, _ in distinct_parts([cat, dict(cat), {}], PATCH_GRIDS)]
    ['image']
    """
    parts = [part for row in rows for part in media_parts(row)]
    for kind in layout.kinds:
        seen: set[tuple[int, ...]] = set()
        for part in parts:
            objects = tuple(id(part[name]) for name in layout.names(kind) if part.get(name) is not None)
            if objects and objects not in seen:
                seen.add(objects)
                yield kind, part


def media_spans(token_types: Tensor, media: DistinctMedia, cu_seqlens: Tensor | None = None) -> MediaSpans:
    """Assign each media token of ``token_types`` its feature.

    ``token_types`` is ``(B, L)`` with the rows of ``media``, or ``(1, T)`` with these rows packed one after another at the bounds
    ``cu_seqlens (rows + 1,)``. Padding has type 0. Raises `MediaMismatch` with the row and both numbers if tokens and features of
    a row differ in number.

    >>> media = DistinctMedia({}, images=torch.tensor([[0, 2], [0, 2]]), videos=torch.zeros(2, 2, dtype=torch.int64))
    >>> spans = media_spans(torch.tensor([[0, 1, 1], [1, 1, 0]]), media)
    >>> spans.positions.tolist(), spans.features.tolist()
    ([1, 2, 3, 4], [0, 1, 0, 1])
    """
    if cu_seqlens is None:
        cu_seqlens = torch.arange(len(token_types) + 1) * token_types.shape[-1]
    types = token_types.reshape(-1)
    bounds = cu_seqlens.long().to(types.device)
    parts = torch.ones(len(media.images), dtype=torch.int64) if media.parts is None else media.parts
    if len(bounds) != len(parts) + 1 or int(bounds[-1]) != len(types):
        raise MediaMismatch(
            f"{len(parts)} rows of media, but {len(bounds) - 1} rows of tokens, "
            f"which end at {int(bounds[-1])} of {len(types)}"
        )
    rows = torch.arange(len(parts)).repeat_interleave(parts).to(types.device)  # The row of each part.
    features = torch.full_like(types, -1, dtype=torch.int64)
    sounds = torch.zeros_like(media.images) if media.sounds is None else media.sounds
    for (name, kind), table in zip(TOKEN_TYPES.items(), (media.images, media.videos, sounds), strict=True):
        table = table.to(types.device)
        chosen = types == kind
        before = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))
        found = before[bounds].diff()
        made = torch.zeros_like(found).index_add_(0, rows, table[:, 1])
        wrong = (found != made).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise MediaMismatch(
                f"row {row}: {int(found[row])} {name} placeholder tokens, but its media makes {int(made[row])} features"
            )
        # The media tokens of a kind lie in the order of the parts.
        shift = table[:, 0] - (table[:, 1].cumsum(0) - table[:, 1])
        features[chosen] = before[:-1][chosen] + torch.repeat_interleave(shift, table[:, 1])
    positions = (features >= 0).nonzero().squeeze(-1)
    return MediaSpans(positions, features[positions])


def split_media(row: RowMedia, counts: tuple[int, ...], count: FeatureCounts) -> tuple[RowMedia, RowMedia] | None:
    """A row's first media, which make ``counts`` features of each kind, and the others; ``None`` if a mapping has features of
    both.

    >>> sizes = {"a": (4, 0), "b": (2, 0)}
    >>> split_media(({"x": "a"}, {"x": "b"}), (4, 0), lambda part: sizes[part["x"]])
    (({'x': 'a'},), ({'x': 'b'},))
    >>> split_media({"x": "a"}, (2, 0), lambda part: sizes[part["x"]]) is None
    True
    """
    parts = media_parts(row)
    found = np.zeros_like(counts)
    for number, part in enumerate((*parts, {})):
        if (found == counts).all():
            return tuple(parts[:number]), tuple(parts[number:])
        found += count(part) if part else 0
    return None


def media_grids(rows: Iterable[RowMedia]) -> dict[str, Tensor | None]:
    """The media arguments of `VLMFamily.position_ids`: grids and video timing of all rows in row order, with repetitions.
    ``None`` if no row has any.

    >>> one = {"image_grid_thw": torch.tensor([[1, 2, 4]])}
    >>> media_grids([one, {}, one])["image_grid_thw"].tolist()
    [[1, 2, 4], [1, 2, 4]]
    """
    grids: dict[str, Tensor | None] = {}
    parts_of_rows = [part for row in rows for part in media_parts(row)]
    for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
        parts = [torch.as_tensor(part[name]) for part in parts_of_rows if part.get(name) is not None]
        grids[name] = torch.cat(parts) if parts else None
    return grids


def place(embeddings: Tensor, features: Tensor, spans: MediaSpans) -> Tensor:
    """``embeddings (B, L, H)`` with ``features (F, H)`` written at the spans, out of place, so that both get gradients.

    >>> spans = MediaSpans(torch.tensor([1, 2]), torch.tensor([0, 0]))
    >>> place(torch.zeros(1, 3, 2), torch.ones(1, 2), spans)[0].tolist()
    [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    """
    chosen = features.index_select(0, spans.features).to(embeddings.dtype)
    return embeddings.flatten(0, 1).index_copy(0, spans.positions, chosen).view_as(embeddings)


def dense_levels(features: Tensor, tokens: int, spans: MediaSpans) -> Tensor:
    """``features (F, levels, H)`` written at the spans of a sequence of ``tokens``, zero elsewhere: ``(levels, tokens, H)``."""
    chosen = features.index_select(0, spans.features).transpose(0, 1)
    return features.new_zeros(features.shape[1], tokens, features.shape[2]).index_copy(1, spans.positions, chosen)
