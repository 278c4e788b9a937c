"""The vision tower's work, split by whole images over the ranks that share their rows (sp x tp).

Each rank encodes its part of the micro-batch's distinct images and videos, of about equal cost, and all ranks get all features.
The tower's weights see a part of the images on each rank, so their gradients are sums over sp x tp: FSDP sums over dp x
sp, `workers.parallel.tensor.TensorParallel.sum_gradients` over tp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.planning import balance
from dataproto.transfer import move
from dataproto.vlm import VLMFamily
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel.transform import Transform
from workers.ranks.autograd_collectives import Peers, gather_split
from workers.ranks.mesh import Ranks


class VisionSplit(Transform):
    """Images and videos, split over sp x tp."""

    @classmethod
    def is_due(cls, ranks: Ranks, options: ModelConfig) -> bool:
        return ranks.size("sp", "tp") > 1

    def apply(self, module: PackedVLM) -> None:
        """Gives ``module`` a `SplitFeatures`."""
        module.features = SplitFeatures(module.family, Peers.of(self.mesh("sp", "tp").get_group()))


@dataclass(frozen=True)
class SplitFeatures:
    """`VLMFamily.features`, computed by several ranks that are given the same media.

    A rank without a part encodes the smallest image and drops its features, so that sharded weights are gathered on all ranks;
    its gradient is zero.
    """

    family: VLMFamily
    peers: Peers

    def __call__(self, model: Any, media: Mapping[str, Tensor]) -> Tensor:
        """Features ``(F, levels, H)`` of all media, in their order."""
        family, config = self.family, model.config
        kinds = {kind: family.media_layout.grids(kind, media, config).cpu() for kind in ("image", "video")}
        grids = torch.cat(list(kinds.values()))
        counts = grids.prod(-1) // family.merge_size(config) ** 2
        costs = family.vision_flops(config, grids).sum(1)
        shares = [torch.from_numpy(share) for share in balance(costs, self.peers.size)]
        longest = max(int(counts[share].sum()) for share in shares)
        mine = shares[self.peers.rank]
        if len(mine):
            features = family.features(model, self._part(media, mine, kinds))
        else:
            dummy = {name: x.to(_device_of(media, x.dtype)) for name, x in family.dummy_media(config).items()}
            features = family.features(model, dummy)[:0]
        features = pad(features, (0, 0, 0, 0, 0, longest - len(features)))
        features = gather_split(features, self.peers)  # each rank places those of its own tokens
        return features.index_select(0, move(_places(shares, counts, longest), features.device))

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
                inputs[name] = media[name].index_select(0, move(rows.nonzero().squeeze(1), media[name].device))
        return inputs


def _places(shares: Sequence[Tensor], counts: Tensor, longest: int) -> Tensor:
    """Index of each feature ``(F,)`` of media with ``counts (N,)`` in the joined shares, each filled up to ``longest``.

    >>> _places([torch.tensor([1]), torch.tensor([0, 2])], torch.tensor([1, 3, 1]), longest=3).tolist()
    [3, 0, 1, 2, 4]
    """
    starts = torch.zeros(len(counts), dtype=torch.int64)
    for number, share in enumerate(shares):
        starts[share] = number * longest + counts[share].cumsum(0) - counts[share]
    ends = counts.cumsum(0)
    return torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - ends + counts, counts)


def _device_of(media: Mapping[str, Tensor], dtype: torch.dtype) -> torch.device:
    """The device of pixels, or of grids."""
    return next(x.device for x in media.values() if x.is_floating_point() == dtype.is_floating_point)
