"""Features of media by towers that are not trained, computed once for all passes of a step."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dataproto.columns import RowMedia
from dataproto.vlm import VLMFamily
from dataproto.vlm.media import distinct_parts

MAX_BYTES = 1 << 30  # of the features that are kept at a time
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Medium:
    """One kind, such as images, of a mapping of media, without what the other kinds have of it."""

    inputs: Mapping[str, Any]
    names: tuple[str, ...]  # of the tensors that the tower takes
    count: int  # of its features

    @property
    def key(self) -> Key:
        """Equal for the same memory, also where a process has received it twice."""
        return tuple(_place(self.inputs[name]) for name in self.names)


def _place(value: Tensor) -> Key:
    version = 0 if value.is_inference() else value._version
    return value.data_ptr(), tuple(value.shape), value.dtype, version


@dataclass(frozen=True)
class HeldFeatures:
    """Features of media, of which each of the ranks that share their tokens holds those that it has computed."""

    mine: Tensor  # (n, levels, H) of this rank, in the order of all
    holders: Tensor  # (F,) int64 on the host: the rank that holds each feature
    rank: int = 0  # this one

    def split(self, counts: Sequence[int]) -> list["HeldFeatures"]:
        """Parts of consecutive features, by their numbers.

        >>> held = HeldFeatures(torch.tensor([1.0, 2.0]).view(2, 1, 1), torch.tensor([1, 0, 0]))
        >>> [(part.mine.flatten().tolist(), part.holders.tolist()) for part in held.split([2, 1])]
        [([1.0], [1, 0]), ([2.0], [0])]
        """
        holders = self.holders.split(list(counts))
        mine = self.mine.split([int((part == self.rank).sum()) for part in holders])
        return [replace(self, mine=each, holders=part) for each, part in zip(mine, holders, strict=True)]


@dataclass(frozen=True)
class Wanted:
    """The media of a micro-batch in the order of their features, and the inputs of those that are not kept yet."""

    media: Sequence[Medium]
    missing: Sequence[Medium]
    inputs: dict[str, Tensor]
    kept: dict[Key, tuple[Medium, HeldFeatures]] = field(repr=False)
    chosen: Set[Key] = field(repr=False)  # those to keep

    def joined(self, features: HeldFeatures | None) -> HeldFeatures | None:
        """The features of all media.

        Args:
            features: of the missing ones, which are kept from now on if they are chosen; without any they are those of a dummy
                image, or ``None``.
        """
        if not self.media:
            return features
        found: dict[Key, HeldFeatures] = {}
        if self.missing:
            assert features is not None
            parts = replace(features, mine=features.mine.detach()).split([medium.count for medium in self.missing])
            found = {medium.key: part for medium, part in zip(self.missing, parts, strict=True)}
        every = [found[key] if key in found else self.kept[key][1] for key in (m.key for m in self.media)]
        mine, holders = (torch.cat(parts) for parts in zip(*((held.mine, held.holders) for held in every), strict=True))
        for medium in self.missing:
            if medium.key in self.chosen:  # a copy, since a part is a view that would keep the memory of all
                held = found[medium.key]
                self.kept[medium.key] = medium, replace(held, mine=held.mine.clone())
        return replace(every[0], mine=mine, holders=holders)


class KeptFeatures:
    """Features of the media of a step, of a limited size; `clear` forgets them.

    The media's tensors are kept too, so that their memory tells what they are.
    """

    def __init__(self, family: VLMFamily, config: Any, dtype: torch.dtype, max_bytes: int = MAX_BYTES) -> None:
        """At most ``max_bytes`` of features, in ``dtype``, are kept at a time; ranks that share tokens keep a part each."""
        self.family, self.config, self.max_bytes = family, config, max_bytes
        levels, width = 1 + family.deep_layers(config), int(config.get_text_config().hidden_size)
        self.bytes_of_one = levels * width * dtype.itemsize
        self._kept: dict[Key, tuple[Medium, HeldFeatures]] = {}
        self._chosen: set[Key] = set()

    def clear(self) -> None:
        """Forgets all features."""
        self._kept.clear()
        self._chosen = set()

    def plan(self, parts: Sequence[Sequence[RowMedia]]) -> list[bool]:
        """Whether the tower runs for each micro-batch of a call, from the media of its rows.

        The first media of the call are kept, as many as there is room for, and those of earlier calls that leave it; nothing is
        forgotten before the next call.
        """
        media = [{medium.key: medium for medium in self._media(rows)} for rows in parts]
        sizes = {key: medium.count * self.bytes_of_one for part in media for key, medium in part.items()}
        earlier = {key: medium.count * self.bytes_of_one for key, (medium, _) in reversed(self._kept.items())}
        chosen: set[Key] = set()
        used = 0
        for key, size in (sizes | earlier).items():
            if used + size <= self.max_bytes:
                chosen.add(key)
                used += size
        for key in self._kept.keys() - chosen:
            del self._kept[key]
        self._chosen = chosen
        known, runs = set(self._kept), []
        for part in media:
            runs.append(not part.keys() <= known)
            known |= part.keys() & chosen
        return runs

    def wanted(self, rows: Sequence[RowMedia], joined: dict[str, Tensor]) -> Wanted:
        """What a micro-batch with these media needs; ``joined`` are all its media, joined by `VLMFamily.distinct_media`."""
        media = list(self._media(rows))
        missing = [medium for medium in media if medium.key not in self._kept]
        inputs = joined
        if len(missing) < len(media):
            inputs = self.family.distinct_media([medium.inputs for medium in missing], self.config).inputs
        return Wanted(media, missing, inputs, self._kept, self._chosen)

    def _media(self, rows: Sequence[RowMedia]) -> Iterator[Medium]:
        """Each distinct medium once, in the order of `VLMFamily.distinct_media`."""
        layout = self.family.media_layout
        for kind, part in distinct_parts(rows, layout):
            others = {name for other in layout.kinds if other != kind for name in layout.names(other)}
            inputs = {name: value for name, value in part.items() if name not in others}
            count = int(layout.feature_counts(kind, inputs, self.config).sum())
            yield Medium(inputs, layout.names(kind), count)


def keeps_features(model: torch.nn.Module, family: VLMFamily) -> bool:
    """Whether the model has a vision tower and trains nothing of it."""
    parts = [model.get_submodule(path) for path in family.vision_parts]
    return bool(parts) and not any(weight.requires_grad for part in parts for weight in part.parameters())
