"""Rows with adapters as one packed sequence, in which rows that begin alike have their beginning once.

Letters: N tokens of a row, T packed tokens of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dataproto.packing import PackedRows
from rollout.adapters import Adapter, Run
from rollout.image_features import KeyedImage
from rollout.prompts import PlacedSequence

FEWEST_SHARED = 32
"""Tokens of a beginning that is worth sharing: the keys of all rows are then gathered in every layer."""


class AdaptedRow(Protocol):
    """A row and its adapter."""

    @property
    def rendered(self) -> PlacedSequence: ...

    @property
    def adapter(self) -> Adapter | None: ...


Row = TypeVar("Row", bound=AdaptedRow)


def shared_tokens(before: AdaptedRow, row: AdaptedRow) -> int:
    """How many tokens at the beginning of a row are those of the row before it, with the same adapter; 0 for a few.

    Their states are the same, since no token sees a later one. The last token of a row is never shared. A beginning with images
    is shared by rows that have the same images, and none after it.
    """
    one, two = before.rendered, row.rendered
    most = min(len(one), len(two) - 1)
    if before.adapter is not row.adapter or most < FEWEST_SHARED:
        return 0
    equal = (one.input_ids[:most] == two.input_ids[:most]) & (one.token_types[:most] == two.token_types[:most])
    equal &= (one.position_ids[..., :most] == two.position_ids[..., :most]).reshape(-1, most).all(0)
    shared = most if bool(equal.all()) else int(equal.int().argmin())
    media = two.token_types.nonzero().squeeze(1)
    if len(media) and (shared <= int(media[-1]) or [i.key for i in one.images] != [i.key for i in two.images]):
        shared = min(shared, int(media[0]))
    return shared if shared >= FEWEST_SHARED else 0


@dataclass(frozen=True)
class PackedPart(Generic[Row]):
    """Rows of which one pass over the base is made; those of one adapter follow each other."""

    rows: Sequence[Row]

    @cached_property
    def shared(self) -> list[int]:
        """Tokens of each row that are those of the row before it; see `shared_tokens`."""
        return [shared_tokens(self.rows[n - 1], row) if n else 0 for n, row in enumerate(self.rows)]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens that each row adds to the packed ones."""
        return [len(row.rendered) - shared for row, shared in zip(self.rows, self.shared, strict=True)]

    @property
    def runs(self) -> list[Run]:
        """The packed tokens of each row with its adapter."""
        return [(row.adapter, length) for row, length in zip(self.rows, self.lengths, strict=True)]

    @cached_property
    def places(self) -> list[Tensor]:
        """For each row, where its tokens are among the packed ones, ``(N,)`` int64."""
        found: list[Tensor] = []
        start = 0
        for shared, length in zip(self.shared, self.lengths, strict=True):
            own = torch.arange(start, start + length)
            found.append(torch.cat([found[-1][:shared], own]) if shared else own)
            start += length
        return found

    @property
    def images(self) -> list[Sequence[KeyedImage]]:
        """The images of the packed tokens of each row."""
        behind = (bool((row.rendered.token_types[shared:] != 0).any()) for row, shared in zip(self.rows, self.shared))
        return [row.rendered.images if any_ else () for row, any_ in zip(self.rows, behind)]

    def packed(self) -> PackedRows:
        """The packed rows; every token predicts something."""
        rows, shared = [row.rendered for row in self.rows], self.shared
        pairs = list(zip(rows, shared, strict=True))
        bounds, longest = _bounds(self.lengths)
        key_bounds, key_longest = _bounds([len(row) for row in rows])
        ids = torch.cat([row.input_ids[n:] for row, n in pairs])
        every = torch.arange(len(ids))
        return PackedRows(
            input_ids=ids[None],
            position_ids=torch.cat([row.position_ids[..., n:] for row, n in pairs], dim=-1).unsqueeze(-2),
            token_types=torch.cat([row.token_types[n:] for row, n in pairs])[None],
            cu_seqlens=bounds,
            max_length=longest,
            key_index=torch.cat(self.places) if any(shared) else None,
            key_cu_seqlens=key_bounds,
            key_max_length=key_longest,
            predictors=every,
            targets=ids,
            response_cells=every,
        )


def _bounds(lengths: Sequence[int]) -> tuple[Tensor, int]:
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths).cumsum(0)
    return bounds, max(lengths)
