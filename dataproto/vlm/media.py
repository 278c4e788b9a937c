"""Rows and the media they point at: features computed once, used by every row that shares them.

A row's media is its ``multi_modal_inputs``: ``{"pixel_values": (patches, dim), "image_grid_thw": (images, 3)}`` and the
same for video; ``{}`` for text. Rows sampled from one prompt hold the same tensor objects, which is how sharing is
seen.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import MediaMismatch
from dataproto.vlm.mrope import IMAGE, VIDEO

_KINDS = (("pixel_values", "image_grid_thw", "image"), ("pixel_values_videos", "video_grid_thw", "video"))


@dataclass(frozen=True)
class MediaSpans:
    """Where features go: ``positions (M,)`` int64, ascending, index the flattened ``(B, L)`` or ``(1, T)`` sequence,
    one a media token; ``features (M,)`` int64 is the row of ``[image features, video features]`` that belongs there.

    Several positions may name one feature; its gradient is then the sum over them.
    """

    positions: Tensor
    features: Tensor

    def __len__(self) -> int:
        return len(self.positions)

    def window(self, start: int, stop: int) -> "MediaSpans":
        """The spans of the part ``start`` to ``stop`` of the sequence, counted from its beginning.

        >>> spans = MediaSpans(torch.tensor([1, 2, 5]), torch.tensor([0, 1, 0]))
        >>> spans.window(2, 6).positions.tolist(), spans.window(2, 6).features.tolist()
        ([0, 3], [1, 0])
        """
        inside = (self.positions >= start) & (self.positions < stop)
        return MediaSpans(self.positions[inside] - start, self.features[inside])

    def to(self, device: torch.device | str) -> "MediaSpans":
        """The same spans on another device."""
        return MediaSpans(self.positions.to(device), self.features.to(device))


@dataclass(frozen=True)
class DistinctMedia:
    """Media of a batch without repetition.

    ``inputs``: distinct tensors joined, under the names of the HF forward's arguments (absent where there are none).
    ``images`` and ``videos`` ``(B, 2)`` int64: of each row, the first feature in ``[image features, video features]``
    and how many.
    """

    inputs: dict[str, Tensor]
    images: Tensor
    videos: Tensor


def distinct_media(rows: Sequence[Mapping[str, Any]], merge_size: int) -> DistinctMedia:
    """Join the media of ``rows``, each distinct tensor object once, images first.

    >>> one = {"pixel_values": torch.zeros(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    >>> media = distinct_media([one, {}, one], merge_size=2)
    >>> media.inputs["pixel_values"].shape, media.images.tolist()
    (torch.Size([8, 3]), [[0, 2], [0, 0], [0, 2]])
    """
    inputs: dict[str, Tensor] = {}
    tables: list[Tensor] = []
    start = 0
    for pixel_name, grid_name, kind in _KINDS:
        distinct: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        places: dict[tuple[int, int], list[int]] = {}
        table = []
        for number, row in enumerate(rows):
            pixels, grid = row.get(pixel_name), row.get(grid_name)
            if pixels is None and grid is None:
                table.append([0, 0])
                continue
            if pixels is None or grid is None:
                missing, other = (pixel_name, grid_name) if pixels is None else (grid_name, pixel_name)
                raise MediaMismatch(f"row {number}: {other} without {missing}")
            key = (id(pixels), id(grid))
            if key not in distinct:
                count = _feature_count(pixels, grid, merge_size, f"row {number}: {kind}")
                distinct[key], places[key] = (pixels, grid), [start, count]
                start += count
            table.append(places[key])
        if distinct:
            inputs[pixel_name] = torch.cat([pixels for pixels, _ in distinct.values()])
            inputs[grid_name] = torch.cat([grid for _, grid in distinct.values()])
        tables.append(torch.tensor(table, dtype=torch.int64).view(-1, 2))
    return DistinctMedia(inputs, *tables)


def media_spans(token_types: Tensor, media: DistinctMedia, cu_seqlens: Tensor | None = None) -> MediaSpans:
    """Give each media token of ``token_types`` its feature.

    ``token_types`` is ``(B, L)`` with the rows of ``media``, or ``(1, T)`` with those rows packed one after another,
    whose bounds ``cu_seqlens (rows + 1,)`` then tells. Padding has type 0. Raises `MediaMismatch` naming the row and
    both numbers.

    >>> one = {"pixel_values": torch.zeros(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    >>> spans = media_spans(torch.tensor([[0, 1, 1], [1, 1, 0]]), distinct_media([one, one], merge_size=2))
    >>> spans.positions.tolist(), spans.features.tolist()
    ([1, 2, 3, 4], [0, 1, 0, 1])
    """
    if cu_seqlens is None:
        cu_seqlens = torch.arange(len(token_types) + 1) * token_types.shape[-1]
    types = token_types.reshape(-1)
    bounds = cu_seqlens.long().to(types.device)
    if len(bounds) != len(media.images) + 1 or int(bounds[-1]) != len(types):
        raise MediaMismatch(
            f"{len(media.images)} rows of media, but {len(bounds) - 1} rows of tokens, "
            f"which end at {int(bounds[-1])} of {len(types)}"
        )
    features = torch.full_like(types, -1, dtype=torch.int64)
    for kind, table, name in ((IMAGE, media.images, "image"), (VIDEO, media.videos, "video")):
        table = table.to(types.device)
        chosen = types == kind
        before = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))
        found = before[bounds].diff()
        wrong = (found != table[:, 1]).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise MediaMismatch(
                f"row {row}: {int(found[row])} {name} placeholder tokens, "
                f"but its media makes {int(table[row, 1])} features"
            )
        shift = table[:, 0] - before[bounds[:-1]]
        features[chosen] = before[:-1][chosen] + torch.repeat_interleave(shift, table[:, 1])
    positions = (features >= 0).nonzero().squeeze(-1)
    return MediaSpans(positions, features[positions])


def media_grids(rows: Iterable[Mapping[str, Any]]) -> dict[str, Tensor | None]:
    """The media arguments of `VLMFamily.position_ids`: grids and video timing of all rows in row order, with
    repetitions, and None where no row has any.

    >>> one = {"image_grid_thw": torch.tensor([[1, 2, 4]])}
    >>> media_grids([one, {}, one])["image_grid_thw"].tolist()
    [[1, 2, 4], [1, 2, 4]]
    """
    grids: dict[str, Tensor | None] = {}
    rows = list(rows)
    for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
        parts = [torch.as_tensor(row[name]) for row in rows if row.get(name) is not None]
        grids[name] = torch.cat(parts) if parts else None
    return grids


def _feature_count(pixels: Tensor, grid: Tensor, merge_size: int, where: str) -> int:
    """Features that one row's media makes; `MediaMismatch` unless pixels and grid belong together."""
    if grid.ndim != 2 or grid.shape[-1] != 3 or bool((grid[:, 1:] % merge_size).any()):
        raise MediaMismatch(
            f"{where} grid {grid.tolist()} is not (N, 3) with height and width divisible by {merge_size}"
        )
    patches = int(grid.prod(-1).sum())
    if patches != len(pixels):
        raise MediaMismatch(f"{where} grid {grid.tolist()} counts {patches} patches, but there are {len(pixels)}")
    return patches // merge_size**2
