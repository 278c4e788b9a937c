"""The towers' work, split by whole media over the ranks that share their rows (sp x tp).

Each rank encodes its part of the micro-batch's distinct images, videos and sounds, of about equal cost, and holds their features.
Before they are placed, each feature is sent to the ranks whose tokens need it, and to no others; so no rank's device has the
pixels or the features of all media. A tower's weights see a part of the media on each rank, so their gradients are sums over
sp x tp: FSDP sums over dp x sp, `workers.parallel.tensor.TensorParallel.sum_gradients` over tp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto.planning import balance
from dataproto.transfer import move, pixels_on
from dataproto.vlm import MediaSpans
from workers.model.kept_features import HeldFeatures
from workers.model.packed_model import MediaPart, PackedVLM, TowerFeatures, select_rows
from workers.parallel.transform import Transform
from workers.ranks.autograd_collectives import Peers, exchange_rows


class VisionSplit(Transform):
    """Images, videos and sounds, split over sp x tp."""

    axes = ("sp", "tp")

    def apply(self, module: PackedVLM) -> None:
        """Gives ``module`` a `SplitFeatures`."""
        module.features = SplitFeatures(module.family, Peers.of(self.mesh.get_group()))


@dataclass(frozen=True)
class SplitFeatures(TowerFeatures):
    """`TowerFeatures` of several ranks that are given the same media.

    A rank without a part encodes the smallest image and drops its features, so that sharded weights are gathered on all ranks;
    its gradient is zero.
    """

    peers: Peers

    def share(self, config: Any, media: Mapping[str, Tensor], device: torch.device) -> MediaPart:
        """This rank's part of the media, or a dummy image."""
        family = self.family
        layout = family.media_layout
        kinds = {kind: layout.grids(kind, media, config).cpu() for kind in layout.kinds}
        grids = torch.cat(list(kinds.values()))
        counts = layout.grid_features(grids, config)
        holders = torch.empty(len(grids), dtype=torch.int64)
        for rank, share in enumerate(balance(family.vision_flops(config, grids).sum(1), self.peers.size)):
            holders[torch.from_numpy(share)] = rank
        mine = (holders == self.rank).nonzero().squeeze(1)
        inputs = self._part(media, mine, kinds) if len(mine) else family.dummy_media(config)
        return MediaPart(pixels_on(inputs, device), holders.repeat_interleave(counts), used=len(mine) > 0)

    def deliver(self, held: HeldFeatures, windows: Sequence[MediaSpans]) -> tuple[Tensor, MediaSpans]:
        """Sends each feature to the ranks whose windows name it."""
        here = windows[self.rank]
        needed = [window.features.unique() for window in windows]
        if not any(map(len, needed)):  # the features of a dummy image
            return held.mine[:0], here
        mine = (held.holders == held.rank).nonzero().squeeze(1)
        sent = [features[held.holders[features] == held.rank] for features in needed]
        holders = held.holders[needed[held.rank]]
        order = torch.argsort(holders, stable=True)  # in which the features of this rank arrive
        received = torch.bincount(holders, minlength=self.peers.size).tolist()
        index = move(torch.searchsorted(mine, torch.cat(sent)), held.mine.device)
        features = exchange_rows(select_rows(held.mine.flatten(1), index), list(map(len, sent)), received, self.peers)
        places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
        chosen = places[torch.searchsorted(needed[held.rank], here.features)]
        return features.unflatten(1, held.mine.shape[1:]), MediaSpans(here.positions, chosen)

    @property
    def rank(self) -> int:
        return self.peers.rank

    def _part(self, media: Mapping[str, Tensor], chosen: Tensor, kinds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of the chosen grids ``(n,)``, which count through all kinds, ``(N, 3)`` each."""
        inputs: dict[str, Tensor] = {}
        first = 0
        for kind, grids in kinds.items():
            here = torch.isin(torch.arange(first, first + len(grids)), chosen)
            first += len(grids)
            for name in self.family.media_layout.names(kind) if bool(here.any()) else ():
                # Rows of a tensor are the grids' own, or those of their patches.
                rows = here if len(media[name]) == len(grids) else torch.repeat_interleave(here, grids.prod(-1))
                inputs[name] = media[name].index_select(0, rows.nonzero().squeeze(1))
        return inputs
